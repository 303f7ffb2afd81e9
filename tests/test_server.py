"""The real vLLM server: completions, weight sync from every kind of policy, access, refusals."""

import concurrent.futures
import contextlib
import copy
import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import torch.distributed as dist
from forked import Forked
from helpers import ENV, VOCAB, far_from_uniform, make_tokenizer, on_ranks, server, wait_until
from launch import LocalServer, free_port
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from config import TrainConfig, UserError
from prefix_attention import attach, completion_logprobs, pack
from rollouts.group import version_spans
from rollouts.rollouts import Rollouts
from rollouts.sampling import sampling_params
from rollouts.servers import ServerPool
from training.loading import add_lora
from training.model import load_model, parallelize
from utils import broadcast_object, process_group
from vllm_client import Server, ServerError
from weights.group import BUCKET_BYTES
from weights.publish import published_weights, unwrap

PROMPT = [5, 20, 33, 41, 7, 8]


def make_config(model, url, **fields):
    prompts = lambda: [{"prompt": "12+34="}, {"prompt": "5+6="}]
    defaults = {"dataset_id": prompts, "reward_funcs": [lambda **_: []]}
    defaults |= {"max_completion_len": 16, "server_timeout": 60.0}
    return TrainConfig(model_id=model, vllm_urls=[url], **{**defaults, **fields})


@pytest.fixture
def client(servers):
    """What a recipe's `rollout_fn` gets."""
    return Server(servers["tied"], 60.0)


@pytest.fixture
def our_server(monkeypatch):
    """The module of `vllm_server.py`, which needs vLLM, with an environment of its own."""
    import vllm_server

    monkeypatch.setattr(os, "environ", os.environ.copy())
    return vllm_server


LORA = {"use_peft": True, "lora_rank": 4}
KINDS: list[dict[str, Any]] = [{}, LORA, {"use_fsdp": True}, {"use_fsdp": True, **LORA}]


def make_policy(config, device):
    torch.manual_seed(0)
    model = load_model(config)
    model = add_lora(model, config) if config.use_peft else model
    return attach(parallelize(model, config, device))


@torch.no_grad()
def disturb(policy, seed):
    """Move every trainable weight, alike on all ranks (each FSDP2 shard by its own noise, which is as good)."""
    generator = torch.Generator().manual_seed(seed)
    for weight in policy.parameters():
        if weight.requires_grad:
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.add_(0.1 * torch.randn(local.shape, generator=generator))


def bits(policy):
    tensors = unwrap(policy).state_dict(keep_vars=True)
    local = {n: t.to_local() if hasattr(t, "to_local") else t for n, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in local.items()}


@torch.no_grad()
def trainer_logprobs(policy, completions, temperature=1.0):
    """Those of completions of the prompt, one after the other."""
    (row,) = pack([(PROMPT, [c.token_ids for c in completions])], share_prefix=False)
    return completion_logprobs(policy, row, temperature)


@contextlib.contextmanager
def opened(config, device, num_updates=0):
    """Rollouts and their policy: after the first sync it was moved, and sent again, so many times."""
    with contextlib.closing(Rollouts(config, device)) as rollouts:
        policy = make_policy(config, device)
        rollouts.publish(policy, 0)
        for version in range(1, num_updates + 1):
            disturb(policy, version)
            rollouts.publish(policy, version)
        yield rollouts, policy


@contextlib.contextmanager
def connected(config, num_updates=0):
    """The same, of this process alone."""
    with process_group(120) as device, opened(config, device, num_updates) as both:
        yield both


def mismatch(policy, rollouts, config):
    """Mean |trainer - server| over fresh completions, nats; collective. Under LoRA single tokens may be 3e-4 apart."""
    replies = None
    if dist.get_rank() == 0:
        replies = rollouts.pool.servers[0].generate(PROMPT, {**sampling_params(config), "n": 4})
    replies = broadcast_object(replies)
    sampled = torch.cat([c.sampler_logprobs for c in replies])
    versions = torch.cat([c.weight_versions for c in replies]).unique().tolist()
    apart = trainer_logprobs(policy, replies, config.temperature) - sampled
    return apart.abs().mean().item(), versions


