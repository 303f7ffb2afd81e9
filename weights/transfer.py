"""Weights on the wire: the trainer's side, and what it shares with servers' workers."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Two buckets are alive at a time: one travels while the next is gathered.
BUCKET_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}

# Free memory that staging needs, in multiples of a worker's weights: they and two buckets, and
# where a trainer may come to want it, its gradients and optimizer's state besides.
ROOM_ALONE, ROOM_BESIDE_TRAINER = 1.25, 8.0

_making = threading.Lock()
# One for each address: its thread wakes up 100 times a second.
_gloo_device = cache(dist.ProcessGroupGloo.create_device)


def gpu_of(device: torch.device) -> str | None:
    """The unique name of a GPU, on any machine; None for CPUs."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def address_towards(host: str) -> str:
    """This machine's address on the route to `host`; sends no packet."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


@dataclass(frozen=True)
class About:
    """What a worker says about itself."""

    dtype: str = ""  # of its model
    room: float = 0.0  # how many times its weights fit into the memory that is free
    lora_rank: int = 0  # of the largest adapter that it takes, in place of weights
    can_sleep: bool = False  # it can give up its GPU's memory while it does not sample


ANY = About()


class TransferGroup:
    """A trainer and the workers of one server, between whom weights travel.

    The trainer is rank 0, the workers are ranks 1 to world_size - 1. Every member names its GPU in
    `store`, a TCPStore that the trainer hosts, and from these follows the `backend`:

        nccl  every worker has a GPU of its own, apart from those of all ranks of the trainer
        ipc   the only worker is on the trainer's GPU, and may open its memory (cuda_ipc.py)
        gloo  everything else, through the memory of the host

    A member that waits for a lost one gets a RuntimeError within `timeout_s`. For nccl this needs
    (torch 2.11 to 2.13) TORCH_NCCL_BLOCKING_WAIT: else a watchdog ends the process.
    `is_completed()` then only asks, `wait()` raises the failure, and `close` calls `abort()`, as
    `shutdown()` waits for a stuck kernel.
    """

    def __init__(
        self, store: dist.TCPStore, rank: int, world_size: int, device: torch.device,
        timeout_s: float, gpus: Collection[str | None] = (), about: About = ANY,
    ):  # fmt: skip
        """Meet the other members.

        `gpus` are those of all ranks, given by the trainer; a worker tells `about` itself. Where
        all have room, the workers `stages` updates: they take them beside the weights that they
        sample from.

        Raises:
            RuntimeError: the members do not meet.
        """
        self._store = store
        self._rank = rank
        self._workers = range(1, world_size)
        self.device = device
        self.timeout_s = timeout_s
        self._number = 0  # of the next message
        self._bucket_number = 0  # of the last one
        self._entries: list[Any] = []  # what is in it
        self._group: Any = None
        self.shared: Any = None  # a SharedGroup, where other servers are sent the same
        self.apart_from: list[TransferGroup] = []  # those that it tried to share with, in vain
        self.spent_s = 0.0  # of the next bucket's time, on trying to share

        members = within(timeout_s, partial(self._introduce, world_size, about))
        trainer_gpu = members[0]["gpu"]
        worker_gpus = [worker["gpu"] for worker in members[1:]]
        self._dtype = getattr(torch, members[1]["dtype"], None)  # of the workers
        self.lora_rank: int = members[1]["lora_rank"]
        self.can_sleep: bool = members[1]["can_sleep"]

        if trainer_gpu is not None and worker_gpus == [trainer_gpu]:
            from weights.cuda_ipc import share_memory

            # None where that is forbidden.
            self._group = within(timeout_s, partial(share_memory, store, rank, device))
        self.backend, self.stages = within(timeout_s, partial(self._agree, members, gpus))
        if not self._group:
            self._meet()

    def _introduce(self, world_size: int, about: About) -> list[Any]:
        """Tell the others about this member; returns all members."""
        own = {"gpu": gpu_of(self.device), **asdict(about)}
        self._store.set(f"member/{self._rank}", json.dumps(own))
        return [json.loads(self._store.get(f"member/{member}")) for member in range(world_size)]

    def _agree(self, members: list[Any], gpus: Collection[Any]) -> Any:
        """The trainer's choice of a backend, and whether the workers stage updates."""
        if self._rank == 0:
            trainer_gpu = members[0]["gpu"]
            worker_gpus = [worker["gpu"] for worker in members[1:]]
            has_own_gpus = {None, trainer_gpu, *gpus}.isdisjoint(worker_gpus)
            is_apart = has_own_gpus and len(set(worker_gpus)) == len(worker_gpus)
            backend = "nccl" if trainer_gpu is not None and is_apart else "gloo"
            needed = ROOM_ALONE if has_own_gpus else ROOM_BESIDE_TRAINER
            stages = min(worker["room"] for worker in members[1:]) > needed
            self._store.set("terms", json.dumps(["ipc" if self._group else backend, stages]))
        return json.loads(self._store.get("terms"))

    def _meet(self) -> None:
        """Connect to the other members."""
        if self.backend == "gloo":
            self.device = torch.device("cpu")

        try:
            within(self.timeout_s, self._connect)
        except RuntimeError as error:
            self.close()
            cause = str(error).partition("\n")[0]
            cure = "open the ports between them"
            if self.backend == "nccl":
                cure += ", and name their interface, NCCL_SOCKET_IFNAME"
            raise RuntimeError(
                f"trainer and server do not meet over {self.backend}: {cause}; {cure}"
            ) from error

    def _connect(self) -> None:
        """Make the process group, and send a byte through.

        The first broadcast makes nccl's communicator.
        """
        self._group = make_group(
            self.backend, self._store, "weights", self._rank, 1 + self.num_workers, self.timeout_s
        )
        self._begun_s = time.monotonic()
        self.finish(self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device)))

    def send(self, bucket: dict[str, Tensor], buffers: dict[Any, Any]) -> Any:
        """Start to send named tensors from rank 0.

        Returns the work for `is_over` or `finish`. The tensors, of any shape and dtype, travel as
        one buffer, which may be the memory of a lone tensor: that must not change meanwhile. Groups
        that are given the same `buffers`, at first {}, make one buffer for all. An empty bucket
        ends the stream, without a wait.
        """
        form = (self.device, self._dtype)
        if form not in buffers:
            buffers[form] = _flat(bucket, *form)
        self._entries, buffer = buffers[form]
        self._bucket_number += 1
        self._begun_s = time.monotonic() - self.spent_s
        self.spent_s = 0.0
        shared = self.shared  # read once, as another thread may close it
        self._announce(buffer, bool(len(buffer) and shared))
        if not len(buffer):
            return None
        return shared.sending(self, buffer) if shared else self._broadcast(buffer)

    def send_again(self, buffer: Tensor, shared: Any) -> Any:
        """Send the last bucket, which `shared` has lost, to this server's workers by themselves.

        The time that has passed counts.
        """
        if self.shared is shared:  # there may be a newer one
            self.shared = None
        self._announce(buffer, is_shared=False)
        return self._broadcast(buffer)

    def invite(self, port: int, first_rank: int, world_size: int) -> None:
        """Let the workers join a shared group, by a store of this host."""
        for worker in self._workers:
            self._post(worker, {"join": [port, first_rank + worker - 1, world_size]})
        self._number += 1

    def call_off(self, port: int) -> None:
        """Let no worker wait any more for those that it was invited to meet."""
        self._store.set(f"off/{port}", "")

    def _announce(self, buffer: Tensor, is_shared: bool) -> None:
        for worker in self._workers:
            self._post(worker, [len(buffer), self._entries, self._bucket_number, is_shared])
        self._number += 1

    def _post(self, worker: int, message: Any) -> None:
        self._store.set(f"message/{worker}/{self._number}", json.dumps(message))

    @property
    def num_workers(self) -> int:
        """Workers of the server."""
        return len(self._workers)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What servers have in common that may share what they are sent."""
        return self.backend, self.device, self._dtype, self._store.host

    def leave_shared(self) -> None:
        """Get what is sent by oneself from now on."""
        shared = self.shared
        self.shared = None
        if shared:
            shared.close()

    def _broadcast(self, data: Tensor) -> Any:
        group = self._group
        if not group:
            raise RuntimeError("the transfer group is closed")
        return group.broadcast([data], dist.BroadcastOptions())

    def is_over(self, work: Any) -> bool:
        """True once the work, the last that was begun, is over.

        Raises:
            RuntimeError: the work failed.
        """
        if work.is_completed():
            work.wait()
            return True
        if time.monotonic() > self._begun_s + self.timeout_s:
            raise RuntimeError(
                f"a bucket took longer than {self.timeout_s:.0f} s over {self.backend}"
            )
        return False

    def finish(self, work: Any) -> None:
        """Wait until the work is over.

        Raises:
            RuntimeError: the work fails, takes longer than `timeout_s`, or the trainer leaves.
        """
        asked_s = self._begun_s
        while not self.is_over(work):
            if self._rank > 0 and time.monotonic() > asked_s + 0.5:
                asked_s = time.monotonic()
                if not self.trainer_lives():
                    raise RuntimeError("the trainer has left")
            time.sleep(2e-4)

    def trainer_lives(self) -> bool:
        """True while the trainer answers, and has not left the group.

        From a host that is lost nothing comes, ever. On a busy one a thread was seen to wait for
        more than 5 s to run.
        """
        limit_s = min(max(self.timeout_s, 5.0), 30.0)
        with suppress(RuntimeError):
            return not within(limit_s, partial(self._store.check, ["left"]))
        return False

    def close(self) -> None:
        """Leave the group, in a second at most.

        A member that waits for this one gets an error. May be called again.
        """
        self.leave_shared()
        with suppress(RuntimeError):
            if self._rank == 0:
                self._store.set("left", "")
                for worker in self._workers:
                    self._store.set(f"message/{worker}/{self._number}", "")
            # In a thread of its own: the end of a gloo group, which comes with the last reference,
            # waits for a broadcast that its peer does not take.
            within(1.0, self._end_group)

    def _end_group(self) -> None:
        group = self._group
        self._group = None
        if group and self.backend == "nccl":
            group.abort()


def make_group(
    backend: str, store: Any, name: str, rank: int, world_size: int, timeout_s: float
) -> Any:
    """A bare process group of members that meet in a TCPStore, apart from the default group."""
    own_store = dist.PrefixStore(f"{name}/{backend}", store)
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [_gloo_device(hostname=address_towards(store.host))]
        return gloo(own_store, rank, world_size, options)

    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    # Each group reads the variable as it is made, and the trainer's own must not see it.
    with _making:
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        try:
            return nccl(own_store, rank, world_size, options)
        finally:
            del os.environ["TORCH_NCCL_BLOCKING_WAIT"]


def _flat(
    bucket: dict[str, Tensor], device: torch.device, dtype: torch.dtype | None
) -> tuple[list[Any], Tensor]:
    """Lay named tensors into one buffer of bytes on `device`.

    Matrices are rounded to `dtype`, as workers do with those of a checkpoint. Returns the name,
    dtype, shape, first byte and end of each tensor, and the buffer.
    """
    entries = []
    parts = []
    start = 0
    for name, tensor in bucket.items():
        is_matrix = tensor.ndim > 1 and tensor.is_floating_point()
        sent_dtype = tensor.dtype
        if dtype and is_matrix and tensor.itemsize > dtype.itemsize:
            sent_dtype = dtype
        data = tensor.to(device, sent_dtype)
        end = start + data.nbytes
        entries.append((name, str(data.dtype).removeprefix("torch."), list(data.shape), start, end))
        padding = -data.nbytes % 16  # behind it a tensor of any dtype may begin
        parts.append(data.reshape(-1).view(torch.uint8))
        if padding:
            parts.append(data.new_zeros(padding, dtype=torch.uint8))
        start = end + padding

    if not parts:
        return entries, torch.empty(0)
    return entries, parts[0] if len(parts) == 1 else torch.cat(parts)


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Make a call in a thread of its own, which nothing can end."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # for the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def within(timeout_s: float, call: Callable[[], Any]) -> Any:
    """Make a call in a thread; pass on its result or error.

    Raises:
        RuntimeError: the call takes longer than `timeout_s`.
    """
    outcome = in_thread(call)
    if not wait([outcome], timeout_s).done:
        raise RuntimeError(f"nothing came through in {timeout_s:.0f} s")
    return outcome.result()
