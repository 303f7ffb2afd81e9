"""The group that weights travel over, with a stand-in for nccl and for CUDA's shared memory.

What the stand-in does is documented of torch.distributed.ProcessGroupNCCL under TORCH_NCCL_BLOCKING_WAIT: a broadcast
starts a kernel and returns; `is_completed` asks whether it is over, by a result or an error; `wait` raises an error,
and one of its own after the group's time-out; `abort` ends kernels under way with an error; `shutdown` waits for them.
"""

import dataclasses
import gc
import json
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import vllm_client
from config import TrainConfig
from rollouts.servers import ServerPool
from vllm_client import Server, State
from weights import cuda_ipc
from weights import shared as shared_module
from weights import transfer as transfer_module
from weights.arrival import WorkerGroup
from weights.publish import buckets
from weights.shared import share
from weights.transfer import BUCKET_BYTES, About, TransferGroup, _flat

TIMEOUT_S = 2.0
SLOW_S = 12.0  # what a busy machine may add; those who wait for 30 or 60 s show, all the same
FULL = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))


class Work:
    """A broadcast: under way until somebody sets a result."""

    def __init__(self):
        self.result: Future[None] = Future()

    def is_completed(self):
        return self.result.done()

    def wait(self):
        self.result.result(0)


class StandIn:
    """nccl between threads. `fault(rank, number)` of a broadcast: None, seconds, `never`, `raises` or `blocks`."""

    fault = staticmethod(lambda rank, number: None)
    board: ClassVar[dict] = {}  # what rank 0 has sent, by number
    made: ClassVar[list] = []

    class Options:
        _timeout = None

    def __init__(self, store, rank, world_size, options):
        assert options._timeout == timedelta(seconds=TIMEOUT_S)
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        self.rank, self.number, self.works, self.is_aborted = rank, 0, [], False
        self.made.append(self)

    def broadcast(self, tensors, _):
        (tensor,) = tensors
        fault, number, work = self.fault(self.rank, self.number), self.number, Work()
        self.number += 1
        self.works.append(work)
        if fault == "blocks":  # the communicator's rendezvous, in the first one
            time.sleep(60)
        arrived = self.board.setdefault(number, Future())

        def run():
            time.sleep(fault if isinstance(fault, float) else 0)
            if self.rank == 0:
                arrived.set_result(tensor.clone())
            else:
                tensor.copy_(arrived.result())
            if not work.result.done():
                work.result.set_result(None)

        if fault == "raises":
            work.result.set_exception(RuntimeError("NCCL error: remote process exited"))
        elif fault != "never":
            threading.Thread(target=run, daemon=True).start()
        return work

    def abort(self):
        self.is_aborted = True
        for work in self.works:
            if not work.result.done():
                work.result.set_exception(RuntimeError("aborted"))

    def shutdown(self):
        raise AssertionError("shutdown waits for kernels that never end")


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setattr(StandIn, "board", {})
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.setattr(
        "weights.transfer.gpu_of",
        lambda device: None if device.index is None else f"gpu {device.index}",
    )
    return lambda fault: monkeypatch.setattr(StandIn, "fault", staticmethod(fault))


