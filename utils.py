"""Ranks and collectives, errors, clocks, signals, and a process's end."""

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from config import UserError
from rollouts.workers import die_with, keep_outputs

# -- Ranks and collectives -------------------------------------------------------------------------

WORD_S = 2.0  # seconds between two words of ranks while they wait for one of them


@contextmanager
def process_group(timeout_s: float) -> Iterator[torch.device]:
    """Bring the run's world up and down, and yield the rank's device.

    The world is the ranks of torchrun or its like, or a world of one, to which variables that
    another job left mean nothing.

    Raises:
        UserError: ranks do not come, or not for this world.
    """
    world: dict[str, Any] = {}
    device = torch.device("cpu")
    backend = "gloo"
    # torch 2.11 may crash where threads send in several groups and its flight recorder notes it.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    # The watchdog of nccl sleeps four times this between its time-out and the end of the process.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    place: Any = os.environ  # of this rank
    if "RANK" not in place or place.get("WORLD_SIZE", "1") == "1":
        world = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        place = {}
    elif "LOCAL_RANK" not in place:
        raise UserError("RANK is set without LOCAL_RANK: unset it, or start ranks by torchrun")
    elif "TORCHELASTIC_RUN_ID" not in place:  # of another launcher, or left by another job
        print("rank", place["RANK"], "waits for the others: to train alone, unset RANK", flush=True)

    if torch.cuda.is_available():
        device = torch.device("cuda", int(place.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl"
        with naming("--nproc_per_node: each rank needs a GPU of its own"):
            torch.cuda.set_device(device)

    with naming("the ranks do not meet: to train alone, unset RANK"):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **world)

    try:
        yield device
    except BaseException:
        # With peers, which may wait in a collective, tearing down could hang: torchrun ends them
        # once this rank is gone.
        if dist.get_world_size() == 1:
            dist.destroy_process_group()
        raise
    # The end of a gloo group holds Python's lock, which its threads need to free the last tensors
    # (torch 2.13).
    time.sleep(0.1)
    dist.destroy_process_group()


def is_main() -> bool:
    """True on rank 0, which alone talks to servers, files and people."""
    return dist.get_rank() == 0


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value`, on every rank. Collective."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def call_on_main(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0; returns its result on every rank, however long it takes.

    Collective: every rank calls it. The function must not use the ranks' group, in which a thread
    tells meanwhile that all ranks live.
    """
    value = None
    is_over = threading.Event()

    def exchange_words() -> None:
        while not all(gather_objects(is_over.wait(WORD_S))):
            pass

    with ThreadPoolExecutor(1) as threads:
        threads.submit(exchange_words)
        try:
            if is_main():
                value = function()
        finally:
            is_over.set()
    return broadcast_object(value)


def gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, on every rank. Collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- Errors and clocks -----------------------------------------------------------------------------


@contextmanager
def naming(where: str, error_type: type[UserError] = UserError) -> Iterator[None]:
    """Turn an error inside into a UserError, or another of its kinds, that says where.

    For what users bring: data, a template, a processor, a function.
    """
    try:
        yield
    except Exception as error:
        kind = "" if type(error) in (ValueError, UserError) else f"{type(error).__name__}: "
        raise error_type(" ".join(f"{where}: {kind}{error}".split())) from error


@contextmanager
def timed(name: str, metrics: dict[str, float]) -> Iterator[None]:
    """Put the seconds that the block takes into `metrics[name]`."""
    started = time.perf_counter()
    yield
    metrics[name] = time.perf_counter() - started


# -- Signals and the end of a process --------------------------------------------------------------


class Stopped(Exception):
    """The end of the run after its last whole step.

    A signal came, rank 0 noted a failure, or there are no more groups.
    """


@contextmanager
def stop_signals(stop: threading.Event) -> Iterator[None]:
    """Let the signals that end a run set the event.

    The same one a second later or more ends the process at once. Those before are copies: Slurm
    and others signal all processes, and torchrun then passes its own on. Another one may be a
    launcher's next warning, or a terminal that closes, while the last step is being saved.
    """
    first_s: dict[int, float] = {}  # by signal

    def note(number: int, _: Any) -> None:
        stop.set()
        if not is_main():
            return
        now_s = time.monotonic()
        if not first_s:
            line = (
                f"{signal.Signals(number).name}: saving the last whole step, if there is one "
                "(--resume_from_checkpoint auto goes on from it); once more ends at once\n"
            )
            with suppress(OSError):  # print() may be what the signal interrupted
                os.write(1, line.encode())
        if now_s > first_s.setdefault(number, now_s) + 1.0:
            os._exit(128 + number)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]  # Slurm's, before a time limit
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exits(*kinds: type[Exception]) -> Iterator[None]:
    """Run the block, then end the process.

    Errors of these kinds, which the user can mend, print one line; others are printed in full.
    """
    keep_outputs()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Without torchrun, ranks would train on beside those of the next run.
        die_with(os.getppid())
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        # A server here has the other cores.
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    report = get_error_handler()  # torchrun ends its own report with the first error recorded here
    report.initialize()

    status = 1
    try:
        yield
        status = 0
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        who = "error" if rank == "0" else f"error on rank {rank}"
        text = str(error).strip() or repr(error)
        line = text.splitlines()[0]
        is_told = isinstance(error, kinds)
        if is_told and isinstance(error, torch.OutOfMemoryError):
            line += "; lower max_tokens_per_gpu, or set gradient_checkpoint or use_fsdp"
        is_of_ranks = isinstance(error, RuntimeError) and "RANK" in os.environ
        is_lost = is_of_ranks and re.search(r"onnection (closed|reset) by peer", text)
        if is_lost and not is_told:
            print(f"rank {rank} stopped, as another rank ended first: {line}", file=sys.stderr)
            # torchrun sees that rank first, whose error is the cause, and ends this one.
            time.sleep(3)
        else:
            report.record_exception(error)
            if is_told:
                print(f"{who}: {line}", file=sys.stderr)
            else:
                traceback.print_exc()
            if not is_told and is_of_ranks and re.search("imed out waiting|timeout caused", text):
                print(f"{who}: another rank has not answered", file=sys.stderr)

    sys.stdout.flush()
    sys.stderr.flush()
    # Threads with requests in flight, and gloo's own, would keep the process waiting or abort it.
    os._exit(status)
