"""The group that weights travel over, with a stand-in for nccl and for CUDA's shared memory.

What the stand-in does is documented of torch.distributed.ProcessGroupNCCL under TORCH_NCCL_BLOCKING_WAIT: a broadcast
starts a kernel and returns; `is_completed` asks whether it is over, by a result or an error; `wait` raises an error,
and one of its own after the group's time-out; `abort` ends kernels under way with an error; `shutdown` waits for them.
"""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from helpers import wait_until
from msgspec.structs import replace

from config import TrainConfig
from rollouts import servers as servers_module
from rollouts.servers import ServerPool
from vllm_client import Server
from weights.group import Meeting, WeightGroup, make_group, packed

TIMEOUT_S = 2.0
SLOW_S = 12.0  # what a busy machine may add; those who wait for 30 or 60 s show, all the same
CPU = torch.device("cpu")
FULL = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
MANY = [
    {"a": FULL, "b": torch.randn(300, 1000)},
    {"c": torch.randn(2_500_000)},
    {"nothing": torch.empty(0, 3)},
    {"d": FULL[0]},
]


class Work(Future):
    """A collective: under way until somebody sets a result."""

    is_completed = Future.done

    def wait(self):
        self.result(0)


class StandIn:
    """nccl, by gloo. `fault(rank, number)` of a collective: None, seconds, `never`, `raises` or `blocks`.

    The first one is the gathering of greetings, the others are broadcasts.
    """

    fault = staticmethod(lambda rank, number: None)
    made: ClassVar[list] = []
    timeout_s = 20.0

    class Options:
        _timeout = None

    def __init__(self, store, rank, world_size, options):
        assert options._timeout == timedelta(seconds=self.timeout_s)
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        self.rank, self.works, self.is_aborted = rank, [], False
        meeting = Meeting("127.0.0.1", 0, "", "gloo", world_size, 1, self.timeout_s)
        self.thread = ThreadPoolExecutor(1)
        self.gloo = self.thread.submit(make_group, meeting, rank, store)
        self.made.append(self)

    def _allgather_base(self, found, own):
        return self.begin("_allgather_base", found, own)

    def broadcast(self, tensors, options):
        return self.begin("broadcast", tensors, options)

    def begin(self, name, *arguments):
        work = Work()
        fault = self.fault(self.rank, len(self.works))
        self.works.append(work)
        if fault == "blocks":  # the communicator's rendezvous, in the first one
            time.sleep(TIMEOUT_S)
            raise RuntimeError("wait timeout")

        def run():
            time.sleep(fault or 0)
            getattr(self.gloo.result(), name)(*arguments).wait()
            if not work.done():
                work.set_result(None)

        if fault == "raises":
            work.set_exception(RuntimeError("NCCL error: remote process exited"))
        elif fault != "never":
            self.thread.submit(run)
        return work

    def abort(self):
        self.is_aborted = True
        for work in self.works:
            if not work.done():
                work.set_exception(RuntimeError("aborted"))

    def shutdown(self):
        raise AssertionError("shutdown waits for kernels that never end")


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.setattr(StandIn, "timeout_s", 20.0)
    return lambda fault: monkeypatch.setattr(StandIn, "fault", staticmethod(fault))


def join(num, backend="gloo", timeout_s=20.0, kinds=(), spoil=None):
    """The members of a group in threads of this process, or the errors they got."""
    limit = timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    if spoil:
        spoil(store)

    def member(rank):
        kind = kinds[rank] if kinds else WeightGroup
        meeting = Meeting("127.0.0.1", store.port, "secret", backend, num, 1, timeout_s)
        try:
            return kind(meeting, rank, CPU, None if rank else store)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(member, range(num)))


def send(trainer, tensors, dtype=torch.float32):
    trainer.send(*packed(tensors, CPU, dtype))


def assert_fails(call, message):
    """By a message, within the time-out."""
    started_s = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        call()
    assert time.monotonic() - started_s < TIMEOUT_S + SLOW_S


def transfer(members, *all_tensors, dtype=torch.float32):
    """What arrives at each worker, of every bucket."""
    trainer, *workers = members
    with ThreadPoolExecutor(len(members)) as pool:
        takes = pool.map(
            lambda worker: [worker.receive() for _ in all_tensors], workers, timeout=60
        )
        for tensors in all_tensors:
            send(trainer, tensors, dtype)
        return [*takes]


def close(members):
    for member in members:
        member.close()
        member.close()


