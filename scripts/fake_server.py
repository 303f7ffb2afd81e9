"""A stand-in for a rollout server whose answers, latencies and faults are under control, for tests and benchmarks.

It speaks the routes of `vllm_server.py` that the trainer uses, receives real weights over a transfer group, and gives
the true log-probs of its answers under the weights of each token's version. Only what is said, and when, is fixed.
"""

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from server.messages import (
    About,
    ConnectRequest,
    Sampled,
    SampleRequest,
    SleepRequest,
    UpdateRequest,
)  # fmt: skip
from weights.group import Meeting, WeightGroup

MOST_VERSIONS = 100  # whose weights are kept
Answer = Callable[[list[int], int], tuple[list[int], float | Callable[[int], None]]]


class NotArrived(RuntimeError):
    """An update has not come through the group."""


@dataclass
class FakeServer:
    """What a test sets, and what it may look at."""

    model_id: str  # path of the model that it pretends to serve
    # `(prompt_ids, number of the completion in its group) -> (token_ids, seconds it takes)`; a function in place of the
    # seconds is called before each token with its place, and returns when that may be sampled.
    answer: Answer
    slots: int = 1000  # completions that are sampled at a time; others wait their turn
    max_model_len: int = 128
    with_logprobs: bool = True  # else they are 0, and an answer costs little beyond its seconds
    stages: bool = False  # take updates while sampling goes on, and pause to place them alone
    can_sleep: bool = False  # asleep it samples nothing, and at level 2 loses its weights
    # Called with each path before it is served, and in an update with `/update/arrived` and `/update/placed`; raising
    # an exception answers 500, PermissionError 403.
    fault: Callable[[str], None] = lambda path: None
    temperature: float = 1.0
    url: str = ""
    versions: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # the weights received
    naps: list[int] = field(default_factory=list)  # levels of the requests to sleep
    trainer: str = ""  # that has it; empty where its connection is closed
    log: list[tuple[str, float]] = field(default_factory=list)  # each path, and when it was asked

    def __post_init__(self) -> None:
        self.model = self.load()
        self.version = "default"
        self.versions["default"] = self._weights()
        self.group: WeightGroup | None = None
        self.hold: object = None
        self._threads = ThreadPoolExecutor(2048)
        self._update_name = ""  # of the one that comes
        self._resumed = threading.Event()
        self._resumed.set()
        self._epoch = 0  # grows where all in flight are aborted
        self._free = threading.Semaphore(self.slots)
        self._computing = threading.Lock()

    def load(self) -> Any:
        """The model that it pretends to serve."""
        return AutoModelForCausalLM.from_pretrained(self.model_id, dtype=torch.float32).eval()

    def _weights(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()  # tied ones once
        return {name: weight.detach().clone() for name, weight in named}

    def about(self) -> About:
        """What `/connect` tells."""
        return About([self.model_id], self.max_model_len, "float32", 0, self.can_sleep, [None])

    def connect(self, request: ConnectRequest) -> None:
        """Zero the weights for a trainer; what another had in flight is aborted."""
        self.temperature = request.temperature or self.temperature
        if request.trainer:
            if self.trainer not in ("", request.trainer):
                raise ValueError("another trainer uses this server: one at a time")
            self.trainer = request.trainer
            self._update_name = ""
            self._epoch += 1
            for tensor in self.model.state_dict().values():
                tensor.zero_()
            self._resumed.clear()  # until the first update

    def sleep(self, level: int) -> None:
        """Sample nothing, and at level 2 lose the weights."""
        self.naps.append(level)
        self._epoch += 1
        self._resumed.clear()
        if level == 2:
            for tensor in self.model.state_dict().values():
                tensor.fill_(torch.nan)

    def update(self, request: UpdateRequest) -> float:
        """Take an update, and return for how many seconds nothing was sampled; after an error it may stay paused."""
        self._update_name = name = os.urandom(8).hex()
        if not request.meeting:
            return 0.0
        if not self.stages:
            self._resumed.clear()
        arriving = self._threads.submit(self._receive, request.meeting)
        while not arriving.done() and self._update_name == name:
            time.sleep(2e-3)
        if self._update_name != name:
            raise NotArrived("given up")
        error = arriving.exception()
        if isinstance(error, RuntimeError):  # of the group
            raise NotArrived(repr(error))
        self.fault("/update/arrived")
        if self.stages:
            self._resumed.clear()
        started_s = time.monotonic()
        with self._computing:  # a forward lends the model another version's tensors for its time
            self.place(arriving.result(), request.weight_version)
        self.version = request.weight_version
        self.fault("/update/placed")
        self._resumed.set()
        return time.monotonic() - started_s

    def place(self, weights: dict[str, Tensor], version: str) -> None:
        """Use the weights, and keep a copy."""
        missing = self.model.load_state_dict(weights, strict=False)
        assert not missing.unexpected_keys
        self.versions[version] = self._weights()
        while len(self.versions) > MOST_VERSIONS:
            del self.versions[next(iter(self.versions))]

    def _receive(self, meeting: Meeting) -> dict[str, Tensor]:
        """All weights of an update."""
        if not self.group or self.group.meeting != meeting:
            self.group = WeightGroup(meeting, meeting.first_rank, torch.device("cpu"))
        group = self.group
        weights: dict[str, Tensor] = {}
        try:
            while bucket := group.receive():
                self.fault("/update/bucket")
                weights |= bucket
        except Exception:
            group.close()
            raise
        return weights

    def prompt_logprobs(self, ids: list[int]) -> Sampled:
        """As a reference gives them: of each token but the first, at its temperature."""
        with self._computing, torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1]
            scaled = (logits / self.temperature).log_softmax(-1)
        values = scaled[range(len(ids) - 1), ids[1:]].tolist()
        spans = [(self.version, 0, 1)]
        return Sampled(prompt_logprobs=array("f", values).tobytes(), weight_versions=spans)

    def sample(self, request: SampleRequest) -> list[Sampled]:
        """All completions, when they have ended."""
        sampling: dict[str, Any] = request.sampling_params
        if "prompt_logprobs" in sampling:
            return [self.prompt_logprobs(request.token_ids)]
        say = partial(self._say, request.token_ids, sampling)
        return list(self._threads.map(say, range(sampling.get("n", 1))))

    def _say(self, prompt: list[int], sampling: dict[str, Any], number: int) -> Sampled:
        """One completion: tokens come evenly over its seconds, except while paused."""
        ids, pace = self.answer(prompt, number)
        said = ids[: sampling["max_tokens"]]
        versions = []
        epoch = self._epoch
        with self._free:
            for place in range(len(said)):
                if callable(pace):
                    pace(place)
                else:
                    time.sleep(pace / len(ids))
                while not self._resumed.wait(0.01) and epoch == self._epoch:
                    pass
                if epoch != self._epoch:
                    break
                versions.append(self.version)
        message = self._message(prompt, said[: len(versions)], versions, sampling)
        message.finish_reason = "length" if len(said) < len(ids) else "stop"
        if len(versions) < len(said):
            message.finish_reason = "abort"
        return message

    def _message(
        self, prompt: list[int], ids: list[int], versions: list[str], sampling: dict[str, Any]
    ) -> Sampled:
        logprobs = [0.0] * len(ids)
        spans: list[tuple[str, int, int]] = []
        for version, tokens in groupby(versions):
            start = spans[-1][2] if spans else 0
            spans.append((version, start, start + len(list(tokens))))
        with self._computing, torch.no_grad():
            for version, start, end in spans if self.with_logprobs else ():
                inputs = (torch.tensor([prompt + ids]),)
                weights = self.versions[version]
                logits = torch.func.functional_call(self.model, weights, inputs).logits[0]
                temperature = sampling.get("temperature") or 1.0
                scaled = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
                part = slice(start, end)
                logprobs[part] = scaled[range(len(ids)), ids][part].tolist()
        return Sampled(
            token_ids=array("i", ids).tobytes(),
            logprobs=array("f", logprobs).tobytes(),
            weight_versions=spans,
        )


