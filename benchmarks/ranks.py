"""train.py's modes on one and several ranks, the group of weights, and members that are lost; on one machine.

    NCCL_LIBRARY=.../libnccl.so.2 python benchmarks/ranks.py [--json PATH] [--quick] [--parts single transfer modes lost]

Without enough GPUs for the ranks they share one over nccl, of which 2.30 or later is needed (`pip download
nvidia-nccl-cu13==2.30.7`, unpacked); without any they run over gloo. Parts:
  single    modes of one rank, against a stand-in for the server. Every run has the same random model, data, seeds and
            answers, so that only the arithmetic differs from the reference, which is fp32 on one CPU rank (with LoRA for
            the modes with LoRA, and so on). `*_difference` are the largest of all steps: of the loss (nats), and of the
            gradient's norm, relative. `mismatch` is the mean difference of the trainer's log-probs from the stand-in's,
            which computes in fp32 what it received (nats)
  modes     the same on 2 and 4 ranks; these run side by side, so their seconds say nothing
  transfer  `WeightGroup` of a trainer and workers in processes of their own. `gb_per_s` are the trainer's bytes to two
            workers, of 8 buckets, the second time; `wrong` counts tensors that came with other bits. Then one member is
            killed or stopped in the middle, or while the group is made: `after_s` is when the other has its error, and
            `works_after` that its own collectives or its device still work
  lost      a rank of an FSDP2 run is killed or stopped: `ended_after_s` is when torchrun has ended all, to be compared
            with `collective_timeout`; `says` is what names the cause
"""

import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import psutil
import torch
import torch.distributed as dist
from launch import end_all, free_port, popen

from benchmarks.common import Rows, Skipped, arguments, as_options, device_here, lines
from benchmarks.local_server import apart, random_tiny, run_train, stand_in
from utils import process_group
from weights.group import Meeting, WeightGroup, packed

PARTS = ("single", "transfer", "modes", "lost")
Job = Callable[[], dict[str, Any]]

# -- Several ranks on one GPU ----------------------------------------------------------------------


def shares_one_gpu(num_ranks: int) -> bool:
    """True where the ranks are more than the GPUs, which are not none.

    Raises:
        Skipped: nccl does not take them so.
    """
    if not 0 < torch.cuda.device_count() < num_ranks:
        return False
    if "NCCL_LIBRARY" not in os.environ:
        raise Skipped(
            f"needs {num_ranks} GPUs, or NCCL_LIBRARY=, the libnccl.so.2 of 2.30 or later"
        )
    return True


