"""What a run loses when its server is killed five times and its trainer three times, at random moments.

python benchmarks/chaos.py [--json PATH] [--quick] [--seed N]

The tiny recipe, undisturbed and disturbed, against the real vLLM in a shell loop that starts it again. A killed trainer
is started again with `--resume_from_checkpoint auto`.
"""

import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import psutil
from build_tiny import build
from launch import LocalServer, popen

from benchmarks.common import arguments, lines, report
from benchmarks.local_server import local_server
from config import TrainConfig, parse_args
from rollouts.data import leave_out_long, load_sets
from rollouts.scoring import check_rewards
from rollouts.servers import server_urls
from training.checkpoints import find_start


def restarting(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a shell that starts the command again when it dies."""
    return popen(["bash", "-c", 'until "$@"; do sleep 1; done', "restarting", *command], log, env)


@contextmanager
def attacks(
    metrics: Path, steps: list[int], kill: Callable[[], None], rng: random.Random
) -> Iterator[None]:
    """Call `kill` within the second after each of these steps, while the block runs."""
    over = threading.Event()

    def attack() -> None:
        for step in sorted(steps):
            while (written := lines(metrics)[-1:]) == [] or written[0]["step"] < step:
                if over.wait(0.05):
                    return
            over.wait(rng.uniform(0, 1))
            kill()

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def train(
    command: list[str],
    folder: Path,
    server: LocalServer,
    num_steps: int,
    num: dict[str, int],
    rng: random.Random,
) -> dict[str, Any]:
    """A run to its end, whatever is killed on the way.

    Raises:
        RuntimeError: it ended otherwise than by being killed, with the end of its log.
    """
    trainer: subprocess.Popen[bytes]
    killed = Counter[str]()
    log = folder.with_suffix(".log")

    def kill_trainer() -> None:
        if trainer.poll() is None:
            trainer.kill()
            killed["trainer"] += 1

    def kill_server() -> None:
        server.wait()
        (own,) = psutil.Process(server.process.pid).children()  # below the shell that restarts it
        own.kill()
        killed["server"] += 1

    def start() -> subprocess.Popen[bytes]:
        with log.open("a") as out:
            return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)

    moments = {kind: rng.sample(range(1, num_steps), count) for kind, count in num.items()}
    started_s = time.monotonic()
    trainer = start()
    with (
        attacks(folder / "metrics.jsonl", moments["server"], kill_server, rng),
        attacks(folder / "metrics.jsonl", moments["trainer"], kill_trainer, rng),
    ):
        while (status := trainer.wait()) != 0:
            if status != -signal.SIGKILL:
                raise RuntimeError(
                    f"the trainer ended with status {status}:\n{log.read_text()[-3000:]}"
                )
            trainer = start()
    return {"seconds": time.monotonic() - started_s, **killed}


def no_reward(**columns: list[Any]) -> list[None]:
    """A reward that takes any column."""
    return [None] * len(columns["prompts"])


def bad_inputs(model: str) -> tuple[int, int]:
    """Command lines and rows that are wrong: how many were refused by an error of ours, and how many there were."""
    recipe = str(ROOT / "recipes" / "tiny.py")
    commands = [
        ["--learning_rte", "1"], ["--learning_rate", "fast"], ["--batch_size", "0"], ["--beta", "nan"], ["--epsilon"],
        ["--temperature", "-1"], ["--vllm_urls", "localhost"], ["--dtype", "int8"], ["--reward_funcs", "no.such"],
        ["--lora_rank", "4"], ["--max_tokens_per_gpu", "1"], ["--num_minibatches", "7"], ["--save_steps", "-1"],
        ["--resume_from_checkpoint", ""], ["--hub_private", "maybe"], ["/nowhere.py"], ["--top_p", "0"],
        ["--seed", "x"], ["--max_steps", "1e99"], ["--keep_last_n", "0"], ["--stop", "[1"], ["--sampling_params", "{"],
    ]  # fmt: skip
    rows: list[Any] = [
        [], [{}], [{"prompt": 1}], [{"prompt": ""}], [{"prompt": []}], [{"prompt": [{"role": "user"}]}], [1], ["a"],
        [{"prompt": "a", "image": "nowhere.png"}], [{"prompt": "a", "completions": 1}], [{"prompt": "a" * 10**6}],
        [{"prompt": [{"role": "user", "content": [{"type": "video"}]}]}],
    ]  # fmt: skip
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = TrainConfig(model_id=model, dataset_id="d", reward_funcs=[no_reward])

    def start(words: list[str]) -> None:
        asked = parse_args([recipe, *words])
        server_urls(asked)
        find_start(asked)

    tried: list[Callable[[], Any]] = [partial(start, command) for command in commands]

    def load(row: list[Any]) -> None:
        of_row = replace(config, dataset_id=partial(list, row))
        prompts = load_sets("dataset_id", "train", tokenizer, of_row)[""]
        check_rewards(prompts, of_row)
        leave_out_long(prompts, 64, config)

    tried += [partial(load, row) for row in rows]
    num_refused = 0
    for attempt in tried:
        try:
            attempt()
        except ValueError:
            num_refused += 1
        except SystemExit as ending:
            num_refused += ending.code != 0
    return num_refused, len(tried)


def row_of(
    kind: str, kills: dict[str, int], folder: Path, num_steps: int, seed: int
) -> dict[str, Any]:
    """What became of all groups of a run, whose server and trainer are killed so many times."""
    model = str(folder / "model")
    output = folder / kind
    options = ["--max-model-len", "64", "--max-num-seqs", "256", "--gpu-memory-utilization", "0.3"]
    log = folder / f"{kind}.server.log"
    with local_server(model, log, *options, start=restarting) as server:
        command = [
            sys.executable, "train.py", "recipes/tiny.py", "--model_id", model, "--vllm_urls", server.wait(),
            "--dataset_id", folder / "train.jsonl", "--eval_dataset_id", folder / "heldout.jsonl",
            "--output_dir", output, "--max_steps", num_steps, "--save_steps", 2, "--keep_last_n", 2,
            "--resume_from_checkpoint", "auto", "--server_timeout", 300, "--logged_groups", "none",
        ]  # fmt: skip
        words = [str(word) for word in command]
        took = train(words, output, server, num_steps, kills, random.Random(seed))

    steps = {(row["step"], row["group"]) for row in lines(output / "completions.jsonl")}
    trained = Counter(group for _, group in steps)
    ended = trained + Counter(row["group"] for row in lines(output / "dropped.jsonl"))
    num_saved = output.with_suffix(".log").read_text().count("saved ")
    in_checkpoint = (output / f"checkpoint-{num_steps}").rglob("*")
    checkpoint_bytes = sum(path.stat().st_size for path in in_checkpoint if path.is_file())
    return {
        "run": kind,
        "servers_killed": took.get("server", 0),
        "trainers_killed": took.get("trainer", 0),
        "groups_trained": len(trained),
        "groups_lost": num_steps * 64 - len(trained) + max(ended) + 1 - len(ended),
        "groups_twice": sum(count > 1 for count in ended.values()),
        "seconds": took["seconds"],
        "accuracy": lines(output / "metrics.jsonl")[-1]["eval/accuracy"],
        "checkpoint_mb": checkpoint_bytes * num_saved / 1e6,
    }


def summary(quiet: dict[str, Any], chaos: dict[str, Any]) -> str:
    """Both runs in words."""
    num_kills = chaos["servers_killed"] + chaos["trainers_killed"]
    cost_s = (chaos["seconds"] - quiet["seconds"]) / max(num_kills, 1)
    refused = f"{quiet['bad_inputs_refused']} of {quiet['bad_inputs_tried']}"
    return (
        f"kills survived: {num_kills}; groups lost: {chaos['groups_lost']},"
        f" trained twice: {chaos['groups_twice']}\n"
        f"seconds lost per kill: {cost_s:.1f}\n"
        f"held-out accuracy: {quiet['accuracy']:.1%} undisturbed,"
        f" {chaos['accuracy']:.1%} disturbed\n"
        f"checkpoints written: {chaos['checkpoint_mb']:.0f} MB; bad inputs refused: {refused}"
    )


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "a kill of each and few steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    num_steps = 6 if args.quick else 40
    no_kills = {"server": 0, "trainer": 0}
    kills = {"server": 1, "trainer": 1} if args.quick else {"server": 5, "trainer": 3}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder, seed=0)
        quiet = row_of("undisturbed", no_kills, folder, num_steps, args.seed)
        chaos = row_of("disturbed", kills, folder, num_steps, args.seed)
        num_refused, num_tried = bad_inputs(str(folder / "model"))
    quiet |= {"bad_inputs_tried": num_tried, "bad_inputs_refused": num_refused}
    report([quiet, chaos], args.json)
    print(summary(quiet, chaos))


if __name__ == "__main__":
    main()
