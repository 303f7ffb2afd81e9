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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 32 << 20  # per broadcast; two are alive at a time: one is loaded while the next is gathered
FOR_EVER = timedelta(days=30)  # ranks wait for rank 0 as long as it waits for the servers, which has a limit of its own

# -- Ranks and collectives ---------------------------------------------------------------------------------------------

_from_main: Any = None  # the gloo group that carries objects from rank 0 to the other ranks


@contextmanager
def process_group(timeout_s: float) -> Iterator[torch.device]:
    """Bring the world of this run up and down: torchrun's ranks, or a world of one. Yields this rank's device.

    Tensors on CUDA travel over nccl, everything else over gloo. `timeout_s` bounds every collective but the wait for an
    object from rank 0.
    """
    global _from_main
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    world: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **world)
    _from_main = dist.new_group(backend="gloo", timeout=FOR_EVER)
    try:
        yield device
    except BaseException:
        if dist.get_world_size() == 1:
            dist.destroy_process_group()
        raise  # peers may wait in a collective, and tearing down could hang: torchrun ends them once this rank is gone
    # The end of a gloo group holds Python's lock while it waits for the group's threads, and these may be waiting for
    # that lock to free the last collective's tensors (torch 2.13): let them have it first.
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
        if bucket and sum(t.nbytes for t in bucket.values()) + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket


class TransferGroup:
    """A process group between one trainer (rank 0) and the workers of one server (ranks 1 to world_size - 1).

    Every member tells the others its device through the store, a TCPStore that the trainer hosts. The group then runs
    over nccl where all members sit on different GPUs, and over gloo elsewhere (on a CPU, or on one GPU shared by
    server and trainer, which nccl refuses). Every broadcast may take `timeout_s` seconds.
    """

    def __init__(self, store: dist.TCPStore, rank: int, world_size: int, device: torch.device, timeout_s: float):
        is_cuda = device.type == "cuda"
        store.set(f"device/{rank}", str(torch.cuda.get_device_properties(device).uuid) if is_cuda else "cpu")
        devices = [store.get(f"device/{member}").decode() for member in range(world_size)]
        use_nccl = "cpu" not in devices and len(set(devices)) == world_size
        self.backend = "nccl" if use_nccl else "gloo"
        self.device = device if use_nccl else torch.device("cpu")
        prefix = dist.PrefixStore(f"weights/{self.backend}", store)
        kind: Any = dist.ProcessGroupNCCL if use_nccl else dist.ProcessGroupGloo
        options = kind.Options() if use_nccl else kind._Options()
        options._timeout = timedelta(seconds=timeout_s)
        if not use_nccl:
            options._devices = [kind.create_device(hostname=address_towards(store.host))]
        self._group = kind(prefix, rank, world_size, options)
        self._store = store  # the group lives as long as its store

    def send(self, bucket: dict[str, Tensor]) -> list[Any]:
        """Start the broadcast of named tensors, of any shape and dtype, from rank 0; an empty bucket ends the stream.

        Tensors that are contiguous and on the group's device (the CPU for gloo) are not copied: they must not change
        until `wait()` of every returned handle is over.
        """
        entries = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in bucket.items()]
        # BUCKET_BYTES, too: the receiver must cut tensors into the same pieces.
        header = torch.tensor(list(json.dumps([BUCKET_BYTES, entries]).encode()), dtype=torch.uint8)
        handles = [*self._broadcast(torch.tensor([len(header)])), *self._broadcast(header)]
        for tensor in bucket.values():
            handles += self._broadcast(tensor.reshape(-1).view(torch.uint8), BUCKET_BYTES)
        return handles

    def receive(self) -> dict[str, Tensor]:
        """The next bucket that rank 0 sends, in fresh memory; empty at the end of the stream.

        Shapes and dtypes are the sender's; the tensors are on the group's device (the CPU for gloo).
        """
        size = self._receive_into(torch.zeros(1, dtype=torch.int64, device=self.device))
        header = self._receive_into(torch.empty(int(size), dtype=torch.uint8, device=self.device))
        piece_bytes, entries = json.loads(bytes(header.tolist()))
        bucket = {}
        for name, dtype, shape in entries:
            bucket[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self._receive_into(bucket[name].view(-1).view(torch.uint8), piece_bytes)
        return bucket

    def _broadcast(self, data: Tensor, piece_bytes: int | None = None) -> list[Any]:
        data = data.to(self.device)
        pieces = data.split(piece_bytes) if piece_bytes else [data]
        return [self._group.broadcast([piece], dist.BroadcastOptions()) for piece in pieces]

    def _receive_into(self, data: Tensor, piece_bytes: int | None = None) -> Tensor:
        for handle in self._broadcast(data, piece_bytes):
            handle.wait()
        if self.device.type == "cuda":  # nccl's wait orders streams only; other threads read the bytes
            torch.cuda.current_stream(self.device).synchronize()
        return data

    def trainer_lives(self) -> bool:
        """Whether the process that hosts the store still does."""
        try:
            self._store.check(["device/0"])
        except RuntimeError:  # torch's DistError: its end of the connection is closed
            return False
        return True

    def close(self) -> None:
        """Leave the group; what the other side is waiting for fails there."""
        self._group.shutdown()
        self._group = None


def address_towards(host: str) -> str:
    """The address of this machine on the route to `host` (no packet is sent)."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def api_token() -> str:
    """The secret that servers and trainer share: `VLLM_API_KEY`, without a line's end; empty where it is not set."""
    return os.environ.get("VLLM_API_KEY", "").strip()


# -- Clocks, signals, the end of a process -----------------------------------------------------------------------------


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
    """SIGINT and SIGTERM set the event; a second one ends the process at once.

    A terminal signals torchrun and its ranks, and torchrun passes its own signal on: a second one within half a second
    is the same. torchrun kills ranks that have not ended after 30 s.
    """
    first_s = math.inf

    def note(number: int, _: Any) -> None:
        nonlocal first_s
        if time.monotonic() > first_s + 0.5:
            os._exit(128 + number)
        if not stop.is_set() and is_main():
            first_s = time.monotonic()
            name, cure = signal.Signals(number).name, "--resume_from_checkpoint auto goes on from it"
            line = f"{name}: saving the last whole step ({cure}); once more ends at once\n"
            with suppress(OSError):
                os.write(1, line.encode())  # print() may be what the signal interrupted
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with(parent: int) -> None:
    """Let the kernel end this process with the one that started it (Linux), however that ends."""
    if sys.platform == "linux":
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
def exits(*kinds: type[Exception]) -> Iterator[None]:
    """Run the block, then end the process: errors of `kinds`, which the user can mend, in one line, others in full.

    `os._exit`, because threads with requests in flight, and gloo's own, would keep the process waiting or abort it.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    both = (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = (_Terminal(s.buffer, "utf-8", "backslashreplace", line_buffering=True) for s in both)
    rank = os.environ.get("RANK", "0")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # torchrun: without it, ranks would train on beside those of the next run
    status = 1
    report = get_error_handler()  # torchrun ends its own report with the first error that is recorded here
    report.initialize()
    try:
        yield
        status = 0
    except kinds as error:
        report.record_exception(error)
        print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        lost_peer = isinstance(error, RuntimeError) and re.search(r"onnection (closed|reset) by peer", str(error))
        if lost_peer and "RANK" in os.environ:
            print(f"rank {rank} stopped, as another rank ended first: {str(error).splitlines()[0]}", file=sys.stderr)
            time.sleep(3)  # torchrun sees that rank first, whose error is the cause, and ends this one
        else:
            report.record_exception(error)
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