def join(gpus, ranks_gpus=(), dtype="", timeout_s=TIMEOUT_S, rooms=None):
    """The members of a group, by the numbers of their GPUs (-1: a CPU), or the errors they got."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    stores = [store, *(dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in gpus[1:])]

    def member(rank):
        device = torch.device("cpu", gpus[rank]) if gpus[rank] >= 0 else torch.device("cpu")
        room = rooms[rank - 1] if rooms and rank else 0.0
        more = {"about": About(dtype, room)} if rank else {"gpus": ranks_gpus}
        try:
            kind = WorkerGroup if rank else TransferGroup
            return kind(stores[rank], rank, len(gpus), device, timeout_s, **more)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(member, range(len(gpus))))


def make_client(*urls):
    return ServerPool(
        TrainConfig(
            model_id="m", dataset_id="d", reward_funcs=[lambda **_: []], vllm_urls=list(urls)
        )
    )


def transfer(trainer, worker, *buckets):
    """What arrives, of every bucket."""
    with ThreadPoolExecutor(1) as pool:
        received = []
        for bucket in buckets:
            reply = pool.submit(worker.receive)
            if work := trainer.send(bucket, {}):
                trainer.finish(work)
            received.append(reply.result())
        return received


def error_of(call):
    """The RuntimeError that a call ends with, and its seconds."""
    started = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value), time.monotonic() - started


# -- which backend ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "ranks_gpus", "backend"),
    [
        ([0, 1], ["gpu 0"], "nccl"),
        ([0, -1], ["gpu 0"], "gloo"),
        ([-1, 0], [None], "gloo"),
        ([0, 1, -1], ["gpu 0"], "gloo"),
        ([0, 2, 3], ["gpu 0", "gpu 1"], "nccl"),
        ([0, 1], ["gpu 0", "gpu 1"], "gloo"),  # a GPU of another rank
        ([0, 1, 1], ["gpu 0"], "gloo"),  # two workers on one
        ([0, 0, 1], ["gpu 0"], "gloo"),
    ],
)
def test_a_shared_gpu_never_gets_nccl(nccl, gpus, ranks_gpus, backend):
    members = join(gpus, ranks_gpus)
    assert [member.backend for member in members] == [backend] * len(gpus)
    for member in members:
        member.close()


def test_cpus_take_gloo(nccl):
    assert [member.backend for member in join([-1, -1])] == ["gloo"] * 2


# -- a shared GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "ranks_gpus", "rooms", "stages"),
    [
        ([0, 1], [], [1.3], True),  # a GPU of its own: the weights and two buckets
        ([0, 1], [], [1.2], False),
        ([0, 1, 2], [], [9.0, 1.2], False),  # every worker needs it
        ([0, 1], ["gpu 1"], [7.0], False),  # one that a rank trains on, whose states are to come
        ([0, 1], ["gpu 1"], [9.0], True),
        ([-1, -1], [], [7.0], False),
        ([-1, -1], [], [9.0], True),
        ([-1, -1], [], None, False),  # a model whose layers cannot be filled apart
    ],
)
def test_updates_are_staged_where_there_is_room(nccl, gpus, ranks_gpus, rooms, stages):
    members = join(gpus, ranks_gpus, rooms=rooms)
    assert [member.stages for member in members] == [stages] * len(gpus)
    for member in members:
        member.close()


@pytest.mark.parametrize("forbidden", ["nothing", "to make a handle", "to open it", "other memory"])
def test_one_gpu(nccl, monkeypatch, forbidden):
    """The worker opens the trainer's memory; where that fails on either side, gloo takes its place."""
    memory: dict[int, torch.Tensor] = {}

    def handle(buffer):
        if forbidden == "to make a handle":
            raise RuntimeError("CUDA error: invalid argument")
        memory[len(memory)] = buffer
        return f"{len(memory) - 1}"

    def copy(number, buffer, device):
        if forbidden == "to open it":
            raise RuntimeError("CUDA error: invalid device context")
        buffer.copy_(memory[int(number)] + (forbidden == "other memory"))

    monkeypatch.setattr(cuda_ipc, "_handle", handle)
    monkeypatch.setattr(cuda_ipc, "_copy", copy)
    trainer, worker = join([0, 0], ["gpu 0"])
    assert trainer.backend == worker.backend == ("ipc" if forbidden == "nothing" else "gloo")
    first, second, end = transfer(
        trainer, worker, {"a": FULL, "b": FULL[0, :3].half()}, {"c": FULL.T}, {}
    )
    assert torch.equal(first["a"], FULL)
    assert torch.equal(first["b"], FULL[0, :3].half())
    assert torch.equal(second["c"], FULL.T)
    assert end == {}
    if forbidden == "nothing":
        work = trainer.send({"d": FULL}, {})  # the worker does not take it
        message, seconds = error_of(lambda: trainer.finish(work))
        assert "took longer than" in message
        assert "over ipc" in message
        assert seconds < TIMEOUT_S + SLOW_S
        trainer.close()
        assert "left" in error_of(lambda: [worker.receive(), worker.receive()])[0]


def test_a_handle_travels_as_json(monkeypatch):
    """CUDA's own fields reach the other process as they are, and the tensor is found in its storage."""
    buffer = torch.arange(64, dtype=torch.uint8)[8:40]
    fields = (b"\x00handle\xff", 64, 0, b"counter", 3, b"event", True)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: (0, *fields))

    def shared(index, *given):
        assert (index, given) == (1, fields)
        return buffer.untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", shared)
    handle, copied = cuda_ipc._handle(buffer), torch.zeros_like(buffer)
    fields = (*fields[:-1], False)  # an event to wait for would be opened, and never closed
    cuda_ipc._copy(handle.encode(), copied, torch.device("cpu", 1))
    assert torch.equal(copied, buffer)


