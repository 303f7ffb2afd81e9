"""The process group that weights travel over: a trainer, and the workers of all its servers."""

import hashlib
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.utils.store import barrier

# Two buckets are alive at a time: one travels while the next is gathered.
BUCKET_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
CHUNK_BYTES = 4 << 20  # that a worker passes on at a time, over gloo

_making = threading.Lock()


class Meeting(msgspec.Struct, frozen=True):
    """The place and terms of a group, which each server is told by HTTP."""

    host: str  # where the trainer has the store in which members find each other
    port: int
    secret: str  # by which they know each other: anybody may reach the store
    # nccl, where every worker has a GPU of its own, apart from those of all ranks of the trainer;
    # ipc, where the only worker is on the trainer's; else gloo.
    backend: str
    world_size: int
    first_rank: int  # of the server's workers
    timeout_s: float


class WeightGroup:
    """A member of the group: the trainer is rank 0, workers are the others.

    nccl runs a broadcast as a ring. Over gloo each member passes what it gets on to the next, chunk
    by chunk, so each byte leaves the trainer once. Over ipc gloo carries handles of memory,
    and what they stand for where the worker may not open it.

    A member that waits for a lost one gets a RuntimeError after `timeout_s`, or before. For nccl
    this needs (torch 2.11 to 2.13) TORCH_NCCL_BLOCKING_WAIT: else a watchdog ends the process.
    """

    def __init__(self, meeting: Meeting, rank: int, device: torch.device, store: Any = None):
        """Meet the other members; the trainer brings the `store`, a TCPStore of its own.

        Raises:
            RuntimeError: they do not meet, or a stranger is among them.
        """
        self.meeting = meeting
        self.rank = rank
        self.device = device
        self._uses_nccl = meeting.backend == "nccl"
        self._wire = device if self._uses_nccl else torch.device("cpu")  # where bytes travel from
        self._works: list[Any] = []  # that are under way
        self._lends = meeting.backend == "ipc"  # memory, in place of bytes
        torch.get_device_module(device).set_device(device)  # of this thread
        self._group: Any = None
        try:
            limit = timedelta(seconds=meeting.timeout_s)
            if not store:
                store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
            # Once they have met, nothing in the store counts any more.
            prefix = hashlib.sha256(meeting.secret.encode()).hexdigest()
            place = dist.PrefixStore(prefix, store)
            # nccl would wait for others without a limit.
            barrier(place, meeting.world_size, "here", meeting.timeout_s)
            self._group = make_group(meeting, rank, place)
            self._greet()
        except RuntimeError as error:
            self.close()
            cause = str(error).partition("\n")[0]
            raise RuntimeError(
                f"they do not meet over {meeting.backend}: {cause}; open the ports between trainer "
                "and servers, and between servers (for nccl set NCCL_SOCKET_IFNAME, too)"
            ) from error

    def _greet(self) -> None:
        """Make sure that each member knows the secret; this makes nccl's communicator, too."""
        words = [f"{self.meeting.secret}{rank}" for rank in range(self.meeting.world_size)]
        digests = [hashlib.sha256(word.encode()).digest() for word in words]
        own = torch.tensor([*digests[self.rank]], dtype=torch.uint8, device=self._wire)
        found = own.repeat(len(digests))
        self._works.append(self._group._allgather_base(found, own))
        self._settle()
        if bytes(found.tolist()) != b"".join(digests):
            raise RuntimeError("a stranger is among them")

    def send(self, entries: list[Any], buffer: Tensor) -> None:
        """Send a bucket, as of `packed`, from the trainer; one without entries ends the update.

        Raises:
            RuntimeError: it does not go off in time.
        """
        handle = handle_of(buffer) if entries and self._lends else None
        text = torch.frombuffer(
            bytearray(msgspec.msgpack.encode((entries, len(buffer), handle))), dtype=torch.uint8
        )
        self._pass_on(torch.tensor([len(text)]).view(torch.uint8))
        self._pass_on(text)
        needs_bytes = torch.tensor([not handle], dtype=torch.uint8)
        if handle:  # the memory is lent until the worker tells whether it could copy it
            self._works.append(self._group.recv([needs_bytes], 1, 0))
            self._settle()
            self._lends = not needs_bytes  # CUDA never frees what nobody has opened
        if needs_bytes:
            self._pass_on(buffer)
        self._settle()

    def _pass_on(self, data: Tensor) -> None:
        """Start to send bytes to the next member; by nccl to all, who call this, too."""
        data = data.to(self._wire)
        if self._uses_nccl:
            self._works.append(self._group.broadcast([data], dist.BroadcastOptions()))
        elif self.rank + 1 < self.meeting.world_size:
            for chunk in data.split(CHUNK_BYTES):
                self._works.append(self._group.send([chunk], self.rank + 1, 0))

    def receive(self) -> dict[str, Tensor]:
        """Take the next bucket on a worker, in fresh memory; an empty one ends the update.

        Raises:
            RuntimeError: nothing comes in time, or another member has failed.
        """
        length = int(self._take(8).view(torch.int64))
        entries, size, handle = msgspec.msgpack.decode(bytes(self._take(length).tolist()))
        buffer = None
        if handle:
            buffer = copied(handle, self.device)
            needs_bytes = torch.tensor([buffer is None], dtype=torch.uint8)
            self._works.append(self._group.send([needs_bytes], 0, 0))
        if buffer is None:
            buffer = self._take(size)
        bucket = {}
        for name, dtype, shape, start, end in entries:
            bucket[name] = buffer[start:end].view(getattr(torch, dtype)).view(shape)
        return bucket  # which may still be on its way to the next worker: nobody writes into it

    def _take(self, num_bytes: int) -> Tensor:
        """The next bytes, which are passed on while more come."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._wire)
        if self._uses_nccl:
            self._pass_on(data)  # by one broadcast, which fills it here
            self._settle()
            return data
        chunks = data.split(CHUNK_BYTES)
        coming = [self._group.recv([chunk], self.rank - 1, 0) for chunk in chunks]
        for chunk, work in zip(chunks, coming, strict=True):
            work.wait()
            self._settle()  # the chunk before it has gone off
            self._pass_on(chunk)
        return data

    def _settle(self) -> None:
        """Wait until the works under way are over.

        Raises:
            RuntimeError: one fails, or takes longer than `timeout_s`.
        """
        ends_s = time.monotonic() + self.meeting.timeout_s
        works = self._works
        self._works = []
        for work in works:
            while self._uses_nccl and not work.is_completed():
                if time.monotonic() > ends_s:
                    raise RuntimeError(
                        f"nothing came through in {self.meeting.timeout_s:.0f} s over nccl"
                    )
                time.sleep(2e-4)
            work.wait()  # within the group's time-out; of nccl it only tells the failure

    def close(self) -> None:
        """Leave the group: a member that waits for this one gets an error.

        May be called again. The end of a gloo group waits for what a peer does not take, so it
        comes with the last reference, that of the thread which sends or receives.
        """
        group = self._group
        self._group = None
        if group and self._uses_nccl:
            group.abort()  # as `shutdown()` waits for a stuck kernel


def make_group(meeting: Meeting, rank: int, store: Any) -> Any:
    """A bare process group of members that meet in a store, apart from the default group."""
    timeout = timedelta(seconds=meeting.timeout_s)
    if meeting.backend != "nccl":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        # Lazily: members connect to their neighbours alone, as the others may have no way to them.
        address = address_towards(meeting.host)
        options._devices = [gloo.create_device(address, lazy_init=True)]
        return gloo(store, rank, meeting.world_size, options)

    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    # Each group reads the variable as it is made, and the trainer's own must not see it.
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _making:
        before = os.environ.get(name, "0")
        os.environ[name] = "1"
        try:
            return nccl(store, rank, meeting.world_size, options)
        finally:
            os.environ[name] = before


def packed(
    tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[list[Any], Tensor]:
    """Lay named tensors, of any shape and dtype, into one buffer of bytes on `device`.

    Matrices are rounded to `dtype`, as workers do with those of a checkpoint. Returns the name,
    dtype, shape, first byte and end of each tensor, and the buffer.
    """
    entries = []
    zeros = torch.zeros(16, dtype=torch.uint8, device=device)
    parts = [zeros]  # as gloo sends nothing empty
    start = 16
    for name, tensor in tensors.items():
        data = tensor.to(device)
        if data.ndim > 1 and data.is_floating_point() and data.itemsize > dtype.itemsize:
            data = data.to(dtype)
        end = start + data.nbytes
        entries.append((name, str(data.dtype).removeprefix("torch."), list(data.shape), start, end))
        padding = zeros[: -data.nbytes % 16]  # behind it a tensor of any dtype may begin
        parts += [data.reshape(-1).view(torch.uint8), padding]
        start = end + len(padding)
    return entries, torch.cat(parts)


def gpu_of(device: torch.device) -> str | None:
    """The unique name of a GPU, on any machine; None for CPUs."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def address_towards(host: str | None) -> str:
    """This machine's address on the route to `host`; sends no packet."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


# -- CUDA IPC, between a trainer and a worker on one GPU -------------------------------------------
# The worker copies weights out of the trainer's memory: NCCL below 2.30 takes no GPU twice, and
# gloo goes through the memory of the host.


def handle_of(buffer: Tensor) -> list[Any] | None:
    """A handle of a GPU tensor, of a whole storage of bytes, for others: numbers and bytes.

    None where CUDA forbids it.
    """
    torch.cuda.current_stream(buffer.device).synchronize()  # its bytes are there
    try:
        fields = buffer.untyped_storage()._share_cuda_()[1:-1]
    except RuntimeError:
        return None
    # False: there is nothing to wait for, and no event to leak.
    return [*fields, False]


def copied(handle: list[Any], device: torch.device) -> Tensor | None:
    """A copy of the tensor of another process on this GPU, by the `handle_of` it.

    None where a driver or container forbids to open it.
    """
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *handle)
    except RuntimeError:
        return None
    shared = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    buffer = shared.clone()
    torch.cuda.current_stream(device).synchronize()
    return buffer
