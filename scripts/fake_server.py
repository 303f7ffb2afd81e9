"""A stand-in for a rollout server whose answers, latencies and faults are under control, for tests and benchmarks.

It speaks the routes of `vllm_server.py` that the trainer uses, receives real weights over a transfer group, and gives
the true log-probs of its answers under the weights of each token's version. Only what is said, and when, is fixed.
"""

import json
import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
from torch import Tensor
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from server.messages import SAMPLE, UPDATE, Sampled, packed
from utils import VLLM_VERSIONS
from weights.arrival import WorkerGroup
from weights.transfer import About

Answer = Callable[[list[int], int], tuple[list[int], float | Callable[[int], None]]]


@dataclass
class FakeServer:
    """What a test sets, and what it may look at.

    Attributes:
        model_id: path of the model that it pretends to serve.
        answer: `(prompt_ids, number of the completion in its group) -> (token_ids, seconds it takes)`; a function in
            place of the seconds is called before each token with its place, and returns when that may be sampled.
        slots: completions that are sampled at a time; others wait their turn.
        with_logprobs: compute true log-probs; else they are 0, and an answer costs next to nothing beyond its seconds.
        any_vllm: say that it was started with `--any-vllm`.
        returns_sampling_mask: say with each token the `top_k` likeliest ones and itself, and give log-probs over them.
        stages: take updates while sampling goes on, and pause to put them in place alone.
        can_sleep: say that it can sleep; it then samples nothing, and at level 2 loses its weights, until an update.
        fault: called with each path before it is served, and in an update with `/update/arrived` and `/update/placed`;
            raising an exception answers 500.
        refused: called with each path; where it says so, the answer is 403.
        versions: the weights received, by version.
        naps: levels of the requests to sleep.
        log: `(path, seconds on the monotonic clock)` of every request.
    """

    model_id: str
    answer: Answer
    slots: int = 1000
    max_model_len: int = 128
    with_logprobs: bool = True
    stages: bool = False
    can_sleep: bool = False
    vllm_version: str = VLLM_VERSIONS[0]
    any_vllm: bool = False
    returns_sampling_mask: bool = False
    fault: Callable[[str], None] = lambda path: None
    refused: Callable[[str], bool] = lambda path: False
    temperature: float = 1.0
    url: str = ""
    versions: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    naps: list[str] = field(default_factory=list)
    log: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.model_id, dtype=torch.float32).eval()
        self.version = "default"
        self.versions["default"] = self._weights()
        self.group: WorkerGroup | None = None
        self._resumed = threading.Event()
        self._resumed.set()
        self._aborted = False
        self._free = threading.Semaphore(self.slots)
        self._computing = threading.Lock()

    def _weights(self) -> dict[str, Tensor]:
        return {
            name: weight.detach().clone() for name, weight in self.model.named_parameters()
        }  # tied ones once

    def control(self, path: str, body: dict[str, Any]) -> Any:
        """The routes that do not sample."""
        if path == "/version":
            return {
                "version": self.vllm_version,
                "any_vllm": self.any_vllm,
                "sampling_mask": self.returns_sampling_mask,
            }
        if path == "/v1/models":
            return {
                "data": [
                    {
                        "id": self.model_id,
                        "root": self.model_id,
                        "max_model_len": self.max_model_len,
                    }
                ]
            }
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/init_weight_transfer_engine" and "temperature" in body["init_info"]:
            self.temperature = body["init_info"]["temperature"]
        elif path == "/init_weight_transfer_engine":
            info = body["init_info"]
            store = TCPStore(
                info["host"],
                info["port"],
                is_master=False,
                timeout=timedelta(seconds=info["timeout_s"]),
            )
            if self.group is not None:
                self.group.close()
            about = About(room=100.0 if self.stages else 0.0, can_sleep=self.can_sleep)
            self.group = WorkerGroup(
                store, 1, info["world_size"], torch.device("cpu"), info["timeout_s"], about=about
            )
        elif path == "/weight_checker":
            for tensor in self.model.state_dict().values():
                tensor.zero_()
        elif path == UPDATE:
            return {"paused_s": self._update(body["weight_version"])}
        elif path in ("/pause", "/sleep"):
            self._resumed.clear()
            self._aborted = path == "/sleep" or body.get("mode") == "abort"
            if path == "/sleep":
                self.naps.append(body["level"])
            if body.get("level") == "2":
                for tensor in self.model.state_dict().values():
                    tensor.fill_(torch.nan)
        elif path == "/wake_up":
            self._resumed.set()
        return {}

    def _update(self, version: str) -> float:
        """Take an update; after an error sampling stays paused, as the real server's may."""
        assert self.group is not None
        if not self.stages:
            self._pause()
        weights: dict[str, Tensor] = {}
        while bucket := self.group.receive():
            weights |= bucket
        self.fault(f"{UPDATE}/arrived")
        if self.stages:
            self._pause()
        started_s = time.monotonic()
        with self._computing:  # a forward lends the model another version's tensors for its time
            missing = self.model.load_state_dict(weights, strict=False)
            assert not missing.unexpected_keys
            self.versions[version] = self._weights()
        self.version = version
        self.fault(f"{UPDATE}/placed")
        self._resumed.set()
        return time.monotonic() - started_s

    def _pause(self) -> None:
        self._aborted = False
        self._resumed.clear()

    def prompt_logprobs(self, ids: list[int]) -> Sampled:
        """As a reference gives them: of each token but the first, at its temperature."""
        with self._computing, torch.no_grad():
            scaled = (
                self.model(torch.tensor([ids])).logits[0, :-1] / self.temperature
            ).log_softmax(-1)
        values = scaled[range(len(ids) - 1), ids[1:]].tolist()
        return Sampled(prompt_logprobs=array("f", values).tobytes())

    def generate(self, body: dict[str, Any]) -> Iterator[Sampled]:
        """Each completion, when it has ended."""
        sampling, prompt = body["sampling_params"], body["token_ids"]
        num = sampling.get("n", 1)
        ended: queue.SimpleQueue[Sampled] = queue.SimpleQueue()
        for number in range(num):
            threading.Thread(
                target=self._say, args=(prompt, number, sampling, ended), daemon=True
            ).start()
        for _ in range(num):
            yield ended.get()

    def _say(self, prompt: list[int], number: int, sampling: dict[str, Any], ended: Any) -> None:
        """One completion: tokens come evenly over its seconds, except while paused."""
        ids, pace = self.answer(prompt, number)
        said = ids[: sampling["max_tokens"]]
        versions = []
        with self._free:
            for place in range(len(said)):
                if callable(pace):
                    pace(place)
                else:
                    time.sleep(pace / len(ids))
                while not self._resumed.wait(0.01) and not self._aborted:
                    pass
                if not self._resumed.is_set():
                    break
                versions.append(self.version)
        message = self._message(prompt, number, said[: len(versions)], versions, sampling)
        message.finish_reason = (
            "abort" if len(versions) < len(said) else "length" if len(said) < len(ids) else "stop"
        )
        ended.put(message)

    def _message(
        self,
        prompt: list[int],
        number: int,
        ids: list[int],
        versions: list[str],
        sampling: dict[str, Any],
    ) -> Sampled:
        logprobs = [0.0] * len(ids)
        sets: list[list[int]] = []
        spans: list[tuple[str, int, int]] = []
        for place, version in enumerate(versions):
            if not spans or spans[-1][0] != version:
                spans.append((version, place, place))
            spans[-1] = (version, spans[-1][1], place + 1)
        with self._computing, torch.no_grad():
            for version, start, end in spans if self.with_logprobs else ():
                inputs = (torch.tensor([prompt + ids]),)
                logits = torch.func.functional_call(
                    self.model, self.versions[version], inputs
                ).logits[0]
                scaled = (
                    logits[len(prompt) - 1 : -1] / (sampling.get("temperature") or 1.0)
                ).log_softmax(-1)
                if self.returns_sampling_mask:
                    for place in range(start, end):
                        drawn = set(scaled[place].topk(sampling["top_k"]).indices.tolist())
                        sets.append(sorted(drawn | {ids[place]}))
                        scaled[place] -= scaled[place, sets[-1]].logsumexp(0)
                part = slice(start, end)
                logprobs[part] = scaled[range(len(ids)), ids][part].tolist()
        return Sampled(
            number,
            token_ids=array("i", ids).tobytes(),
            logprobs=array("f", logprobs).tobytes(),
            weight_versions=spans,
            mask_ids=array("i", chain.from_iterable(sets)).tobytes(),
            mask_sizes=array("i", map(len, sets)).tobytes(),
        )


