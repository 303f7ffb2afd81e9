"""From dataset rows to scored groups: prompts, the HTTP client of the rollout servers (`vllm_server.py`), rewards.

The client samples completions, publishes weights and watches health. Nothing here imports vLLM.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from torch import Tensor
from torch.distributed import TCPStore

from config import TrainConfig, UserError, is_data_file
from utils import TransferGroup, address_towards, buckets


class ServerError(RuntimeError):
    """A rollout server could not be reached, or refused; the message says which one, why and what to do."""


@dataclass(frozen=True)
class Prompt:
    """One problem: what the server gets, and what the rewards see.

    Attributes:
        index: row in the dataset.
        token_ids: the prompt, tokenized once.
        content: the dataset's `prompt` (string or chat messages), for rewards and people.
        columns: the other columns that the rewards want.
    """

    index: int
    token_ids: list[int]
    content: Any
    columns: dict[str, Any]


@dataclass(frozen=True)
class Completion:
    """What the server sampled for a prompt.

    Attributes:
        token_ids: the sampled ids, the end-of-sequence token included where one was sampled.
        sampler_logprobs: the server's log-probability of each token, nats, after temperature (and top-k/p).
        finish_reason: `stop` (ended by itself) or `length` (cut off).
        weight_versions: `(version, start, end)` for each span of tokens sampled under one policy version.
    """

    token_ids: list[int]
    sampler_logprobs: list[float]
    finish_reason: str
    weight_versions: list[tuple[int, int, int]]

    @property
    def truncated(self) -> bool:
        """True where the completion ran into its length limit."""
        return self.finish_reason == "length"


@dataclass
class Group:
    """One prompt and its completions: the unit from the server to the gradient."""

    prompt: Prompt
    completions: list[Completion]
    texts: list[str] = field(default_factory=list)
    rewards: list[list[float | None]] = field(default_factory=list)  # [num_generations][num_reward_funcs]

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens of the group, the prompt counted once per completion."""
        return sum(len(self.prompt.token_ids) + len(c.token_ids) for c in self.completions)


class Server:
    """One rollout server: its address, how many requests it is serving for us, and its weight-transfer group."""

    def __init__(self, url: str, timeout_s: float, retries: int):
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.retries = retries
        self.in_flight = 0
        self.transfer: TransferGroup  # from connect() on
        self._local = threading.local()  # a requests.Session is not thread-safe

    def request(
        self, method: str, path: str, timeout_s: float | None = None, retries: int | None = None, **kwargs: Any
    ) -> Any:
        """The JSON reply of one request, retried after connection errors, time-outs and 5xx replies.

        Raises:
            ServerError: a 4xx reply at once; anything else after the last retry.
        """
        retries = self.retries if retries is None else retries
        for attempt in range(retries + 1):
            try:
                reply = self._session().request(method, self.url + path, timeout=timeout_s or self.timeout_s, **kwargs)
                if reply.status_code < 400:
                    return reply.json() if reply.content else None
                cause = f"answered {reply.status_code}: {reply.text[:500]}"
                if reply.status_code < 500:
                    raise ServerError(f"{method} {self.url}{path} {cause}")
            except (requests.RequestException, ValueError) as error:  # ValueError: half a JSON reply
                cause = f"{type(error).__name__}: {error}"
            if attempt < retries:
                time.sleep(min(0.5 * 2**attempt, 10))
        raise ServerError(f"{method} {self.url}{path} failed {retries + 1} times; the last time it {cause}")

    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            self._local.session.trust_env = False  # no proxy between trainer and server
            if token := os.environ.get("VLLM_API_KEY"):
                self._local.session.headers["Authorization"] = f"Bearer {token}"
        return self._local.session

    def connect(self, device: torch.device, timeout_s: float) -> None:
        """Open the weight-transfer group with this server's workers, replacing one that an earlier trainer left."""
        address = address_towards(urlsplit(self.url).hostname or "127.0.0.1")
        world_size = 1 + self.request("GET", "/get_world_size")["world_size"]
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        info = {"host": address, "port": store.port, "world_size": world_size, "timeout_s": timeout_s}
        with ThreadPoolExecutor(1) as pool:  # both sides must enter the rendezvous
            reply = pool.submit(
                self.request, "POST", "/init_weight_transfer_engine", retries=0, json={"init_info": info}
            )
            while not store.check(["device/1"]):  # a server that refuses never comes
                if reply.done():
                    reply.result()
                time.sleep(0.01)
            self.transfer = TransferGroup(store, 0, world_size, device, timeout_s)
            reply.result()