def sync_main(model, url, folder, kinds):
    """On every rank: all kinds of policy, two updates each; rank 0 writes what it saw."""
    seen = []
    with process_group(120) as device:
        for number, kind in enumerate(json.loads(kinds)):
            config = make_config(model, url, temperature=0.8, **kind)
            with opened(config, device, 1) as (rollouts, policy):
                disturb(policy, 10 + number)
                before = bits(policy)
                rollouts.publish(policy, 2)
                same = all(torch.equal(before[name], after) for name, after in bits(policy).items())
                apart, versions = mismatch(policy, rollouts, config)
            seen.append({"mismatch": apart, "versions": versions, "bit_identical": same})
        if dist.get_rank() == 0:
            (Path(folder) / "seen.json").write_text(json.dumps(seen))


def check_syncs(num_ranks, model, url, folder, kinds):
    """After two updates the server's log-probs are the trainer's, to rounding (1e-6 nats in the mean)."""
    on_ranks(num_ranks, folder, "test_server.sync_main", model, url, folder, json.dumps(kinds))
    for kind, seen in zip(kinds, json.loads((folder / "seen.json").read_text()), strict=True):
        assert seen["mismatch"] <= 2e-5, kind
        assert seen["versions"] == [2], kind
        assert seen["bit_identical"], kind


@pytest.mark.parametrize(("embeddings", "num_ranks"), [("tied", 2), ("untied", 1)])
def test_sync_from_every_kind_of_policy(models, servers, tmp_path, embeddings, num_ranks):
    check_syncs(num_ranks, models[embeddings], servers[embeddings], tmp_path, KINDS)


def assert_agreement(config):
    """After the first sync and another one the server computes what this process does, to rounding."""
    with connected(config, 1) as (rollouts, policy):
        apart, versions = mismatch(policy, rollouts, config)
    assert apart <= 2e-5
    assert versions == [1]


def two_workers(model, log, *options):
    """A server of two workers, each on a core of its own where there are two."""
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if len(os.sched_getaffinity(0)) > 1 else {}
    return server(model, log, "--tensor-parallel-size", "2", *options, env=env)


def test_tensor_parallel_server(models, tmp_path):
    """Two workers, each with its shard of every tensor."""
    with two_workers(models["untied"], tmp_path / "log") as started:
        assert_agreement(make_config(models["untied"], started.wait()))


def without_a_norm(policy):
    """Its weights, but for one layer's norm."""
    return ((name, t) for name, t in published_weights(policy) if name != "model.norm.weight")


def test_the_probe_notices_weights_that_did_not_arrive(models, servers, monkeypatch):
    """Law 6: one layer's norm left out of the first sync is enough to stop the run."""
    monkeypatch.setattr("rollouts.servers.PROBE_S", 0.2)
    config = make_config(models["untied"], servers["untied"])
    with process_group(120) as device, contextlib.closing(Rollouts(config, device)) as rollouts:
        policy = make_policy(config, device)
        with monkeypatch.context() as patch:
            patch.setattr("rollouts.rollouts.published_weights", without_a_norm)
            with pytest.raises(ServerError, match="differ from the trainer.s by"):
                rollouts.publish(policy, 0)
        wait_until(lambda: rollouts.pool.waiting)
        rollouts.publish(policy, 1)
        assert rollouts.pool.serving == rollouts.pool.servers  # and the server is whole again


def test_an_update_that_breaks_off_leaves_a_usable_server(models, servers, monkeypatch):
    """A trainer that dies between two layers: the server resumes, and the next trainer's sync is whole."""

    def half(policy):
        for number, weight in enumerate(published_weights(policy)):
            if number == 20:  # in the second layer, after the first was rebuilt
                raise InterruptedError("the trainer died")
            yield weight

    config = make_config(models["untied"], servers["untied"])
    with monkeypatch.context() as patch, connected(config) as (rollouts, policy):
        patch.setitem(BUCKET_BYTES, "cpu", 10_000)
        patch.setattr("rollouts.servers.PROBE_S", 3600.0)  # who is dead takes no server back
        patch.setattr("rollouts.rollouts.published_weights", half)
        with pytest.raises(InterruptedError):
            rollouts.publish(policy, 1)
    assert_agreement(config)