# -- faults ----------------------------------------------------------------------------------------------------------


def test_nccl_late(nccl):
    """A slow broadcast is no fault."""
    nccl(lambda rank, number: 0.5 if rank == number == 1 else None)
    trainer, worker = join([0, 1])
    (got,) = transfer(trainer, worker, {"a": FULL})
    assert torch.equal(got["a"], FULL)
    trainer.close()
    (ours,) = (group for group in StandIn.made if group.rank == 0)
    assert ours.is_aborted


@pytest.mark.parametrize("fault", ["never", "raises"])
@pytest.mark.parametrize("side", [0, 1])
def test_nccl_fails(nccl, fault, side):
    """The error comes where a member waits, within the time-out, and closing never waits for a kernel."""
    nccl(lambda rank, number: fault if rank == side and number > 0 else None)
    trainer, worker = join([0, 1])
    work = trainer.send({"a": FULL}, {})
    call = worker.receive if side else lambda: trainer.finish(work)
    message, seconds = error_of(call)
    assert (
        "remote process exited" if fault == "raises" else "a bucket took longer than 2 s over nccl"
    ) in message
    assert seconds < TIMEOUT_S + SLOW_S
    for member in (trainer, worker):
        member.close()
        member.close()
    assert all(group.is_aborted for group in StandIn.made)
    assert "closed" in error_of(lambda: trainer.send({"a": FULL}, {}))[0]


def test_a_server_that_fails_wakes_the_trainer(nccl):
    nccl(lambda rank, number: "never" if rank == 0 and number > 0 else None)
    server = make_client("http://a").servers[0]
    server.transfer, _ = join([0, 1])
    server.loading = Future()
    assert server.try_to_send({"a": FULL}, {})
    assert not server.try_to_send({"a": FULL}, {})
    server.loading.set_exception(RuntimeError("the server answered 500"))
    assert "500" in error_of(lambda: server.try_to_send({"a": FULL}, {}))[0]


@pytest.mark.parametrize("gpus", [[0, 1], [-1, -1]])
def test_a_trainer_that_leaves_wakes_the_worker(nccl, gpus):
    """At any place: before a bucket, and in the middle of one."""
    nccl(lambda rank, number: "never" if number == 2 else None)
    trainer, worker = join(gpus, timeout_s=TIMEOUT_S if gpus[0] == 0 else 30.0)
    transfer(trainer, worker, {"a": FULL})
    if gpus == [0, 1]:
        trainer.send({"a": FULL}, {})
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(error_of, worker.receive)
        time.sleep(0.3)
        trainer.close()
        message, seconds = reply.result()
    assert "left" in message or "losed" in message
    assert seconds < SLOW_S
    assert not worker.trainer_lives()


def test_a_frozen_trainer_keeps_no_worker(nccl, monkeypatch):
    """Its host is lost, or it is stopped: nothing answers, and no connection is closed."""
    nccl(lambda rank, number: "never" if rank == 1 and number == 1 else None)
    trainer, worker = join([0, 1])
    frozen = threading.Event()

    class Store:
        def __getattr__(self, name):
            return lambda *_: frozen.wait(60)

    trainer.send({"a": FULL}, {})
    header = worker._store.get("message/1/0")
    monkeypatch.setattr(worker, "_store", Store())
    monkeypatch.setattr(worker, "_inbox", Store())
    message, seconds = error_of(lambda: worker.receive())
    assert "nothing came through in 14 s" in message
    assert 14 <= seconds < 14 + SLOW_S
    for name, value in (("wait", None), ("get", header), ("delete_key", None)):
        setattr(Store, name, lambda *_, value=value: value)
    message, seconds = error_of(lambda: worker.receive())
    assert "a bucket took longer than 2 s over nccl" in message or "left" in message
    assert seconds < TIMEOUT_S + 4 + SLOW_S
    frozen.set()
    trainer.close()