@pytest.mark.parametrize(
    ("own", "ranks_gpus", "servers", "backend"),
    [
        ("0", ["0"], [["1"]], "nccl"),
        ("0", ["0"], [[None]], "gloo"),
        (None, [None], [["0"]], "gloo"),
        (None, [None], [[None]], "gloo"),
        ("0", ["0"], [["1", None]], "gloo"),
        ("0", ["0", "1"], [["2", "3"], ["4"]], "nccl"),
        ("0", ["0", "1"], [["1"]], "gloo"),  # a GPU of another rank
        ("0", ["0"], [["1"], ["1"]], "gloo"),  # two workers on one
        ("0", ["0"], [["0", "1"]], "gloo"),
        ("0", ["0"], [["0"]], "ipc"),
        ("0", ["0"], [["0"], ["1"]], "gloo"),
    ],
)
def test_a_shared_gpu_never_gets_nccl(monkeypatch, own, ranks_gpus, servers, backend):
    """By the terms for each server, whose workers have these GPUs."""
    monkeypatch.setattr(servers_module, "gpu_of", lambda device: own)
    its_group = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(servers_module, "WeightGroup", lambda *_: its_group)
    monkeypatch.setattr(Server, "connect", lambda server: None)
    urls = [f"http://127.0.0.1:{number}" for number in range(len(servers))]
    config = TrainConfig(model_id="m", dataset_id="d", reward_funcs=[print], vllm_urls=urls)
    with closing(ServerPool(config)) as pool:
        pool.connect(CPU, ranks_gpus)
        for server, gpus in zip(pool.servers, servers, strict=True):
            server.about = SimpleNamespace(gpus=gpus, dtype="float32")
            server.address = "127.0.0.1"
        pool._meet(pool.servers)
        meetings = [pool._meetings[server] for server in pool.servers]
    assert {meeting.backend for meeting in meetings} == {backend}
    assert {meeting.world_size for meeting in meetings} == {1 + sum(map(len, servers))}
    first_ranks = [1 + sum(map(len, servers[:place])) for place in range(len(servers))]
    assert [meeting.first_rank for meeting in meetings] == first_ranks


@pytest.fixture
def cuda(monkeypatch):
    """CUDA's shared memory between threads, and the storages that were shared."""
    storages = []
    fields = (64, 0, b"counter", 3, b"event")

    def share(storage):
        storages.append(storage)
        return 0, b"\xff%d" % (len(storages) - 1), *fields, True

    def opened(index, handle, *given):
        # An event to wait for would be opened, and never closed.
        assert given == (*fields, False)
        return storages[int(handle[1:])]

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened, raising=False)
    return storages


def test_one_gpu(cuda):
    """The worker opens the trainer's memory, which is lent until it has copied it, at each update."""
    members = join(2, "ipc")
    own = FULL.clone()
    first, second = {"a": own, "b": FULL[0, :3].half()}, {"c": FULL.T}
    for tensors in ([first, second, {}], [second, {}]):
        (found,) = transfer(members, *tensors)
        torch.testing.assert_close(found, tensors, rtol=0, atol=0)
    assert len(cuda) == 3
    # CUDA would wrap the storage that it shares, and the model's own must stay as it is.
    assert own.data_ptr() not in [storage.data_ptr() for storage in cuda]
    close(members)
    members = join(2, "ipc", 5.0)
    assert_fails(lambda: send(members[0], {"d": FULL}), "imed out")  # nobody takes it
    close(members)


@pytest.mark.parametrize("name", ["_share_cuda_", "_new_shared_cuda"])
def test_memory_that_cannot_be_opened_goes_through_the_host(cuda, monkeypatch, name):
    """Drivers and containers may forbid to share it, or to open it."""
    asked = []

    def forbidden(*_):
        asked.append(name)
        raise RuntimeError("CUDA error: invalid device context")

    monkeypatch.setattr(torch.UntypedStorage, name, forbidden)
    members = join(2, "ipc")
    tensors = [{"a": FULL}, {"b": FULL.T}, {}]
    (found,) = transfer(members, *tensors)
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)
    assert len(asked) == 1 + (name == "_share_cuda_")  # what was not opened is not lent again
    close(members)


@pytest.mark.parametrize("users_own", [None, "1"])
def test_nccl_late(nccl, monkeypatch, users_own):
    """A slow broadcast is no fault; and the user's own setting of nccl stays."""
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if users_own:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", users_own)
    nccl(lambda rank, number: 0.5 if rank == number == 1 else None)
    members = join(3, "nccl")
    for found in transfer(members, {"a": FULL}, {}):
        assert torch.equal(found[0]["a"], FULL)
    close(members)
    assert all(made.is_aborted for made in StandIn.made)
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == (users_own or "0")


FAULTS = {"never": "nothing came through in 2 s over nccl", "raises": "remote process exited"}


