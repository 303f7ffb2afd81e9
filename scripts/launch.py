"""Start the servers and the trainer of a recipe on this machine, and end them together.

    python scripts/launch.py recipe.py --learning_rate 2e-6             # one server, one rank
    python scripts/launch.py recipe.py --servers 2 --trainers 4 --server_options="--quantization fp8"
    python scripts/launch.py recipe.py --print                          # the commands, to run by hand
    python scripts/launch.py recipe.py --slurm job.sh --server_nodes 1 --trainer_nodes 2

Each gets its own GPUs, the servers first. With one GPU in all, one server and one rank share it, and max_staleness is 0
where neither the command line nor the recipe sets it; with none, they share the CPU cores. A server that dies is
started again, and given up if that was less than ten minutes ago. All other options are fields of TrainConfig, as of
`train.py`.
"""

import argparse
import json
import math
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import TrainConfig, UserError, changed_fields, lora_options, parse_args
from rollouts.workers import die_with, keep_outputs

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# For torchrun, which passes the last one on to its ranks only if it is asked to.
PASSED_ON = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"}
Command = tuple[list[str], dict[str, str]]  # its words, and what it needs in its environment
WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    """A TCP port on loopback that nobody listens on, and that the system gives to nobody who asks for any port."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)  # Linux gives out those above
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def popen(command: list[str], log: Path | None, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output here or in a log; it ends with this process."""
    with log.open("ab") if log else nullcontext() as out:
        end = partial(die_with, os.getpid())
        return subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, preexec_fn=end, env=env
        )


def end_all(processes: Sequence[Any]) -> None:
    """End the sessions of these processes: SIGTERM to all, and SIGKILL to what is left after 40 seconds."""
    patience = {signal.SIGTERM: 40, signal.SIGKILL: 5}  # seconds; torchrun gives its ranks 30
    for kind, patience_s in patience.items():
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
        deadline_s = time.monotonic() + patience_s
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline_s - time.monotonic(), 0))


@dataclass
class LocalServer:
    """A starting or running server: its address, process and log file."""

    url: str
    process: Any
    log: Path
    restarted_s: float = -math.inf

    def wait(self, timeout_s: float = 240) -> str:
        """Wait until it serves; returns its address. RuntimeError with the log's end: it ended, or takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with suppress(OSError), WITHOUT_PROXY.open(f"{self.url}/health", timeout=2):
                return self.url
            status = self.process.poll()
            if status is None and time.monotonic() < deadline_s:
                time.sleep(0.5)
                continue
            how = "ended before it served"
            if status is None:
                how = f"did not serve within {timeout_s:.0f} s"
            elif status < 0:
                how = f"was ended by {signal.Signals(-status).name} before it served"
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            told = f"the server at {self.url} {how}, and the end of {self.log} is"
            raise RuntimeError(f"{told}\n{tail}")


def gpus_here() -> list[str]:
    """The GPUs in CUDA_VISIBLE_DEVICES or, where it is not set, those that nvidia-smi lists."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return list(takewhile(lambda name: name not in ("", "-1"), names))
    with suppress(OSError, subprocess.SubprocessError):
        ask = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.split()
    return []


def shares(gpus: list[str], sizes: list[int]) -> list[dict[str, str]]:
    """The variables that give the servers and then the trainer, of these sizes, their GPUs or CPU cores."""
    if not gpus and sizes == [1, 1]:
        return [{}, {}]  # each takes half of the cores by itself
    if not gpus:
        threads = str(max(len(os.sched_getaffinity(0)) // sum(sizes), 1))
        return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)} for _ in sizes]
    if len(gpus) == 1 and sizes == [1, 1]:
        gpus = gpus * 2
    if sum(sizes) > len(gpus):
        needed = " + ".join(map(str, sizes))
        there = f"and {len(gpus)} are here: ask for fewer of them"
        raise UserError(f"servers and trainer need {needed} GPUs, {there}")
    ends = zip(accumulate(sizes), sizes, strict=True)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[end - size : end])} for end, size in ends]