def test_a_broadcast_that_nobody_finished_is_not_taken(nccl):
    """Its worker was stopped in the middle, and goes on after the trainer has left; nccl then calls it over."""
    trainer, worker = join([0, 1])
    finish = worker.finish

    def stopped(work):
        trainer.close()
        finish(work)

    worker.finish = stopped
    trainer.send({"a": FULL}, {})
    assert error_of(worker.receive)[0] == "the trainer has left"


@pytest.mark.parametrize("first", [True, False])
def test_the_first_bucket_may_be_long_in_coming(first):
    """Between two updates a trainer trains; within one it may not be silent."""
    trainer, worker = join([-1, -1], timeout_s=20.0)  # they meet, however slow the machine is
    worker.timeout_s = -4.9  # 2 x -4.9 + 10: a limit of 0.2 s
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(worker.receive, is_first=first)
        time.sleep(1.0)
        if first:
            assert not reply.done()
            trainer.close()
        message, _ = error_of(reply.result)
    assert message == ("the trainer has left" if first else "nothing came through in 0 s")
    trainer.close()


@pytest.mark.parametrize("call", ["set", "get", "terms"])
def test_a_trainer_that_freezes_in_meeting_keeps_no_worker(call):
    """The worker's request to the trainer's store gets no answer, ever."""
    frozen = threading.Event()

    member = json.dumps({"gpu": None, "dtype": "", "room": 0.0, "lora_rank": 0, "can_sleep": False})

    class Store(SimpleNamespace):
        def __getattr__(self, name):
            return lambda key, *_: frozen.wait(60) if call in (name, key) else member

    store: Any = Store()
    message, seconds = error_of(lambda: TransferGroup(store, 1, 2, torch.device("cpu"), TIMEOUT_S))
    frozen.set()
    assert message == "nothing came through in 2 s"
    assert TIMEOUT_S <= seconds < TIMEOUT_S + SLOW_S


class Receiver:
    """A transfer group on the trainer's side, whose peer takes each bucket after `seconds`."""

    backend = "ipc"  # which shares nothing

    def __init__(self, seconds):
        self.seconds, self.taken, self.is_closed = seconds, [], False

    def send(self, bucket, buffers):
        self.taken.append((time.monotonic(), [*bucket]))
        return self

    def is_over(self, work):
        begun_s, _ = self.taken[-1]
        return time.monotonic() > begun_s + self.seconds

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize(
    ("seconds", "num_left"),
    [([0, 0, 100], 2), ([0, 0, 0.4], 2), ([0.4, 0.4, 0], 3), ([0.4, 0.4], 2), ([0.4], 1)],
)
def test_a_slow_server_is_left_behind(monkeypatch, seconds, num_left):
    """Once it was later than half of them by `sync_timeout` in all; where most are as slow, they are waited for."""
    monkeypatch.setitem(BUCKET_BYTES, "cpu", 1)
    client = make_client(*(f"http://{i}" for i in range(len(seconds))))
    client.config = dataclasses.replace(client.config, sync_timeout=1.0)
    monkeypatch.setattr(vllm_client, "in_thread", lambda _: Future())  # the answer never comes
    monkeypatch.setattr(Server, "end_update", lambda *_, **__: None)
    for server, pause_s in zip(client.servers, seconds, strict=True):
        server.transfer, server.state = Receiver(pause_s), State.SERVING
    groups = [server.transfer for server in client.servers]
    started = time.monotonic()
    client.update_weights(((f"w{n}", FULL) for n in range(5)), 1)
    assert [server.has_weights for server in client.servers] == [True] * num_left + [False] * (
        len(seconds) - num_left
    )
    assert [group.is_closed for group in groups] == [
        not server.has_weights for server in client.servers
    ]
    assert [names for _, names in groups[0].taken] == [[f"w{n}"] for n in range(5)] + [[]]
    assert time.monotonic() - started < 5 * 0.4 + SLOW_S  # and not the 100 s of one server


@pytest.mark.parametrize("fault", ["never", "blocks", "raises"])
def test_no_route(nccl, fault):
    """nccl's communicator is made by the first broadcast: a wrong interface shows there, in words."""
    nccl(lambda rank, number: fault)
    started = time.monotonic()
    errors = join([0, 1])
    assert time.monotonic() - started < TIMEOUT_S + SLOW_S
    assert all("over nccl" in str(error) and "NCCL_SOCKET_IFNAME" in str(error) for error in errors)
    assert fault == "blocks" or all(group.is_aborted for group in StandIn.made)