class _Handler(BaseHTTPRequestHandler):
    server: "_Listener"
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        """As POST."""
        self.do_POST()

    def do_POST(self) -> None:
        """One request."""
        fake = self.server.fake
        path, query = urlsplit(self.path).path, dict(parse_qsl(urlsplit(self.path).query))
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        fake.log.append((path, time.monotonic()))
        try:
            fake.fault(path)
            if fake.refused(path):
                self.reply(403, {"error": "refused"})
            elif path == SAMPLE and "prompt_logprobs" in body["sampling_params"]:
                self.stream([fake.prompt_logprobs(body["token_ids"])])
            elif path == SAMPLE:
                self.stream(fake.generate(body))
            else:
                self.reply(200, fake.control(path, body | query))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception as error:
            self.reply(500, {"error": repr(error)})

    def reply(self, status: int, value: Any) -> None:
        """A whole JSON answer."""
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, found: Iterable[Sampled]) -> None:
        """A chunk for each message."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for message in found:
            data = packed(message)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, fake: FakeServer):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = fake
        fake.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def fake_server(model_id: str, answer: Answer, **fields: Any) -> Iterator[FakeServer]:
    """Serve on a free port of loopback, from threads of this process, while the block runs."""
    fake = FakeServer(model_id, answer, **fields)
    server = _Listener(fake)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake._resumed.set()
        server.shutdown()
        server.server_close()
        if fake.group is not None:
            fake.group.close()