@pytest.mark.parametrize(("fault", "message"), FAULTS.items())
@pytest.mark.parametrize("side", [0, 1])
def test_nccl_fails(nccl, side, fault, message):
    """The error comes where a member waits, within the time-out, and closing never waits for a kernel."""
    nccl(lambda rank, number: fault if rank == side and number > 0 else None)
    members = trainer, worker = join(2, "nccl")
    for member in members:  # that have met
        member.meeting = replace(member.meeting, timeout_s=TIMEOUT_S)
    assert_fails(worker.receive if side else lambda: send(trainer, {"a": FULL}), message)
    close(members)
    assert all(made.is_aborted for made in StandIn.made)


@pytest.mark.parametrize("fault", ["never", "blocks", "raises"])
def test_no_route(nccl, fault):
    """nccl's communicator is made by the first collective: a wrong interface shows there, in words."""
    nccl(lambda rank, number: fault)
    StandIn.timeout_s = TIMEOUT_S
    started = time.monotonic()
    errors = join(2, "nccl", TIMEOUT_S)
    assert time.monotonic() - started < 2 * TIMEOUT_S + SLOW_S
    assert all("over nccl" in str(error) and "NCCL_SOCKET_IFNAME" in str(error) for error in errors)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_matrices_are_rounded_to_the_servers_dtype(nccl, backend):
    """As it does itself with a checkpoint; all else goes as it is, each from where its dtype may begin."""
    as_they_are = {
        "vector": FULL[0], "ids": torch.arange(6).view(2, 3), "half": FULL.half(), "0-d": FULL[0, 0],
        "six bytes": FULL[0, :3].bfloat16(), "four bytes": FULL[0, :1], "double": FULL[0].double(),
        "bools": FULL > 0,
    }  # fmt: skip
    matrices = {"matrix": FULL, "strided": FULL.T, "empty": torch.empty(0, 4)}
    expected = as_they_are | {name: tensor.bfloat16() for name, tensor in matrices.items()}
    members = join(2, backend)
    ((got,),) = transfer(members, as_they_are | matrices, dtype=torch.bfloat16)
    assert list(got) == list(expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)  # dtypes, too
    close(members)


@pytest.mark.parametrize("num", [2, 5])
def test_all_members_get_the_same_bits(num):
    """Also a single byte more than whole chunks, a bucket of nothing, and in a second update."""
    members = join(num)
    odd = torch.arange((8 << 20) + 1, dtype=torch.int64).to(torch.uint8)
    for tensors in ([*MANY, {}], [*MANY, {"odd": odd}, {}]):
        for found in transfer(members, *tensors):
            assert [list(bucket) for bucket in found] == [list(sent) for sent in tensors]
            torch.testing.assert_close(found, tensors, rtol=0, atol=0)
    close(members)


def test_each_byte_leaves_the_trainer_once():
    """By what it gives to gloo: the tensors, and less than a kilobyte about each bucket."""
    members = join(4)
    own, sent = members[0]._group, []

    def counting(chunks, target, tag):
        sent.append(chunks[0].nbytes)
        assert target == 1
        return own.send(chunks, target, tag)

    members[0]._group = SimpleNamespace(send=counting)
    transfer(members, *MANY, {})
    num_bytes = sum(tensor.nbytes for tensors in MANY for tensor in tensors.values())
    assert num_bytes < sum(sent) < num_bytes + 1024 * (len(MANY) + 1)
    close(members[1:])


@pytest.mark.parametrize("stranger", [0, 1, 2])
def test_a_stranger_is_sent_nothing(stranger):
    """It has reached the store, and found all of the meeting there but its secret, which only servers are told."""

    class Stranger(WeightGroup):
        def _greet(self):
            self.meeting = replace(self.meeting, secret="guess")
            super()._greet()

    kinds = [WeightGroup] * 3
    kinds[stranger] = Stranger
    found = join(3, kinds=kinds)
    assert all("a stranger is among them" in str(member) for member in found)


def test_a_stranger_in_the_store_ends_nothing():
    """It listens to anybody: what is written into it beforehand, and all that is done once all have met."""
    members = join(4, spoil=lambda store: [store.set(f"{key}", "x") for key in ("left", 0, 1)])
    meeting = members[0].meeting
    stranger = dist.TCPStore(meeting.host, meeting.port, is_master=False)
    assert meeting.secret not in "".join(stranger.list_keys())
    for key in stranger.list_keys():
        stranger.set(key, "x")
        stranger.delete_key(key)
    stranger.set("left", "")
    transfer(members, *MANY, {})
    close(members)


def test_groups_that_were_left_leave_nothing():
    """Threads and files of this process: a run may make thousands of groups."""
    count = lambda: [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]
    for number in range(6):
        members = join(3)
        transfer(members, {"a": FULL}, {})
        close(members)
        del members
        if number < 2:
            time.sleep(0.3)
            first = count()
    wait_until(lambda: count() <= first)  # threads end a little later