def test_a_server_that_is_left_out_is_left_at_once(monkeypatch):
    """Its worker then gets an error, too, before the next bucket."""
    client = make_client("http://a", "http://b")
    left = threading.Event()

    class Transfer:
        close = staticmethod(left.set)

    client.servers[1].transfer = Transfer()

    def step(server):
        if server is client.servers[1]:
            raise RuntimeError("lost")

    assert client._on(client.servers, step) == client.servers[:1]
    assert left.is_set()


def test_the_end_of_gloo_keeps_nobody_waiting():
    """The worker does not take what it is sent: the broadcast goes on for the whole time-out, and we do not."""
    trainer, worker = join([-1, -1], timeout_s=40.0)
    trainer.send({"a": torch.zeros(50_000_000)}, {})  # more than a socket's buffers
    started = time.monotonic()
    trainer.close()
    del trainer
    gc.collect()
    assert time.monotonic() - started < 20
    worker.close()


def test_a_bucket_of_nothing():
    """A tensor without elements travels by its name alone, and does not end the stream."""
    trainer, worker = join([-1, -1])
    got = transfer(trainer, worker, {"none": torch.empty(0, 3)}, {"a": FULL}, {})
    assert [{name: list(t.shape) for name, t in bucket.items()} for bucket in got] == [
        {"none": [0, 3]},
        {"a": [40, 30]},
        {},
    ]


def test_gathering_goes_on_beside_a_broadcast(nccl, monkeypatch):
    """One bucket is gathered while the one before is held back, and no more: a gather never waits for a broadcast."""
    monkeypatch.setitem(BUCKET_BYTES, "cpu", 100)
    release = threading.Event()
    nccl(lambda rank, number: None)
    trainer, worker = join([0, 1], timeout_s=TIMEOUT_S)
    trainer._group.fault = lambda rank, number: "never" if number == 1 else None
    client = make_client("http://a")
    (server,) = client.servers
    server.transfer, server.state = trainer, State.SERVING
    monkeypatch.setattr(vllm_client, "in_thread", lambda _: Future())
    monkeypatch.setattr(Server, "end_update", lambda *_, **__: None)
    gathered = []

    def weights():
        for number in range(4):
            gathered.append(number)
            if number == 3:
                assert release.is_set()
            yield f"w{number}", torch.full((20,), float(number))

    with ThreadPoolExecutor(2) as pool:
        update = pool.submit(client.update_weights, weights(), 1)
        received = pool.submit(lambda: [worker.receive() for _ in range(4)])
        deadline_s = time.monotonic() + SLOW_S
        while len(gathered) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.2)  # in which a fourth would be gathered
        assert gathered == [0, 1, 2]  # the third closes the second's bucket
        release.set()
        StandIn.board[1].set_result(torch.zeros(20).view(torch.uint8))
        trainer._group.works[1].result.set_result(None)
        update.result(10)
        assert [bucket[f"w{n}"][0].item() for n, bucket in enumerate(received.result(10))] == [
            0,
            1,
            2,
            3,
        ]


# -- what travels ----------------------------------------------------------------------------------------------------


def test_matrices_are_rounded_to_the_servers_dtype(nccl):
    """As it does itself with a checkpoint; vectors, integers and narrower types go as they are."""
    trainer, worker = join([0, 1], dtype="bfloat16")
    bucket = {
        "matrix": FULL,
        "vector": FULL[0],
        "ids": torch.arange(6).view(2, 3),
        "half": FULL.half(),
        "0-d": FULL[0, 0],
    }
    bucket |= {"empty": torch.empty(0, 4), "strided": FULL.T, "bools": FULL > 0}
    (got,) = transfer(trainer, worker, bucket)
    expected = bucket | {
        "matrix": FULL.bfloat16(),
        "strided": FULL.T.bfloat16(),
        "empty": torch.empty(0, 4).bfloat16(),
    }
    assert list(got) == list(bucket)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def test_tensors_of_any_dtype_follow_each_other():
    """Three numbers of two bytes, and then one of four: each begins where its dtype may."""
    bucket = {
        "half": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
        "single": torch.tensor([4.0]),
        "double": torch.tensor([[5.0, 6.0]], dtype=torch.float64),
    }
    entries, buffer = _flat(bucket, torch.device("cpu"), None)
    for name, dtype, shape, start, end in entries:
        found = buffer[start:end].view(getattr(torch, dtype)).view(shape)
        assert torch.equal(found, bucket[name])