class VLLMClient:
    """All rollout servers of a run. Thread-safe; lives on rank 0.

    Args:
        config: vllm_urls, request_timeout, request_retries, max_concurrent_requests, server_timeout, model_id.
    """

    def __init__(self, config: TrainConfig):
        self.config = config
        self.servers = [Server(url, config.request_timeout, config.request_retries) for url in config.vllm_urls]
        self._pool = ThreadPoolExecutor(config.max_concurrent_requests, thread_name_prefix="rollout")
        self._control = ThreadPoolExecutor(len(self.servers), thread_name_prefix="control")  # never behind rollouts
        self._lock = threading.Lock()

    def wait_until_ready(self) -> int:
        """Wait until every server answers; returns the longest sequence that all of them take, in tokens.

        Raises:
            ServerError: a server does not answer within `server_timeout` (the message says how to start one), or
                serves another model.
        """
        deadline = time.monotonic() + self.config.server_timeout
        return min(self._when_ready(server, deadline) for server in self.servers)

    def _when_ready(self, server: Server, deadline: float) -> int:
        model_id = self.config.model_id
        command = f"python vllm_server.py --model {model_id} --port {urlsplit(server.url).port or 80}"
        waiting = False
        while True:
            try:
                server.request("GET", "/health", timeout_s=5, retries=0)
                break
            except ServerError as error:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"no rollout server at {server.url} ({error}): start one with `{command}`, or set vllm_urls"
                    ) from None
                if not waiting:
                    waiting = True
                    print(
                        f"waiting up to {self.config.server_timeout:.0f} s for {server.url} (`{command}`)", flush=True
                    )
                time.sleep(1)
        (model, *_) = server.request("GET", "/v1/models")["data"]
        served = (model["id"], model["root"])
        same_path = Path(model_id).exists() and any(Path(name).resolve() == Path(model_id).resolve() for name in served)
        if model_id not in served and not same_path:
            raise ServerError(
                f"{server.url} serves {model['root']}, not {model_id}: restart it with --model {model_id}"
            )
        return model["max_model_len"]

    def generate(self, prompt_ids: list[int], sampling: dict[str, Any]) -> list[Completion]:
        """Sample `sampling["n"]` completions of one prompt, on the server with the fewest requests in flight.

        Args:
            prompt_ids: the prompt's tokens.
            sampling: vLLM's sampling parameters, passed through.

        Raises:
            ServerError: refused, or no valid reply after the retries.
        """
        with self._lock:
            server = min(self.servers, key=lambda s: s.in_flight)
            server.in_flight += 1
        try:
            return self._ask(server, prompt_ids, sampling)
        finally:
            with self._lock:
                server.in_flight -= 1

    def _ask(self, server: Server, prompt_ids: list[int], sampling: dict[str, Any]) -> list[Completion]:
        body = {"token_ids": prompt_ids, "sampling_params": {**sampling, "logprobs": 0}}
        return [
            _completion(choice) for choice in server.request("POST", "/inference/v1/generate", json=body)["choices"]
        ]

    def roll_out(self, prompts: list[Prompt], sampling: dict[str, Any], version: int) -> list[Group]:
        """A group for each prompt, in order, sampled concurrently under policy `version`.

        Raises:
            ServerError: as `generate`, or a completion was sampled under another version.
        """
        replies = [self._pool.submit(self.generate, prompt.token_ids, sampling) for prompt in prompts]
        wait(replies, return_when=FIRST_EXCEPTION)
        for reply in replies:
            if reply.done():
                reply.result()  # the first failure, without waiting for the others
        groups = [Group(prompt, reply.result()) for prompt, reply in zip(prompts, replies, strict=True)]
        sampled_by = {span[0] for group in groups for c in group.completions for span in c.weight_versions}
        if sampled_by - {version}:
            raise ServerError(
                f"asked for policy version {version}, got {sorted(sampled_by)}: does another trainer use the server?"
            )
        return groups

    def probe(self, prompt_ids: list[int]) -> list[tuple[list[int], Completion]]:
        """A short completion from every server, drawn from the whole vocabulary, to compare log-probs on."""
        sampling = {
            "n": 1,
            "max_tokens": min(16, self.config.max_completion_len),
            "temperature": self.config.temperature,
        }
        return [(prompt_ids, self._ask(server, prompt_ids, sampling)[0]) for server in self.servers]

    def connect(self, device: torch.device) -> None:
        """Open one weight-transfer group per server."""
        for server in self.servers:
            server.connect(device, self.config.sync_timeout)

    def clear_weights(self) -> None:
        """Zero the servers' weights, so that the check after the first sync can only pass if every weight arrived."""
        self._everywhere("/weight_checker", {"action": "reset"})

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Publish a policy on every server: pause, stream bucket by bucket, resume.

        Requests in flight are kept and go on under the new weights; their K/V is recomputed on resume.

        Args:
            weights: `(checkpoint name, tensor)`, consumed once.
            version: policy version that completions report from now on.

        Raises:
            ServerError: a server failed; the others are resumed.
        """
        with self._paused():
            self._everywhere("/start_weight_update")
            loading = self._post("/update_weights", {"update_info": {}})
            sending: list[Any] = []
            for bucket in chain(buckets(weights), [{}]):  # an empty bucket ends the stream
                _settle(sending, loading)  # a server loads one bucket while the trainer gathers the next
                sending = [handle for server in self.servers for handle in server.transfer.send(bucket)]
            _settle(sending, loading)
            for reply in loading:
                reply.result()
            self._everywhere("/finish_weight_update", {"weight_version": str(version)})

    @contextmanager
    def _paused(self) -> Iterator[None]:
        try:
            self._everywhere("/pause?mode=keep")
            yield
        except BaseException:
            with suppress(ServerError):  # the first cause is the one to report
                self._everywhere("/resume")
            raise
        self._everywhere("/resume")

    def _post(self, path: str, body: dict[str, Any] | None = None) -> list["Future[Any]"]:
        """One POST to every server, side by side, never repeated: none of them may be done twice."""
        return [self._control.submit(s.request, "POST", path, retries=0, json=body) for s in self.servers]

    def _everywhere(self, path: str, body: dict[str, Any] | None = None) -> None:
        replies = self._post(path, body)
        wait(replies)  # a server that failed must not leave the others half done
        for reply in replies:
            reply.result()

    def close(self) -> None:
        """Leave the transfer groups and drop what is still waiting."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._control.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            if hasattr(server, "transfer"):
                server.transfer.close()