def says_staleness(words: list[str], config: TrainConfig) -> bool:
    """True where a run's arguments or its recipe say how far rollouts run ahead, if only that it is the default."""
    if changed_fields(config) & {"max_staleness", "inflight_updates"}:
        return True
    given = [word.replace("-", "_").startswith("__max_staleness") for word in words]
    is_recipe = bool(words) and not words[0].startswith("-")
    text = Path(words[0]).read_text() if is_recipe else ""
    return any(given) or re.search(r"\bmax_staleness\W{0,3}[=:]", text) is not None


def base_folder(config: TrainConfig) -> str:
    """Where the servers find the base of `base_4bit`, dequantized."""
    return os.path.join(config.output_dir, "base")


def server_words(args: argparse.Namespace, config: TrainConfig, has_gpu: bool = True) -> list[str]:
    """The command line of a server of the recipe's model, but for its port."""
    path = Path(config.model_id) / "config.json"
    model: dict[str, Any] = {}
    try:
        # To print a command, nothing is asked of the hub: the server finds its length by itself.
        if not path.exists() and not (args.print or args.slurm):
            from huggingface_hub import hf_hub_download  # takes a second to import

            path = Path(hf_hub_download(config.model_id, path.name))
        if path.exists():
            model = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        told = f"model_id={config.model_id} is no model's folder, nor on the hub: {cause}"
        raise UserError(told) from error
    # The trainer takes at most max_tokens_per_gpu tokens of prompt and completion, so longer ones need no room.
    context = (model | (model.get("text_config") or {})).get("max_position_embeddings", 0)
    length = "auto"  # as long as it can
    if config.max_tokens_per_gpu <= context:
        length = str(config.max_tokens_per_gpu)
    if re.search("longrope|dynamic|'(su|yarn)'", str(model)):  # Phi-3 had other names for longrope
        from prefix_attention import rope_limit  # these import torch, which takes seconds
        from training.loading import load_model_config

        limit = rope_limit(load_model_config(config)[0])
        if limit < math.inf:
            length = str(min(limit, config.max_tokens_per_gpu))
    words = [sys.executable, os.path.relpath(ROOT / "vllm_server.py")]
    if config.base_4bit:
        words += ["--model", base_folder(config), "--served-model-name", config.model_id]
    else:
        words += ["--model", config.model_id]
    words += ["--max-model-len", length]
    if args.tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(args.tensor_parallel)]
    if config.processor_kwargs:
        words += ["--mm-processor-kwargs", json.dumps(config.processor_kwargs)]
    if config.trust_remote_code:
        words.append("--trust-remote-code")
    # An adapter is sent alone where that pays: a CPU samples faster from merged weights, and vLLM
    # has no place for adapters of a vision tower. A base in 4 bits cannot be merged.
    is_text = bool(model) and "vision_config" not in model  # unknown for one that is only printed
    prefers_adapter = config.use_peft and has_gpu and is_text
    if prefers_adapter or config.base_4bit:
        words += lora_options(config.lora_rank)
    return words