def sharing_one_gpu() -> dict[str, str]:
    """Variables for processes that are several ranks of one GPU."""
    library = str(Path(os.environ["NCCL_LIBRARY"]).resolve(strict=True))
    return {"LD_PRELOAD": library, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


# -- The group of weights --------------------------------------------------------------------------

TIMEOUT_S = 8.0  # of a group
NUM_BUCKETS = 8


def weights_of(number: int, device: torch.device, num_values: int) -> dict[str, torch.Tensor]:
    """A bucket whose values follow from its number: a matrix in fp32, which travels in bf16, and a vector."""
    generator = torch.Generator(device).manual_seed(number)
    matrix = torch.randn(1024, num_values // 1024, generator=generator, device=device)
    return {"matrix": matrix, "vector": torch.arange(7.0, device=device) + number}


def num_wrong(bucket: dict[str, torch.Tensor], number: int, num_values: int) -> int:
    """How many tensors of a received bucket differ by a bit from those that were sent."""
    device = bucket["vector"].device
    sent = weights_of(number, device, num_values)
    sent["matrix"] = sent["matrix"].bfloat16()
    return sum(not torch.equal(bucket[name], sent[name]) for name in sent)


def first_line(error: Exception) -> str:
    """The beginning of what an error says."""
    return str(error).splitlines()[0][:150]


def lead(link: Any, world_size: int, backend: str, num_values: int) -> None:
    """The trainer, which does what comes over the link and answers each command."""
    with process_group(60) as device:
        buckets = [weights_of(number, device, num_values) for number in range(NUM_BUCKETS)]
        limit = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        secret = os.urandom(16).hex()
        meeting = Meeting("127.0.0.1", store.port, secret, backend, world_size, 1, TIMEOUT_S)
        link.send(meeting)
        group: Any = None
        while (command := link.recv()) != "end":
            started_s = time.monotonic()
            error = None
            try:
                if command == "meet":
                    group = WeightGroup(meeting, 0, device, store)
                elif command == "close":
                    group.close()
                elif command == "own group":
                    ones = torch.ones(4, device=device)
                    dist.all_reduce(ones)
                    assert ones.sum().item() == 4
                else:  # a number of buckets to send
                    for bucket in buckets[:command] + [{}] * (command == NUM_BUCKETS):
                        group.send(*packed(bucket, device, torch.bfloat16))
            except RuntimeError as failed:
                error = first_line(failed)
            link.send((time.monotonic() - started_s, error))
    os._exit(0)


def follow(link: Any, rank: int, meeting: Meeting, num_values: int) -> None:
    """A worker, which tells what came until an error, and then whether its device works."""
    device = torch.device("cpu")
    if device_here().type == "cuda":
        has_own = torch.cuda.device_count() >= meeting.world_size
        device = torch.device("cuda", rank if has_own else 0)
        torch.cuda.set_device(device)
        torch.ones(1, device=device)
    link.send("meets")
    group = None
    try:
        group = WeightGroup(meeting, rank, device)
        link.send("met")
        while True:
            received = []
            while bucket := group.receive():
                received.append(bucket)
                if len(received) == 1:
                    link.send("first bucket")
            wrong = 0
            for number, bucket in enumerate(received):
                wrong += num_wrong(bucket, number, num_values)
            link.send((len(received), wrong))
    except RuntimeError as error:
        link.send(("error", first_line(error)))
        if group:
            group.close()  # ends a kernel that waits for a lost member, and so all streams
            group = None
    link.send(("works", torch.ones(4, device=device).sum().item() == 4))
    os._exit(0)


class Members:
    """A trainer, member 0, and workers, in processes that end with the block `started`."""

    def __init__(self, started: ExitStack, num_workers: int, backend: str, num_values: int):
        self.workers = range(1, 1 + num_workers)
        members = [started.enter_context(apart(lead, 1 + num_workers, backend, num_values))]
        meeting = members[0][0].recv()
        for rank in self.workers:
            members.append(started.enter_context(apart(follow, rank, meeting, num_values)))
        self.links = [link for link, _ in members]
        self.processes = [process for _, process in members]

    def heard(self, rank: int, timeout_s: float = 90.0) -> Any:
        """The next thing that a member says."""
        if not self.links[rank].poll(timeout_s):
            raise RuntimeError(f"member {rank} said nothing for {timeout_s:.0f} s")
        return self.links[rank].recv()

    def until(self, rank: int, kind: str, timeout_s: float = 90.0) -> Any:
        """The next thing of a kind that a worker says, past all others."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            said = self.heard(rank, deadline_s - time.monotonic())
            if kind in (said, said[0]):
                return said

    def tell(self, command: Any) -> Any:
        """Let the trainer do something; its seconds and its error."""
        self.links[0].send(command)
        return self.heard(0)

    def signal(self, rank: int, number: int) -> float:
        """Send a signal to a member; the moment."""
        os.kill(self.processes[rank].pid, number)
        return time.monotonic()


@contextmanager
def members(num_workers: int, backend: str, num_values: int, is_met: bool = True) -> Iterator[Any]:
    """Members, who have met unless they are to be asked to."""
    with ExitStack() as started:
        group = Members(started, num_workers, backend, num_values)
        for rank in group.workers:
            group.until(rank, "meets")
        if is_met:
            _, error = group.tell("meet")
            if error:
                raise RuntimeError(error)
        yield group


def speed(backend: str, num_workers: int, num_values: int) -> dict[str, Any]:
    """Bytes and bits of two syncs."""
    with members(num_workers, backend, num_values) as group:
        wrong = 0
        for _ in range(2):
            seconds, error = group.tell(NUM_BUCKETS)
            if error:
                raise RuntimeError(error)
            for rank in group.workers:
                wrong += group.until(rank, NUM_BUCKETS)[1]
        num_bytes = NUM_BUCKETS * 2 * num_values
        return {
            "buckets": f"{NUM_BUCKETS} x {num_bytes / NUM_BUCKETS / 1e6:.0f} MB",
            "workers": num_workers,
            "wrong": wrong,
            "seconds": seconds,
            "gb_per_s": num_bytes / seconds / 1e9,
        }


def lost_worker(backend: str, number: int, num_values: int) -> dict[str, Any]:
    """A worker of two is killed or stopped in the middle; and how the others go on."""
    with members(2, backend, num_values) as group:
        group.tell(2)
        group.until(2, "first bucket")
        moment_s = group.signal(2, number)
        _, error = group.tell(NUM_BUCKETS)
        found = {"after_s": time.monotonic() - moment_s, "says": error}
        found["close_s"], _ = group.tell("close")
        _, own_error = group.tell("own group")
        found["other_worker"] = group.until(1, "error")[1]
        found["works_after"] = own_error is None and group.until(1, "works")[1]
        if number == signal.SIGSTOP:
            group.signal(2, signal.SIGCONT)
            found["goes_on"] = group.until(2, "error")[1]
        return found


def lost_trainer(
    backend: str, number: int, num_values: int, wait_s: float | None
) -> dict[str, Any]:
    """The trainer is killed or stopped: in the middle, or `wait_s` after it began to make the group."""
    with members(1, backend, num_values, is_met=wait_s is None) as group:
        if wait_s is None:
            group.links[0].send(NUM_BUCKETS - 1)
            group.until(1, "first bucket")
        else:
            group.links[0].send("meet")
            time.sleep(wait_s)
        moment_s = group.signal(0, number)
        says = group.until(1, "error")[1]
        after_s = time.monotonic() - moment_s
        return {"after_s": after_s, "says": says, "works_after": group.until(1, "works")[1]}


def lost_in_meeting(backend: str, number: int, num_values: int) -> dict[str, Any]:
    """A worker is killed or stopped before it meets the trainer, which has heard of it."""
    with members(1, backend, num_values, is_met=False) as group:
        group.links[0].send("meet")
        moment_s = group.signal(1, number)
        _, error = group.heard(0)
        after_s = time.monotonic() - moment_s
        _, own_error = group.tell("own group")
        return {"after_s": after_s, "says": error, "works_after": own_error is None}


SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def transfers(is_quick: bool) -> dict[str, Job]:
    """What measures each case; those of speed, which run alone, come first."""
    num_values = 1 << 20 if is_quick else 1 << 26
    num_few = num_values if is_quick else 1 << 24  # where several cases run side by side
    backend = "nccl" if device_here().type == "cuda" else "gloo"
    jobs: dict[str, Job] = {"speed": partial(speed, backend, 2, num_values)}
    if torch.cuda.device_count() == 1:
        jobs["speed, ipc"] = partial(speed, "ipc", 1, num_values)
    for verb, number in SIGNALS.items():
        lost = (backend, number, num_few)
        jobs[f"worker {verb}"] = partial(lost_worker, *lost)
        jobs[f"trainer {verb}"] = partial(lost_trainer, *lost, None)
        if not is_quick:
            jobs[f"worker {verb} in meeting"] = partial(lost_in_meeting, *lost)
            jobs[f"trainer {verb} in meeting"] = partial(lost_trainer, *lost, 0.05)

    def checked(job: Job) -> dict[str, Any]:
        shares_one_gpu(3)
        return {"backend": backend, **job()}

    return {case: partial(checked, job) for case, job in jobs.items()}


# -- Modes of train.py -----------------------------------------------------------------------------

RECIPE = """
import random
from config import TrainConfig
def rows():
    rng = random.Random(0)
    return [{{"prompt": "".join(rng.choices("0123456789", k=48)) + "="}} for _ in range(64)]
def mean_id(completion_ids, **_):
    return [sum(ids) / len(ids) / 50 for ids in completion_ids]
config = TrainConfig(
    model_id={model!r}, vllm_urls=[{url!r}], dataset_id=rows, reward_funcs=[mean_id], max_completion_len=16,
    batch_size=8, num_generations=8, num_iterations=2, learning_rate=1e-3, max_staleness=0, log_steps=1,
    reward_workers=1, no_apply_chat_template=True, max_tokens_per_gpu=1024, server_timeout=60,
)
"""
LORA = {"use_peft": True, "lora_rank": 8}
FSDP_FP32 = {"use_fsdp": True, "fsdp_bf16": False, "bf16": False}
FSDP_BF16 = {"use_fsdp": True, "fsdp_bf16": True, "bf16": False}
# By ranks. `bf16` is always given, as its default depends on the device; the first of a number runs with --quick, too.
MODES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "FSDP2 fp32": FSDP_FP32,
        "fp32": {"bf16": False},
        "bf16": {"bf16": True},
        "FSDP2 fsdp_bf16": FSDP_BF16,
        "LoRA bf16": {**LORA, "bf16": True},
        "LoRA fsdp_bf16": {**LORA, **FSDP_BF16},
        "bf16, 8-bit moments": {"bf16": True, "adam_8bit": True},
    },
    2: {
        "LoRA FSDP2 fp32": {**LORA, **FSDP_FP32},
        "DDP fp32": {"bf16": False},
        "FSDP2 fp32": FSDP_FP32,
        "FSDP2 fp32, offload": {**FSDP_FP32, "fsdp_offload": True},
        "LoRA DDP bf16": {**LORA, "bf16": True},
        "DDP fp32, 2 mini-batches, beta": {"bf16": False, "num_minibatches": 2, "beta": 0.05},
    },
    4: {
        "HSDP fp32, shards of 2": {**FSDP_FP32, "fsdp_shard_size": 2},
        "DDP bf16": {"bf16": True},
        "FSDP2 fsdp_bf16": FSDP_BF16,
        "LoRA FSDP2 fsdp_bf16": {**LORA, **FSDP_BF16},
    },
}
KEPT_BY_REFERENCES = ("use_peft", "lora_rank", "adam_8bit", "num_minibatches", "beta")  # fields


def answer(prompt_ids: list[int], number: int) -> tuple[list[int], float]:
    """4 to 16 tokens that depend on nothing but prompt and number, at once."""
    rng = random.Random(1000 * sum(prompt_ids) + number)
    return [rng.randrange(5, 90) for _ in range(rng.randrange(4, 17))], 0.0


def command_of(
    folder: Path, model: str, url: str, num_ranks: int, fields: Mapping[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """The arguments of python and the variables of a run in a folder; on the CPU without ranks."""
    recipe = folder / "recipe_of_ranks.py"
    recipe.write_text(RECIPE.format(model=model, url=url))
    command = []
    env = {"OMP_NUM_THREADS": "1"}
    if num_ranks > 1:
        command += ["-m", "torch.distributed.run"]
        command += [f"--nproc_per_node={num_ranks}", f"--master_port={free_port()}"]
    if num_ranks == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif shares_one_gpu(num_ranks):
        command.append(str(ROOT / "benchmarks" / "on_one_gpu.py"))
        env |= sharing_one_gpu()
    fields = {**fields, "output_dir": folder}
    return [*command, str(ROOT / "train.py"), str(recipe), *as_options(fields)], env


def train(folder: Path, model: str, num_ranks: int, fields: Mapping[str, Any]) -> list[Any]:
    """The metrics of each step of a run of train.py; on the CPU without ranks.

    Raises:
        RuntimeError: the run failed; the message is the end of what it printed.
    """
    with stand_in(model, answer) as (url, _), tempfile.TemporaryDirectory(dir=folder) as name:
        own = Path(name)
        command, env = command_of(own, model, url, num_ranks, fields)
        run_train(command, own / "log", env)
        return [row for row in lines(own / "metrics.jsonl") if "loss" in row]


def of_reference(fields: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """The fields that a mode's reference has, too, with their values."""
    return frozenset((name, fields[name]) for name in KEPT_BY_REFERENCES if name in fields)


def compared(run: Callable[[], list[Any]], reference: Future[list[Any]]) -> dict[str, Any]:
    """The largest differences of a run from its reference, and seconds of its steps after the first."""
    rows = run()
    pairs = list(zip(rows, reference.result(), strict=True))
    norms = [(row["grad_norm"], other["grad_norm"]) for row, other in pairs]
    return {
        "steps": len(rows),
        "loss_difference": max(abs(row["loss"] - other["loss"]) for row, other in pairs),
        "grad_norm_difference": max(abs(a - b) / b for a, b in norms),
        "mismatch": max(row["sampling/sampling_logp_difference/mean"] for row in rows),
        "train_s": min(row["time/train_s"] for row in rows),
        "sync_s": min(row["time/sync_s"] for row in rows),
    }


# -- A rank that is lost ---------------------------------------------------------------------------


def lost_rank(folder: Path, model: str, rank: str, number: int) -> dict[str, Any]:
    """A rank of FSDP2 on 2 ranks gets the signal after its third step."""
    timeout_s = 20
    fields = {**FSDP_FP32, "collective_timeout": timeout_s, "max_steps": 100_000}
    with stand_in(model, answer) as (url, _), tempfile.TemporaryDirectory(dir=folder) as name:
        own = Path(name)
        log = own / "log"
        command, env = command_of(own, model, url, 2, fields)
        process = popen([sys.executable, *command], log, {**os.environ, **env})
        try:
            deadline_s = time.monotonic() + 120
            while len(lines(own / "metrics.jsonl")) < 3:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"no third step: {log.read_text()[-250:]}")
                time.sleep(0.2)
            for child in psutil.Process(process.pid).children():
                if child.environ()["RANK"] == rank:
                    child.send_signal(number)
            moment_s = time.monotonic()
            status = process.wait(timeout_s + 150)
            ended_after_s = time.monotonic() - moment_s
        finally:
            end_all([process])
        causes = r".*(?:Watchdog caught|imed out|exitcode|another rank ended).*"
        found = re.findall(causes, log.read_text())
    return {
        "collective_timeout_s": timeout_s,
        "ended_after_s": ended_after_s,
        "status": status,
        "says": [" ".join(cause.split())[:240] for cause in found[:6]],
    }


# -- All of it -------------------------------------------------------------------------------------


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "few cases, small, for a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    with suppress(Skipped):
        if shares_one_gpu(4):  # before the first of the processes that inherit this
            os.environ.update(sharing_one_gpu())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = Rows(args.json)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max(1, cores // 2)) as pool:
        folder = Path(name)
        model = random_tiny(folder / "model", sharper=3)
        waiting: list[tuple[dict[str, Any], Future[dict[str, Any]]]] = []

        def measure(names: dict[str, Any], job: Job, is_alone: bool) -> None:
            if is_alone:
                rows.measure(names, job)
            else:
                waiting.append((names, pool.submit(job)))

        names: dict[str, Any]
        if "transfer" in args.parts:
            for case, job in transfers(args.quick).items():
                names = {"part": "transfer", "case": case}
                measure(names, job, is_alone=case.startswith("speed"))
        if "lost" in args.parts and not args.quick:
            for verb, number in SIGNALS.items():
                for rank in ("0", "1"):
                    names = {"part": "lost", "case": f"rank {rank} of FSDP2 {verb}"}
                    measure(names, partial(lost_rank, folder, model, rank, number), False)

        steps = {"max_steps": 2 if args.quick else 4}
        references: dict[frozenset[tuple[str, Any]], Future[list[Any]]] = {}
        for num_ranks, modes in MODES.items():
            is_single = num_ranks == 1
            if ("single" if is_single else "modes") not in args.parts:
                continue
            for mode, fields in list(modes.items())[: 1 if args.quick else None]:
                kept = of_reference(fields)
                if kept not in references:
                    on_cpu = {**dict(kept), **steps, "bf16": False}
                    references[kept] = pool.submit(train, folder, model, 0, on_cpu)
                run = partial(train, folder, model, num_ranks, {**fields, **steps})
                names = {"part": "mode", "mode": mode, "ranks": num_ranks}
                measure(names, partial(compared, run, references[kept]), is_single)
        for names, found in waiting:
            rows.measure(names, found.result)


if __name__ == "__main__":
    main()