def _settle(sending: list[Any], loading: list["Future[Any]"]) -> None:
    """Wait for broadcasts, and raise at once the error of a server that failed and will never take part in them."""
    for handle in sending:
        while not handle.is_completed():
            for reply in loading:
                if reply.done():
                    reply.result()
            time.sleep(2e-4)
        handle.wait()


def _completion(choice: dict[str, Any]) -> Completion:
    """One choice of `/inference/v1/generate`. A version other than a number is a server that was never synced: -1."""
    spans = [
        (int(s["version"]) if s["version"].isdigit() else -1, s["start"], s["end"]) for s in choice["weight_versions"]
    ]
    token_ids = choice["token_ids"] or []
    logprobs = [token["logprob"] for token in (choice["logprobs"] or {}).get("content") or []]
    if len(logprobs) != len(token_ids):
        raise ServerError(f"a server returned {len(token_ids)} tokens with {len(logprobs)} log-probs")
    return Completion(token_ids, logprobs, choice["finish_reason"], spans)


# --------------------------------------------------------------------------------------------------------------------
# Prompts


def load_tokenizer(config: TrainConfig) -> Any:
    """The tokenizer of `model_id`.

    Raises:
        ValueError: no such model.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(config.model_id, trust_remote_code=config.trust_remote_code)
    except OSError as error:
        raise UserError(
            f"model_id={config.model_id}: no such path, and the hub has no such model ({str(error).splitlines()[0]})"
        ) from None


def sampling_params(config: TrainConfig) -> dict[str, Any]:
    """vLLM's sampling parameters for a group; what the config leaves at None is not sent."""
    guides = {"regex": config.guided_regex, "json": config.guided_json}
    params = {
        "n": config.num_generations,
        "max_tokens": config.max_completion_len,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "stop": config.stop,
        "structured_outputs": {name: guide for name, guide in guides.items() if guide} or None,
        **(config.sampling_params or {}),
    }
    return {name: value for name, value in params.items() if value is not None}


