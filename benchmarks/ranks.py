"""Several ranks on this machine: train.py's modes, the group of weights, and members that are lost.

    NCCL_LIBRARY=.../libnccl.so.2 python benchmarks/ranks.py [--json PATH] [--quick] [--parts transfer,modes,lost]

Without enough GPUs for the ranks they share one over nccl, of which 2.30 or later is needed (`pip download
nvidia-nccl-cu13==2.30.7`, unpacked); without any they run over gloo. Parts:
  transfer  `WeightGroup` of a trainer and workers in processes of their own. `gb_per_s` are the trainer's bytes to two
            workers, of 8 buckets, the second time; `wrong` counts tensors that came with other bits. Then one member is
            killed or stopped in the middle, or while the group is made: `after_s` is when the other has its error, and
            `works_after` that its own collectives or its device still work
  modes     as train_modes.py, on 2 and 4 ranks: differences from fp32 on one CPU rank. They run side by side: their
            seconds say nothing
  lost      a rank of an FSDP2 run is killed or stopped: `ended_after_s` is when torchrun has ended all, to be compared
            with `collective_timeout`; `says` is what names the cause
"""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import psutil
import torch
import torch.distributed as dist

from benchmarks.common import Rows, Skipped, arguments, device_here, lines
from benchmarks.local_server import stand_in
from benchmarks.train_modes import (
    FSDP_BF16,
    FSDP_FP32,
    LORA,
    RECIPE,
    References,
    answer,
    build_random,
    command_of,
    shares_one_gpu,
    sharing_one_gpu,
)
from utils import die_with, process_group
from weights.group import Meeting, WeightGroup, packed

SPAWN = multiprocessing.get_context("spawn")
PARTS = ("transfer", "modes", "lost")

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


def lead(link: Any, world_size: int, backend: str, num_values: int, parent: int) -> None:
    """The trainer, which does what comes over the link and answers each command."""
    die_with(parent)
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


def follow(link: Any, rank: int, meeting: Meeting, num_values: int, parent: int) -> None:
    """A worker, which tells what came until an error, and then whether its device works."""
    die_with(parent)
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
    """A trainer, member 0, and workers, in processes that end with this one."""

    def __init__(self, num_workers: int, backend: str, num_values: int):
        self.workers = range(1, 1 + num_workers)
        self.processes: list[Any] = []
        self.links: list[Any] = []
        self._start(lead, 1 + num_workers, backend, num_values)
        meeting = self.heard(0)
        for rank in self.workers:
            self._start(follow, rank, meeting, num_values)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        here, there = SPAWN.Pipe()
        process = SPAWN.Process(target=target, args=(there, *arguments, os.getpid()), daemon=True)
        process.start()
        there.close()
        self.processes.append(process)
        self.links.append(here)

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

    def end(self) -> None:
        """End all."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


@contextmanager
def members(num_workers: int, backend: str, num_values: int, is_met: bool = True) -> Iterator[Any]:
    """Members, who have met unless they are to be asked to."""
    group = Members(num_workers, backend, num_values)
    try:
        for rank in group.workers:
            group.until(rank, "meets")
        if is_met:
            _, error = group.tell("meet")
            if error:
                raise RuntimeError(error)
        yield group
    finally:
        group.end()


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


def transfers(is_quick: bool) -> list[tuple[dict[str, Any], Callable[[], dict[str, Any]], bool]]:
    """Names, what measures, and whether it must run alone."""
    num_values = 1 << 20 if is_quick else 1 << 26
    num_few = num_values if is_quick else 1 << 24  # where several cases run side by side
    is_cuda = device_here().type == "cuda"
    backend = "nccl" if is_cuda else "gloo"
    jobs: list[tuple[str, Callable[[], dict[str, Any]], bool]] = [
        ("speed", partial(speed, backend, 2, num_values), True)
    ]
    if torch.cuda.device_count() == 1:
        jobs.append(("speed, ipc", partial(speed, "ipc", 1, num_values), True))
    for verb, number in SIGNALS.items():
        jobs.append((f"worker {verb}", partial(lost_worker, backend, number, num_few), False))
        jobs.append(
            (f"trainer {verb}", partial(lost_trainer, backend, number, num_few, None), False)
        )
    if not is_quick:
        for verb, number in SIGNALS.items():
            of_worker = partial(lost_in_meeting, backend, number, num_few)
            jobs.append((f"worker {verb} in meeting", of_worker, False))
            for wait_s in (0.0, 0.05, 0.2, 0.5):
                of_trainer = partial(lost_trainer, backend, number, num_few, wait_s)
                jobs.append((f"trainer {verb} {wait_s:g} s into meeting", of_trainer, False))

    def checked(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if is_cuda:
            shares_one_gpu(3)
        return job()

    return [
        ({"part": "transfer", "case": case, "backend": backend}, partial(checked, job), is_alone)
        for case, job, is_alone in jobs
    ]


# -- Modes of train.py -----------------------------------------------------------------------------

TWICE = {"bf16": False, "num_minibatches": 2, "beta": 0.05}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "DDP fp32": (2, {"bf16": False}),
    "FSDP2 fp32": (2, FSDP_FP32),
    "DDP bf16": (4, {"bf16": True}),
    "HSDP fp32, shards of 2": (4, {**FSDP_FP32, "fsdp_shard_size": 2}),
    "FSDP2 fsdp_bf16": (4, FSDP_BF16),
    "FSDP2 fp32, offload": (2, {**FSDP_FP32, "fsdp_offload": True}),
    "LoRA DDP bf16": (2, {**LORA, "bf16": True}),
    "LoRA FSDP2 fp32": (2, {**LORA, **FSDP_FP32}),
    "LoRA FSDP2 fsdp_bf16": (4, {**LORA, **FSDP_BF16}),
    "DDP fp32, 2 mini-batches, beta": (2, TWICE),
}
QUICK = ("DDP fp32", "LoRA FSDP2 fp32")


# -- A rank that is lost ---------------------------------------------------------------------------


def ranks_of(torchrun: psutil.Process) -> dict[str, psutil.Process]:
    """The processes of torchrun's ranks, by rank."""
    return {process.environ()["RANK"]: process for process in torchrun.children()}