def commands(
    args: argparse.Namespace, trainer: list[str], config: TrainConfig
) -> tuple[dict[str, Command], Command]:
    """The servers by address, and the trainer, each with its share of this machine."""
    gpus = gpus_here()
    num_servers = args.servers if config.vllm_urls else 0
    *given, env = shares(gpus, [*[args.tensor_parallel] * num_servers, args.trainers])

    words = server_words(args, config, bool(gpus)) if given else []
    is_shared = bool(gpus) and env in given  # a server has the trainer's GPU
    if is_shared and not says_staleness(trainer[1:], config):
        # Side by side each slows the other by more than it hides (docs/results.md).
        trainer = [*trainer, "--max_staleness", "0"]
        config = replace(config, max_staleness=0)
    if args.sleep and not is_shared:
        raise UserError("--sleep: server and trainer share no GPU here")
    if args.sleep and config.max_staleness > 0:
        raise UserError("--sleep: the server samples while the trainer trains: set max_staleness=0")
    if is_shared:  # a trainer beside one that sleeps keeps weights and moments, and no activations
        words += ["--gpu-memory-utilization", "0.6" if args.sleep else "0.35"]
    if args.sleep:
        words.append("--enable-sleep-mode")
    words += shlex.split(args.server_options)
    servers = {}
    for own in given:
        port = str(free_port())
        servers[f"http://127.0.0.1:{port}"] = ([*words, "--port", port], own)

    command = [sys.executable]
    if args.trainers > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command.append(f"--nproc_per_node={args.trainers}")
    command += trainer
    if servers:
        command += ["--vllm_urls", ",".join(servers)]
    return servers, (command, env)


def slurm_job(args: argparse.Namespace, trainer: list[str], config: TrainConfig) -> str:
    """A batch script for Slurm, which runs servers on its first nodes and the trainer on the others."""
    if args.gpus_per_node % args.tensor_parallel:
        raise UserError(f"--gpus_per_node {args.gpus_per_node} is no multiple of --tensor_parallel")
    output = os.path.abspath(config.output_dir)
    resume = ["--resume_from_checkpoint", config.resume_from_checkpoint or "auto"]
    return f"""#!/bin/bash
#SBATCH --nodes={args.server_nodes + args.trainer_nodes} --exclusive --mem=0 --gpus-per-node={args.gpus_per_node}
cd {shlex.quote(os.getcwd())}
output={shlex.quote(output)} python={shlex.quote(sys.executable)}
server_nodes={args.server_nodes} gpus_per_node={args.gpus_per_node} tensor_parallel={args.tensor_parallel}
server=({shlex.join([*server_words(args, config), *shlex.split(args.server_options)])})
trainer=({shlex.join([*trainer, "--vllm_urls", f"@{output}/servers.txt", *resume])})

{(ROOT / "scripts" / "slurm.sh").read_text()}"""


def restart_ended(running: list[LocalServer], servers: dict[str, Command]) -> None:
    """Start servers again that have ended; one that did so less than ten minutes ago is given up."""
    ended = [server for server in running if server.process.poll() is not None]
    for server in ended:
        if time.monotonic() < server.restarted_s + 600:
            told = f"the server at {server.url} ended again, and is given up (log: {server.log})"
            print(told, flush=True)
            running.remove(server)
            continue
        print(f"the server at {server.url} ended, and starts again (log: {server.log})", flush=True)
        words, env = servers[server.url]  # the trainer takes it back once it serves
        server.process = popen(words, server.log, os.environ | env)
        server.restarted_s = time.monotonic()