def check_an_update_in_flight(config):
    """Tokens before an update keep the old version and log-probs; those after are computed under the new weights."""
    sampling = {"n": 4, "max_tokens": 100, "ignore_eos": True, "temperature": 1.0}
    with connected(config) as (rollouts, new), concurrent.futures.ThreadPoolExecutor(1) as threads:
        for version in range(1, 21):  # until the update hits a request in mid-generation
            old, new = new, make_policy(config, rollouts.device)
            disturb(new, version)
            reply = threads.submit(rollouts.pool.servers[0].generate, PROMPT, sampling)
            rollouts.publish(new, version)
            caught = [c for c in reply.result() if len(version_spans(c.weight_versions)) == 2]
            if caught:
                break
    completion = caught[0]
    (_, _, change), last_span = version_spans(completion.weight_versions)
    assert last_span == (version, change, 100)
    off_old, off_new = (
        (trainer_logprobs(policy, [completion]) - completion.sampler_logprobs).abs()
        for policy in (old, new)
    )
    assert off_old[:change].max() <= 1e-4
    assert off_new[change:].max() <= 1e-4
    assert off_old[change:].max() > 1e-2  # the two do differ


@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_updates_in_flight_keep_both_versions(models, servers, embeddings):
    config = make_config(models[embeddings], servers[embeddings], max_completion_len=100)
    check_an_update_in_flight(config)