class _Handler(BaseHTTPRequestHandler):
    server: Any  # whose `fake` it is
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def do_POST(self) -> None:
        """One request."""
        fake = self.server.fake
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"
        fake.log.append((self.path, time.monotonic()))
        try:
            fake.fault(self.path)
            if self.path == "/connect":
                self.connect(msgspec.json.decode(body, type=ConnectRequest))
            elif self.path == "/sample":
                found = fake.sample(msgspec.json.decode(body, type=SampleRequest))
                self.reply(200, msgspec.msgpack.encode(found))
            elif self.path == "/update":
                updated = fake.update(msgspec.json.decode(body, type=UpdateRequest))
                self.reply(200, msgspec.msgpack.encode(updated))
            elif self.path == "/sleep" and fake.can_sleep:
                fake.sleep(msgspec.json.decode(body, type=SleepRequest).level)
                self.reply(200, b"{}")
            else:
                self.reply(200 if self.path == "/health" else 404, b"{}")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception as error:
            kinds = {NotArrived: 409, ValueError: 400, PermissionError: 403}
            status = next((kinds[kind] for kind in kinds if isinstance(error, kind)), 500)
            self.reply(status, msgspec.json.encode({"error": repr(error)}))

    do_GET = do_POST  # of `/health`

    def connect(self, request: ConnectRequest) -> None:
        """Tell about the server, which is a trainer's until that hangs up."""
        fake = self.server.fake
        fake.connect(request)
        hold = fake.hold = object()
        line = msgspec.json.encode(fake.about()) + b"\n"
        if not request.trainer:
            self.reply(200, line)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(line)
        self.close_connection = True
        with suppress(OSError):
            self.connection.recv(1)
        if fake.hold is hold:
            fake.trainer = ""

    def reply(self, status: int, data: bytes) -> None:
        """A whole answer."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")  # as asked; or the client takes it again
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(
    fake: FakeServer, address: tuple[str, int] = ("127.0.0.1", 0), poll_s: float = 0.05
) -> Iterator[FakeServer]:
    """Serve from threads of this process, by default on a free port of loopback, while the block runs."""
    server: Any = ThreadingHTTPServer(address, _Handler)
    server.fake = fake
    fake.url = f"http://{address[0]}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(poll_s,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake._resumed.set()
        server.shutdown()
        server.server_close()
        if fake.group is not None:
            fake.group.close()


def fake_server(model_id: str, answer: Answer, **fields: Any) -> Any:
    """Serve a `FakeServer` of these fields while the block runs."""
    return serving(FakeServer(model_id, answer, **fields))