def test_small_weights_share_a_bucket_after_a_full_one(monkeypatch):
    monkeypatch.setitem(BUCKET_BYTES, "cpu", 100)
    weights = [("large", torch.zeros(30))] + [(f"w{n}", torch.zeros(5)) for n in range(6)]
    found = [list(bucket) for bucket in buckets(iter(weights))]
    assert found == [["large"], ["w0", "w1", "w2", "w3", "w4"], ["w5"]]


def test_a_worker_that_waits_for_a_bucket_knows_whether_the_trainer_lives():
    """Else a second trainer, which the worker asks it for, would take the place of the first."""
    trainer, worker = join([-1, -1], timeout_s=20.0)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(worker.receive, is_first=True)
        trainer.finish(trainer.send({"a": FULL}, {}))
        assert coming.result(20)
        coming = pool.submit(worker.receive)
        time.sleep(0.3)
        assert worker.trainer_lives()
        assert not coming.done()
        trainer.close()
        assert "left" in str(coming.exception(20))
        assert not worker.trainer_lives()
    worker.close()


# -- one way to many servers ------------------------------------------------------------------------------------------

MANY = [{"a": FULL, "b": torch.randn(300, 1000)}, {"c": torch.randn(700_000)}, {"d": FULL[0]}]


def join_many(num, timeout_s=14.0):
    """The trainer's members, and the workers, of `num` servers of one or two workers.

    Half of the time-out is more than the 5 s that a TCPStore takes where a name server does not answer.
    """
    groups = [join([-1] * (2 + number % 2), timeout_s=timeout_s) for number in range(num)]
    return [group[0] for group in groups], [worker for group in groups for worker in group[1:]]


def send_all(trainers, weights=MANY):
    """As the pool does: to all servers side by side; those that fail are left. Returns their errors."""
    errors = {}
    sending = dict.fromkeys(trainers)
    for bucket in [*weights, {}]:
        buffers: dict[Any, Any] = {}
        waiting = [trainer for trainer in trainers if trainer not in errors]
        while waiting:
            for trainer in list(waiting):
                try:
                    if sending[trainer] and not trainer.is_over(sending[trainer]):
                        continue
                    sending[trainer] = trainer.send(bucket, buffers)
                except RuntimeError as error:
                    errors[trainer] = error
                    trainer.close()
                waiting.remove(trainer)
            time.sleep(1e-4)
    return errors


def receive_all(worker):
    """The buckets of an update, up to the empty one."""
    found = [worker.receive(is_first=True)]
    while found[-1]:
        found.append(worker.receive())
    return found


def assert_whole(received, weights=MANY):
    assert [list(bucket) for bucket in received] == [list(bucket) for bucket in [*weights, {}]]
    for bucket, sent in zip(received, weights, strict=False):
        assert all(torch.equal(bucket[name], sent[name]) for name in sent)


def updated(pool, trainers, workers, weights=MANY):
    """One update of all servers; returns what each worker gets, as futures, and the trainers' errors."""
    received = [pool.submit(receive_all, worker) for worker in workers]
    share(trainers, lambda: False)
    return received, send_all(trainers, weights)


def test_many_servers_get_the_same_bits():
    """Also a single byte more than whole pieces, and in a second update, for which the group is there."""
    trainers, workers = join_many(3)
    groups = set()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            odd = torch.arange(4 * (1 << 16) + 1, dtype=torch.int64).to(torch.uint8)
            weights = [*MANY, {"odd": odd}]
            received, errors = updated(pool, trainers, workers, weights)
            for future in received:
                assert_whole(future.result(40), weights)
            assert not errors
            groups |= {trainer.shared for trainer in trainers}
    assert len(groups) == 1
    assert None not in groups
    for member in trainers + workers:
        member.close()