def load_rows(source: str | Callable[[], Any], split: str, config: TrainConfig) -> list[dict[str, Any]]:
    """The rows of a function, a local `.jsonl`/`.parquet` file or a `datasets` name.

    Raises:
        ValueError: no such file, or no rows.
    """
    if callable(source):
        rows = list(source())
    else:
        path = Path(source)
        if is_data_file(source) and not path.is_file():
            raise UserError(f"dataset file {source} does not exist")
        if path.is_file() and not is_data_file(source):
            raise UserError(f"dataset file {source} must be .jsonl (one object a line) or .parquet")
        rows = _jsonl_rows(path) if path.suffix == ".jsonl" else _datasets_rows(source, split, config)
    if config.collate_fn:
        assert callable(config.collate_fn)
        rows = config.collate_fn(rows)
    if not rows:
        raise UserError(f"dataset {source if isinstance(source, str) else source.__name__} has no rows")
    return rows


def _jsonl_rows(path: Path) -> list[dict[str, Any]]:
    """The objects as they stand: `datasets` would turn strings that look like dates into dates."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not JSON: {error}") from None
    return rows


def _datasets_rows(source: str, split: str, config: TrainConfig) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        if source.endswith(".parquet"):
            return list(load_dataset("parquet", data_files=source, split="train"))
        return list(load_dataset(source, config.dataset_config, split=split))
    except (OSError, ValueError) as error:  # ConnectionError, DatasetNotFoundError, an unknown split
        raise UserError(f"dataset {source} cannot be loaded: {str(error).splitlines()[0]}") from error


def tokenize_prompt(tokenizer: Any, prompt: Any, config: TrainConfig) -> list[int]:
    """Token ids of a string or of chat messages: the chat template once, and no second BOS."""
    if isinstance(prompt, str) and (config.no_apply_chat_template or not tokenizer.chat_template):
        return tokenizer(prompt)["input_ids"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote the BOS where there is one


def load_prompts(
    source: str | Callable[[], Any], split: str, tokenizer: Any, max_prompt_len: int, config: TrainConfig
) -> list[Prompt]:
    """Prompts with their token ids and reward columns; those over `max_prompt_len` tokens are counted and left out.

    Raises:
        ValueError: a row without a usable `prompt`, a column that does not exist, or nothing left.
    """
    rows = load_rows(source, split, config)
    prompts = []
    for index, row in enumerate(rows):
        if not isinstance(row.get("prompt"), str | list) or not row["prompt"]:
            raise UserError(
                f"dataset row {index} has no `prompt` (string or chat messages); its columns are {sorted(row)}"
            )
        wanted = [name for name in row if name != "prompt"] if config.extra_columns is None else config.extra_columns
        if missing := [name for name in wanted if name not in row]:
            raise UserError(
                f"dataset row {index} has no column {missing[0]}, which extra_columns names; it has {sorted(row)}"
            )
        if taken := {"prompts", "completions", "completion_ids"} & set(wanted):
            raise UserError(f"dataset column {taken.pop()} is the name of a reward's own argument: rename it")
        token_ids = tokenize_prompt(tokenizer, row["prompt"], config)
        prompts.append(Prompt(index, token_ids, row["prompt"], {name: row[name] for name in wanted}))
    kept = [prompt for prompt in prompts if 0 < len(prompt.token_ids) <= max_prompt_len]
    if len(kept) < len(prompts):
        print(f"left out {len(prompts) - len(kept)} of {len(prompts)} prompts: empty, or over {max_prompt_len} tokens")
    if not kept:
        raise UserError(
            f"no prompt has at most {max_prompt_len} tokens, the room that max_completion_len="
            f"{config.max_completion_len} leaves in the server's --max-model-len and in max_tokens_per_gpu"
        )
    return kept


# --------------------------------------------------------------------------------------------------------------------
# Rewards


def score(groups: list[Group], tokenizer: Any, config: TrainConfig) -> Tensor:
    """Fill in the groups' `texts` and `rewards`.

    Returns:
        [num_groups, num_generations] fp64, weighted sums over the functions; None is left out, NaN where all are None.

    Raises:
        ValueError: as `reward_group`.
    """
    for group in groups:
        group.texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in group.completions]
        columns = [reward_group(function, group) for function in config.reward_funcs]
        group.rewards = [list(row) for row in zip(*columns, strict=True)]
    numbers = [[[math.nan if r is None else r for r in row] for row in group.rewards] for group in groups]
    parts = torch.tensor(numbers, dtype=torch.float64)
    weights = torch.tensor(config.reward_weights or [1.0] * len(config.reward_funcs), dtype=torch.float64)
    return (parts * weights).nansum(-1).masked_fill(parts.isnan().all(-1), math.nan)


def reward_group(function: Any, group: Group) -> list[float | None]:
    """One reward per completion from `f(prompts, completions, completion_ids, **columns)`.

    Raises:
        ValueError: the function raises, or returns something else than one finite number or None per completion; the
            message names it and the dataset row.
    """
    num = len(group.completions)
    where = f"reward {function.__name__} on dataset row {group.prompt.index}"
    try:
        values = function(
            prompts=[group.prompt.content] * num,
            completions=group.texts,
            completion_ids=[c.token_ids for c in group.completions],
            **{name: [value] * num for name, value in group.prompt.columns.items()},
        )
    except Exception as error:
        raise UserError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(values, list | tuple) or len(values) != num:
        got = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
        raise UserError(f"{where} returned {got}: it must return a list of {num} numbers, one per completion")
    for value in values:
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            raise UserError(f"{where} returned {value!r}: rewards are finite numbers or None")
    return [None if value is None else float(value) for value in values]


def batch_metrics(groups: list[Group], rewards: Tensor, version: int, config: TrainConfig) -> dict[str, float]:
    """What is known of a batch before it trains under policy `version`: rewards, lengths, staleness."""
    completions = [c for group in groups for c in group.completions]
    lengths = torch.tensor([float(len(c.token_ids)) for c in completions])
    staleness = torch.tensor([float(version - c.weight_versions[0][0]) for c in completions])
    spread = torch.stack([row[~row.isnan()].std(unbiased=False) for row in rewards]).nan_to_num(0.0)
    return {
        "reward": rewards.nanmean().item(),
        "reward_std": spread.mean().item(),
        "frac_reward_zero_std": sum(len(set(row[~row.isnan()].tolist())) <= 1 for row in rewards) / len(rewards),
        **reward_means(groups, config),
        "staleness/mean": staleness.mean().item(),
        "staleness/max": staleness.max().item(),
        "completions/mean_length": lengths.mean().item(),
        "completions/clipped_ratio": sum(c.truncated for c in completions) / len(completions),
    }


def reward_means(groups: list[Group], config: TrainConfig) -> dict[str, float]:
    """`rewards/<function>`: its mean over the completions that it gave a number."""
    means = {}
    for number, function in enumerate(config.reward_funcs):
        assert callable(function)
        given = [value for group in groups for row in group.rewards if (value := row[number]) is not None]
        means[f"rewards/{function.__name__}"] = sum(given) / len(given) if given else math.nan
    return means


def batch_samples(
    groups: list[Group], rewards: Tensor, advantages: Tensor, config: TrainConfig
) -> list[dict[str, Any]]:
    """One JSON object per completion, for `completions.jsonl`."""
    names = [function.__name__ for function in config.reward_funcs if callable(function)]
    return [
        {
            "row": group.prompt.index,
            "prompt": group.prompt.content,
            "completion": text,
            "reward": None if reward.isnan() else reward.item(),
            "rewards": dict(zip(names, parts, strict=True)),
            "advantage": advantage.item(),
            "finish_reason": completion.finish_reason,
            "weight_versions": completion.weight_versions,
        }
        for group, group_rewards, group_advantages in zip(groups, rewards, advantages, strict=True)
        for completion, text, parts, reward, advantage in zip(
            group.completions, group.texts, group.rewards, group_rewards, group_advantages, strict=True
        )
    ]