def run(
    servers: dict[str, Command], trainer: Command, folder: Path, timeout_s: float,
    preparation: Sequence[str] = (),
) -> int:  # fmt: skip
    """Run `preparation`, start the servers and then the trainer, and end all with it; returns the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        FileLock(folder / "lock").acquire(timeout=0).lock.release()  # the trainer will hold it
    except Timeout:
        raise UserError(f"output_dir={folder} has another run in it: end it first") from None
    if preparation:
        subprocess.run(preparation, check=True)
    running: list[LocalServer] = []
    training: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        """Let the trainer save its last step and end; a second signal ends it at once."""
        received.append(number)
        if not training:
            sys.exit(128 + number)
        training[0].send_signal(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, pass_on)
    try:
        for url, (words, env) in servers.items():
            log = folder / f"server-{len(running)}.log"
            if log.exists():
                log.rename(f"{log}.old")
            print(f"starting the rollout server at {url} (log: {log})", flush=True)
            running.append(LocalServer(url, popen(words, log, os.environ | env), log))
        for server in running:
            print(f"{server.wait(timeout_s)} serves", flush=True)
        training.append(popen(trainer[0], None, PASSED_ON | os.environ | trainer[1]))
        while (status := training[0].poll()) is None:
            if not received:
                restart_ended(running, servers)
            time.sleep(0.5)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        end_all([*training, *(server.process for server in running)])
    if status < 0 and not received:
        sys.exit(f"error: {signal.Signals(-status).name} ended the trainer")
    return status if status >= 0 else 128 - status


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str], TrainConfig]:
    """Launch options, the trainer's arguments, and their config; SystemExit with one line if they are wrong."""
    parser = argparse.ArgumentParser(
        usage="launch.py [recipe.py] [options] [--field value ...]", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    here = {"servers": 1, "trainers": 1}
    there = {"server_nodes": 1, "trainer_nodes": 1, "gpus_per_node": 8}
    for name, default in (here | {"tensor_parallel": 1} | there).items():
        text = f"default {default}"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument(
        "--server_options", default="", metavar="WORDS", help="of vLLM, as ='--quantization fp8'"
    )
    text = "let the server leave a shared GPU to the trainer while that trains, at max_staleness 0"
    parser.add_argument("--sleep", action="store_true", help=text)
    parser.add_argument(
        "--doctor", action="store_true", help="run scripts/doctor.py in place of train.py"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--print", action="store_true", help="print the commands, start nothing")
    instead.add_argument(
        "--slurm", type=Path, metavar="FILE", help="write a batch script for several nodes"
    )
    args, words = parser.parse_known_args(argv)
    for name, default in (here if args.slurm else there).items():
        if getattr(args, name) != default:
            sys.exit(f"error: --{name} has no effect {'with' if args.slurm else 'without'} --slurm")
    if min(getattr(args, name) for name in (*here, "tensor_parallel", *there)) < 1:
        sys.exit("error: numbers of servers, trainers, nodes and GPUs are 1 or more")
    if args.sleep and (args.slurm or args.doctor):
        sys.exit("error: --sleep has no effect with --slurm or --doctor")
    if args.doctor and args.slurm:
        sys.exit("error: --doctor has no effect with --slurm")
    if any(word.partition("=")[0].replace("-", "_") == "__vllm_urls" for word in words):
        cure = "for servers that run, there is train.py"
        sys.exit(f"error: --vllm_urls: servers are started here; {cure}")
    try:
        return args, words, parse_args(words)
    except UserError as error:
        sys.exit(f"error: {error}")


def main(argv: list[str]) -> None:
    """Do what the command line says; SystemExit with the status of the run, or one line of what is wrong."""
    args, words, config = parse(argv)
    trainer = [os.path.relpath(ROOT / ("scripts/doctor.py" if args.doctor else "train.py")), *words]
    try:
        if args.slurm:
            if config.base_4bit:
                cure = "docs/operations.md has the commands"
                raise UserError(f"--slurm: it writes no base for base_4bit; {cure}")
            args.slurm.write_text(slurm_job(args, trainer, config))
            print(f"sbatch {shlex.quote(str(args.slurm))}")
            return
        servers, training = commands(args, trainer, config)
        preparation: list[str] = []
        if servers and config.base_4bit:  # its base is written at each start anew
            script = os.path.relpath(ROOT / "scripts" / "dequantize.py")
            preparation = [sys.executable, script, base_folder(config), *words]
        if not args.print:
            folder = Path(config.output_dir)
            if not args.doctor:
                print(f"watch the run in a browser: `python scripts/show.py {folder} --serve`")
            sys.exit(run(servers, training, folder, config.server_timeout, preparation))
        if preparation:
            print(shlex.join(preparation))
        for program, env in (*servers.values(), training):
            variables = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
            print(*variables, shlex.join(program))
    except (ValueError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")  # of a UserError, of quotes that do not match, ...


if __name__ == "__main__":
    keep_outputs()
    main(sys.argv[1:])