def lost_rank(folder: Path, model: str, rank: str, number: int, timeout_s: int) -> dict[str, Any]:
    """A rank of FSDP2 on 2 ranks gets the signal after its third step."""
    with (
        stand_in(model, answer) as (url, _),
        tempfile.TemporaryDirectory(dir=folder) as own,
        tempfile.TemporaryFile("w+") as log,
    ):
        recipe, output = Path(own) / "recipe_of_ranks.py", Path(own) / "output"
        recipe.write_text(RECIPE.format(model=model, url=url, steps=100_000))
        fields = {
            **FSDP_FP32, "collective_timeout": timeout_s, "output_dir": output, "log_steps": 1,
        }  # fmt: skip
        command, env = command_of(recipe, fields, num_ranks=2)
        process = psutil.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=env, text=True,
            preexec_fn=partial(die_with, os.getpid()),
        )  # fmt: skip
        try:
            deadline_s = time.monotonic() + 120
            while len(lines(output / "metrics.jsonl")) < 3:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    log.seek(0)
                    raise RuntimeError(f"no third step: {log.read()[-250:]}")
                time.sleep(0.2)
            ranks = ranks_of(process)
            ranks[rank].send_signal(number)
            moment_s = time.monotonic()
            other = ranks["0" if rank == "1" else "1"]
            found: dict[str, Any] = {"collective_timeout_s": timeout_s}
            while process.poll() is None and time.monotonic() < moment_s + timeout_s + 150:
                if "other_ended_after_s" not in found and not is_running(other):
                    found["other_ended_after_s"] = time.monotonic() - moment_s
                time.sleep(0.1)
            found["ended_after_s"] = time.monotonic() - moment_s
            if process.poll() is None:
                raise RuntimeError(f"it has not ended after {found['ended_after_s']:.0f} s")
        finally:
            with suppress(psutil.NoSuchProcess):
                for child in process.children():
                    child.kill()
            process.kill()
            process.wait()
        log.seek(0)
        text = log.read()
        causes = re.findall(r".*(?:Watchdog caught|imed out|exitcode|another rank ended).*", text)
        says = [" ".join(cause.split())[:240] for cause in causes[:6]]
        return {**found, "status": process.returncode, "says": says}


def is_running(process: psutil.Process) -> bool:
    """False for a process that has ended, even if nobody has taken note."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


# -- All of it -------------------------------------------------------------------------------------


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "few cases, small, for a CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    args = parser.parse_args()
    parts = args.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts {args.parts}: there are {', '.join(PARTS)}")

    with suppress(Skipped):
        if shares_one_gpu(4):  # before the first of the processes that inherit this
            os.environ.update(sharing_one_gpu())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = Rows(args.json)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max(1, cores // 2)) as pool:
        folder = Path(name)
        model = build_random(folder / "model")
        jobs: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = []
        if "transfer" in parts:
            for names, job, is_alone in transfers(args.quick):
                if is_alone:
                    rows.measure(names, job)
                else:
                    jobs.append((names, job))
        if "lost" in parts and not args.quick:
            for verb, number in SIGNALS.items():
                for rank in ("0", "1"):
                    names = {"part": "lost", "case": f"rank {rank} of FSDP2 {verb}"}
                    jobs.append((names, partial(lost_rank, folder, model, rank, number, 20)))
        if "modes" in parts:
            references = References(folder, model, 2 if args.quick else 4)
            for mode in QUICK if args.quick else MODES:
                names = {"part": "mode", "mode": mode, "ranks": MODES[mode][0]}
                jobs.append((names, partial(references.compared, *MODES[mode])))
        runs = [(names, pool.submit(job)) for names, job in jobs]
        for names, run in runs:
            rows.measure(names, run.result)


if __name__ == "__main__":
    main()