GIB, CACHE = 1 << 30, "kv_cache_memory_bytes"
ON_CPU = {  # of 8 cores and 16 GiB of free memory
    "dtype": "float32", "max_model_len": -1, "max_num_seqs": 256, "block_size": 32, "enforce_eager": True,
    "enable_chunked_prefill": False, "mm_processor_cache_gb": 0,
    CACHE: 2 * GIB, "OMP_NUM_THREADS": "4",
    "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
ENVIRONMENT = [name for name in ON_CPU if name.isupper()]
CHOICES: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    # options, environment, what is not as in ON_CPU
    ("", {}, {}),
    ("--dtype=bfloat16 --max_num_seqs 7", {}, {"dtype": "bfloat16", "max_num_seqs": 7}),
    ("--no-enforce-eager", {}, {"enforce_eager": False, "TORCHDYNAMO_DISABLE": "0"}),
    ("--kv-cache-memory-bytes 3G", {}, {CACHE: 3 * GIB}),
    ("--gpu_memory_utilization=0.3", {}, {CACHE: None}),  # vLLM makes it of that
    ("", {"VLLM_CPU_KVCACHE_SPACE": "1"}, {CACHE: None}),
    ("--config FILE", {}, {"dtype": "bfloat16", "block_size": 64}),
    ("", {"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
    ("", dict.fromkeys(ENVIRONMENT, "7"), dict.fromkeys(ENVIRONMENT, "7")),
]


@pytest.fixture(scope="module")
def parser():
    """vLLM's options, which take long to list."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.fixture
def start(our_server, parser, monkeypatch):
    """What a server would start with, by its options and environment, and the machine's cores and free GiB."""

    def choose(options="", variables=(), cores=8, free_gib=16):
        own = copy.deepcopy(parser)
        resources = our_server.cpu_resource_utils
        memory = resources.MemoryNodeInfo(100 * GIB, free_gib * GIB)
        monkeypatch.setattr(our_server.AsyncEngineArgs, "add_cli_args", lambda _: own)
        monkeypatch.setattr(our_server.torch_utils, "available_cpu_count", lambda: cores)
        monkeypatch.setattr(resources, "get_memory_node_info", lambda: memory)
        monkeypatch.setattr(os, "environ", dict(variables))
        args = our_server.options(["--model", "nowhere", *options.split()])
        return {name: getattr(args, name, os.environ.get(name)) for name in ON_CPU}

    return choose


@pytest.mark.parametrize(("options", "variables", "changed"), CHOICES)
def test_what_the_user_gave_nothing_for(start, tmp_path, options, variables, changed):
    """On the CPU it gets our choice, in the engine's processes, too."""
    file = tmp_path / "config.yaml"
    file.write_text("dtype: bfloat16\nblock-size: 64\n")
    assert start(options.replace("FILE", str(file)), variables) == {**ON_CPU, **changed}


def test_what_a_machine_has(start):
    little = {"OMP_NUM_THREADS": "1", CACHE: GIB // 2}
    assert start(cores=1, free_gib=4) == {**ON_CPU, **little}
    assert start(free_gib=99) == {**ON_CPU, CACHE: 4 * GIB}


def test_on_a_gpu_it_stays_vllms(our_server, start, parser, monkeypatch):
    """But for the cache of images."""
    monkeypatch.setattr(our_server.current_platform, "is_cpu", lambda: False)
    theirs = {name: parser.get_default(name) for name in ON_CPU}
    assert start() == {**theirs, "mm_processor_cache_gb": 0}


def test_a_start_without_options(models, tmp_path, monkeypatch):
    """It says what it does, but no token; in a sync vLLM warns of layers whose weights did not come, not of others."""
    log, port = tmp_path / "log", free_port()
    env = {name: value for name, value in ENV.items() if name not in ENVIRONMENT}
    env |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_API_KEY": "secret"}
    command = ["python", "vllm_server.py", "--model", models["tied"], "--port", str(port)]
    started = LocalServer(f"http://127.0.0.1:{port}", Forked(command, log, env), log)
    try:
        config = make_config(models["tied"], started.wait())
        assert requests.post(f"{started.url}/sample", json={}, timeout=20).status_code == 401
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        assert_agreement(config)
        assert "not loaded" not in log.read_text()
        with connected(config) as (rollouts, policy):
            monkeypatch.setattr("rollouts.rollouts.published_weights", without_a_norm)
            rollouts.publish(policy, 1)
    finally:
        os.killpg(started.process.pid, signal.SIGTERM)
        started.process.wait(20)
    printed = log.read_text()
    assert re.findall("not loaded from checkpoint: (.*)", printed) == ["{'model.norm.weight'}"]
    assert "Failed to load weights" not in printed
    assert f"loading {models['tied']} on the CPU: --dtype float32 --kv-cache-memory-" in printed
    assert f"serving at 127.0.0.1 port {port}, up to 256 tokens" in printed
    assert "secret" not in printed


def test_sampling_parameters_take_effect(client):
    def ask(**fields):
        return client.generate(PROMPT, {"n": 2, "max_tokens": 12, "temperature": 1.0, **fields})

    def text_of(completion):
        return "".join(chr(token + 28) for token in completion.token_ids.tolist() if token > 3)

    greedy = ask(temperature=0.0, n=1)[0].token_ids
    for same in (ask(top_k=1)[0], ask(top_p=1e-6)[1], ask(min_p=1.0)[0]):
        assert torch.equal(same.token_ids, greedy)
    cut = ask(ignore_eos=True)[0]
    assert cut.finish_reason == "length"
    assert len(cut.token_ids) == len(cut.sampler_logprobs) == 12
    third = ask(temperature=0.0, n=1, ignore_eos=True)[0].token_ids[2]
    stopped = ask(temperature=0.0, n=1, stop=[chr(int(third) + 28)])[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] == third
    (biased,) = ask(n=1, allowed_token_ids=[20, 30], logit_bias={"20": -100.0})
    assert set(biased.token_ids.tolist()) == {30}
    ask(bad_words=["no"], repetition_detection={"max_pattern_size": 3, "min_count": 4})
    for reply in ask(structured_outputs={"regex": "[0-9]{3}"}, max_tokens=8):
        assert re.fullmatch("[0-9]{3}", text_of(reply))
    for reply in ask(structured_outputs={"json": {"enum": [173, 426]}}, max_tokens=8):
        assert text_of(reply) in ("173", "426")


def test_a_stop_string_may_be_a_special_token(client):
    """As `</answer>` in some vocabularies: vLLM leaves such tokens out of the text that it looks at, unless told."""
    sampling = {"n": 64, "max_tokens": 60, "temperature": 2.0, "stop": ["<bos>"]}
    completions = client.generate(PROMPT, sampling)
    ends = [completion.token_ids[-1] == 1 for completion in completions]
    assert any(ends)
    assert not any((completion.token_ids[:-1] == 1).any() for completion in completions)


@pytest.mark.parametrize(
    ("words", "token", "message"),
    [
        ("--middleware x.y", "", "unrecognized arguments: --middleware x.y"),
        ("--host 0.0.0.0", "", "--host 0.0.0.0 is reachable from outside: set VLLM_API_KEY"),
        ("--host 0.0.0.0", " \n", "--host 0.0.0.0 is reachable from outside: set VLLM_API_KEY"),
        ("--port PORT", "", "Address already in use"),
    ],
)
def test_what_is_refused_at_the_start(
    models, our_server, monkeypatch, capsys, words, token, message
):
    """Before a model is loaded."""
    monkeypatch.setenv("VLLM_API_KEY", token)
    monkeypatch.setattr(our_server, "serve", None)  # or what is not refused would be served
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as refused:
            our_server.main(["--model", models["tied"], *words.replace("PORT", port).split()])
    told = f"{refused.value}{capsys.readouterr().err}"
    assert message in told
    assert told.count("\n") <= 2  # how it is used, and the error


def test_options_that_a_user_cannot_turn(models, our_server, monkeypatch):
    """Images are data URIs, probes go first, and the log shows no token."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    words = "--scheduling-policy fcfs --allowed-media-domains a.b --api-key secret --host 0.0.0.0"
    args = our_server.options(["--model", models["tied"], *words.split()])
    assert args.model == models["tied"]
    assert args.scheduling_policy == "priority"
    assert args.allowed_media_domains == ["none.invalid"]
    assert args.disable_log_stats
    assert "secret" not in str(args)
    assert os.environ["VLLM_API_KEY"] == "secret"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topP": 0.9}, "unknown field `topP`"),
        ({"best_of": 2}, "unknown field `best_of`"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": "high"}, r"Expected `float`, got `str` - at `\$.top_p`"),
        ({"seed": "one"}, "seed"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"min_tokens": 600}, "min_tokens"),
        ({"logit_bias": {"three": 1.5}}, "logit_bias"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"structured_outputs": {"regexp": "a"}}, "structured outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured outputs"),
        ({"structured_outputs": {"regex": "(("}}, "regex"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "min_count"),
    ],
)
def test_sampling_params_are_tried_by_the_server(models, servers, given, message):
    """Before the policy is loaded, in one line; whether or not an earlier trainer has left it paused."""
    sampling = {"n": 2, "max_tokens": 512, "temperature": 1.0, **given}
    with (
        contextlib.closing(ServerPool(make_config(models["tied"], servers["tied"]))) as pool,
        pytest.raises(ServerError, match=message) as refused,
    ):
        pool.wait_until_ready(sampling)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("prompt", [[], [10**9]])
def test_prompts_that_the_engine_refuses(client, prompt):
    with pytest.raises(ServerError, match="/sample answered 400: ") as refused:
        client.generate(prompt, {"n": 1, "max_tokens": 4})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("target", ["qkv", "embed_tokens", "lm_head"])
def test_lora_targets_that_are_refused(models, target):
    targets = ["q_proj", target]
    config = make_config(models["tied"], "http://x", use_peft=True, lora_target_modules=targets)
    with pytest.raises(UserError, match=f"{target} is no module, or a tied embedding"):
        add_lora(load_model(config), config)


def test_experts_reach_the_server(tmp_path):
    """By the names of checkpoints; vLLM prepacks them for the CPU, which its reload leaves as they were."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(VOCAB), hidden_size=128, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    far_from_uniform(Qwen3MoeForCausalLM(config), 4).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with server(str(tmp_path), tmp_path / "log") as started:
        config = make_config(str(tmp_path), started.wait(), max_completion_len=100)
        assert_agreement(config)
        check_an_update_in_flight(config)


def test_seeded_prompts_beyond_a_steps_budget(servers):
    """Staleness 0 seeds its requests, and vLLM's CPU engine ends where it prefills a seeded one in parts."""
    client = Server(servers["untied"], 60.0)
    sampling = {"n": 4, "max_tokens": 8, "temperature": 1.0}
    ask = lambda seed: client.generate([seed % 9 + 1] * 40, {**sampling, "seed": seed})
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        assert [len(reply) for reply in threads.map(ask, range(32))] == [4] * 32