def test_each_byte_leaves_the_trainer_once(monkeypatch):
    """By what is given to gloo: the scatters of a bucket hold it once, with padding of less than a chunk."""
    trainers, workers = join_many(3)
    sent: list[int] = []
    start = shared_module.SharedGroup._start

    class Counting:
        def __init__(self, group):
            self.group = group

        def scatter(self, out, pieces, options):
            sent.extend(len(piece) for piece in pieces[0][1:])
            return self.group.scatter(out, pieces, options)

    def counting(self, buffer):
        group, self._group = self._group, Counting(self._group)
        start(self, buffer)
        self._group = group

    with ThreadPoolExecutor(8) as pool:
        received, _ = updated(pool, trainers, workers)
        [future.result(40) for future in received]
        monkeypatch.setattr(shared_module.SharedGroup, "_start", counting)
        received, _ = updated(pool, trainers, workers)
        [future.result(40) for future in received]
    num_bytes = sum(tensor.nbytes for bucket in MANY for tensor in bucket.values())
    assert num_bytes <= sum(sent) < num_bytes + len(MANY) * (shared_module.CHUNK_BYTES + 64)
    for member in trainers + workers:
        member.close()


@pytest.mark.parametrize("fault", ["fails", "hangs", "leaves"])
def test_a_server_that_is_lost_in_a_shared_update_costs_the_others_no_weight(fault):
    """They get the bucket again, each by itself, within the time-out; the next update is shared without it."""
    trainers, workers = join_many(3)
    lost, its_trainer = workers[0], trainers[0]
    wakes = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        received, _ = updated(pool, trainers, workers)
        [future.result(40) for future in received]

        take = lost.shared.take
        turns = iter(range(9))

        def ill(size):
            if next(turns) == 1:
                if fault == "hangs":
                    wakes.wait(60)
                elif fault == "leaves":
                    its_trainer.close()
                else:
                    lost.close()
                raise RuntimeError(fault)
            return take(size)

        lost.shared.take = ill
        started_s = time.monotonic()
        received, errors = updated(pool, trainers, workers)
        seconds = time.monotonic() - started_s
        for future in received[1:]:
            assert_whole(future.result(1))
        assert list(errors) == [its_trainer]
        assert seconds < 14.0 + SLOW_S  # the time-out once, and not twice
        wakes.set()
        assert received[0].exception(40)

        received, errors = updated(pool, trainers[1:], workers[1:])
        for future in received:
            assert_whole(future.result(40))
        assert not errors
        assert trainers[1].shared is trainers[2].shared is not None
    for member in trainers + workers:
        member.close()


def test_servers_that_do_not_meet_go_on_by_themselves(monkeypatch, capsys):
    """They have no route to each other; it is tried once."""
    trainers, workers = join_many(2)
    make = shared_module.make_group

    def no_route(backend, store, name, *more, **named):
        if name == "workers":
            raise RuntimeError("no route to host")
        return make(backend, store, name, *more, **named)

    monkeypatch.setattr(shared_module, "make_group", no_route)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            received, errors = updated(pool, trainers, workers)
            for future in received:
                assert_whole(future.result(40))
            assert not errors
    assert capsys.readouterr().out.count("2 servers get their weights one by one: ") == 1
    for member in trainers + workers:
        member.close()


def test_a_server_that_refuses_keeps_no_other_waiting():
    """Its workers never join; the others are free as soon as that is known, long before the time-out."""
    trainers, workers = join_many(3, timeout_s=60.0)
    started_s = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        received = [pool.submit(receive_all, worker) for worker in workers[1:]]
        share(trainers, lambda: time.monotonic() > started_s + 0.5)
        trainers[0].close()
        assert not send_all(trainers[1:])
        for future in received:
            assert_whole(future.result(20))
    assert time.monotonic() - started_s < 20  # 5 of them where a name server does not answer
    for member in trainers + workers:
        member.close()


def test_a_busy_host_does_not_lose_its_trainer(monkeypatch):
    """An answer may be long in coming, as threads wait for a core; a sync has a minute for each bucket."""
    trainer, worker = join([-1, -1], timeout_s=60.0)
    limits = []

    def late(timeout_s, call):
        limits.append(timeout_s)
        if timeout_s < 20:
            raise RuntimeError(f"nothing came through in {timeout_s:.0f} s")
        return call()

    monkeypatch.setattr(transfer_module, "within", late)
    assert worker.trainer_lives()
    assert limits == [30.0]
    worker.timeout_s = 2.0  # of a run that is to notice sooner
    assert not worker.trainer_lives()
    assert limits[1:] == [5.0]
    monkeypatch.undo()
    trainer.close()
    worker.close()
