"""The real vLLM server: completions, weight sync from every kind of policy, access, refusals."""

import asyncio
import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import torch
import torch.distributed as dist
from forked import Forked
from helpers import ENV, ROOT, VOCAB, make_tokenizer, on_ranks, server
from launch import LocalServer, free_port
from safetensors.torch import load_file
from torch.distributed import TCPStore
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.local_server import local_server
from config import TrainConfig, UserError
from prefix_attention import attach, completion_logprobs, pack
from rollouts.group import version_spans
from rollouts.rollouts import Rollouts
from rollouts.sampling import sampling_params
from rollouts.servers import ServerPool
from training.lora import add_lora
from training.model import load_model, parallelize
from utils import broadcast_object, process_group
from vllm_client import TRAINER, Server, ServerError, UpdateBroken
from weights.group import BUCKET_BYTES, Meeting, WeightGroup, packed
from weights.publish import buckets, full_weights, host_weights, published_weights, unwrap

PROMPT = [5, 20, 33, 41, 7, 8]


def prompts():
    return [{"prompt": "12+34="}, {"prompt": "5+6="}]


def no_reward(completions, **_):
    return [0.0] * len(completions)


def make_config(model, url, **fields):
    defaults = {
        "dataset_id": prompts,
        "reward_funcs": [no_reward],
        "max_completion_len": 16,
        "server_timeout": 60.0,
    }
    return TrainConfig(model_id=model, vllm_urls=[url], **{**defaults, **fields})


@pytest.fixture
def client(servers):
    """What a recipe's `rollout_fn` gets."""
    return Server(servers["tied"], 60.0)


# -- weight sync -----------------------------------------------------------------------------------------------------

KINDS = [
    {**wrapper, **peft}
    for wrapper in ({}, {"use_fsdp": True})
    for peft in ({}, {"use_peft": True, "lora_rank": 4})
]


def make_policy(config, device):
    torch.manual_seed(0)
    model = load_model(config)
    return attach(
        parallelize(add_lora(model, config) if config.use_peft else model, config, device)
    )


@torch.no_grad()
def disturb(policy, seed):
    """Move every trainable weight, alike on all ranks (each FSDP2 shard by its own noise, which is as good)."""
    generator = torch.Generator().manual_seed(seed)
    for weight in policy.parameters():
        if weight.requires_grad:
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.add_(0.1 * torch.randn(local.shape, generator=generator))


def bits(policy):
    tensors = unwrap(policy).state_dict(keep_vars=True).items()
    return {
        name: (t.to_local() if hasattr(t, "to_local") else t).detach().clone()
        for name, t in tensors
    }


def mismatch(policy, rollouts, config, device):
    """Mean |trainer - server| over fresh completions, nats; collective. Under LoRA single tokens may be 3e-4 apart."""
    replies = None
    if dist.get_rank() == 0:
        replies = rollouts.pool.servers[0].generate(PROMPT, {**sampling_params(config), "n": 4})
    replies = broadcast_object(replies)
    pairs = [(PROMPT, [c.token_ids for c in replies])]
    with torch.no_grad():
        (row,) = pack(pairs, share_prefix=False)
        logprobs = completion_logprobs(policy, row.to(device), config.temperature)
    sampled = torch.cat([c.sampler_logprobs for c in replies])
    return (logprobs - sampled).abs().mean().item(), sorted(
        {version for c in replies for version in c.weight_versions.tolist()}
    )


def sync_main(model, url, folder):
    """On every rank: all kinds of policy, two updates each; rank 0 writes what it saw."""
    seen, output = [], Path(folder)
    with process_group(120) as device:
        for number, kind in enumerate(KINDS):
            config = make_config(model, url, temperature=0.8, **kind)
            rollouts = Rollouts(config, device)
            policy = make_policy(config, device)
            rollouts.publish(policy, 0)
            for version in (1, 2):
                disturb(policy, 10 * number + version)
                before = bits(policy)
                rollouts.publish(policy, version)
                same = all(torch.equal(before[name], after) for name, after in bits(policy).items())
            apart, versions = mismatch(policy, rollouts, config, device)
            published = {name: tensor.clone() for name, tensor in published_weights(policy)}
            saved = host_weights(policy)
            rollouts.close()
            if dist.get_rank() == 0:
                unwrap(policy).save_pretrained(output / f"checkpoint-{number}", state_dict=saved)
                torch.save(published, output / f"published-{number}.pt")
                seen.append({"mismatch": apart, "versions": versions, "bit_identical": same})
        if dist.get_rank() == 0:
            (output / "seen.json").write_text(json.dumps(seen))


@pytest.mark.parametrize(("embeddings", "num_ranks"), [("tied", 1), ("tied", 2), ("untied", 2)])
def test_sync_from_every_kind_of_policy(models, servers, tmp_path, embeddings, num_ranks):
    """After two updates the server's log-probs are the trainer's, to rounding (1e-6 nats in the mean)."""
    on_ranks(
        num_ranks,
        tmp_path,
        "test_server.sync_main",
        models[embeddings],
        servers[embeddings],
        tmp_path,
    )
    for number, (kind, seen) in enumerate(
        zip(KINDS, json.loads((tmp_path / "seen.json").read_text()), strict=True)
    ):
        assert seen["mismatch"] <= 2e-5, kind
        assert seen["versions"] == [2], kind
        assert seen["bit_identical"], kind
        published = torch.load(tmp_path / f"published-{number}.pt")
        checkpoint = tmp_path / f"checkpoint-{number}"
        if kind.get("use_peft"):
            from peft import AutoPeftModelForCausalLM

            merged = AutoPeftModelForCausalLM.from_pretrained(
                checkpoint, dtype=torch.float32
            ).merge_and_unload()
            saved = merged.state_dict()
            assert set(published) <= set(saved)
            for (
                name,
                tensor,
            ) in published.items():  # peft adds in place: the same sum, rounded once more
                torch.testing.assert_close(tensor, saved[name], rtol=1e-6, atol=1e-6)
        else:
            saved = load_file(checkpoint / "model.safetensors")
            assert set(saved) == set(published)
            assert all(torch.equal(saved[name], tensor) for name, tensor in published.items()), kind


def assert_agreement(config):
    """After the first sync and another one the server computes what this process does, to rounding."""
    with process_group(120) as device:
        rollouts = Rollouts(config, device)
        policy = make_policy(config, device)
        rollouts.publish(policy, 0)
        disturb(policy, 5)
        rollouts.publish(policy, 1)
        apart, versions = mismatch(policy, rollouts, config, device)
        rollouts.close()
    assert apart <= 2e-5
    assert versions == [1]


def test_tensor_parallel_server(models, tmp_path):
    """Two workers, each with its shard of every tensor."""
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if len(os.sched_getaffinity(0)) > 1 else {}
    with server(
        models["untied"], tmp_path / "log", "--tensor-parallel-size", "2", env=env
    ) as started:
        assert_agreement(make_config(models["untied"], started.wait()))


def test_the_probe_notices_weights_that_did_not_arrive(models, servers, monkeypatch):
    """Law 6: one layer's norm left out of the first sync is enough to stop the run."""
    complete = published_weights
    monkeypatch.setattr(
        "rollouts.rollouts.published_weights",
        lambda p: ((n, t) for n, t in complete(p) if n != "model.norm.weight"),
    )
    config = make_config(models["untied"], servers["untied"])
    with process_group(120) as device:
        rollouts = Rollouts(config, device)
        with pytest.raises(ServerError, match="differ from the trainer.s by"):
            rollouts.publish(make_policy(config, device), 0)
        monkeypatch.setattr("rollouts.rollouts.published_weights", complete)
        rollouts.publish(make_policy(config, device), 0)
        assert rollouts.pool.serving == rollouts.pool.servers  # and the server is whole again
        rollouts.close()


def meeting_at(port, **fields):
    place = {"host": "127.0.0.1", "port": port, "secret": "a secret", "backend": "gloo"}
    return Meeting(**(place | {"world_size": 2, "first_rank": 1, "timeout_s": 30.0} | fields))


def test_a_trainer_that_dies_before_its_first_bucket_leaves_a_usable_server(models, servers):
    """What it began is given up at once; the next trainer's weights come as ever."""
    server = Server(servers["untied"], 60.0)
    server.connect(TRAINER)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        meeting = meeting_at(store.port)
        reply = pool.submit(server.update, 1, meeting)
        group = WeightGroup(meeting, 0, torch.device("cpu"), store)
        time.sleep(0.5)
        assert not reply.done()
        group.close()
        del group
        with pytest.raises(UpdateBroken):
            reply.result(20)
    server.disconnect()
    assert_agreement(make_config(models["untied"], servers["untied"]))


def test_an_update_that_breaks_off_leaves_a_usable_server(models, servers, monkeypatch):
    """A trainer that dies between two layers: the server resumes, and the next trainer's sync is whole."""
    monkeypatch.setitem(BUCKET_BYTES, "cpu", 10_000)
    monkeypatch.setattr(
        "rollouts.servers.PROBE_S", 3600.0
    )  # a trainer that is dead takes no server back
    complete = published_weights

    def half(policy):
        for number, weight in enumerate(complete(policy)):
            if number == 20:  # in the second layer, after the first was rebuilt
                raise InterruptedError("the trainer died")
            yield weight

    config = make_config(models["untied"], servers["untied"])
    with process_group(120) as device:
        rollouts = Rollouts(config, device)
        policy = make_policy(config, device)
        rollouts.publish(policy, 0)
        monkeypatch.setattr("rollouts.rollouts.published_weights", half)
        with pytest.raises(InterruptedError):
            rollouts.publish(policy, 1)
        rollouts.close()
        monkeypatch.setattr("rollouts.rollouts.published_weights", complete)
        rollouts = Rollouts(config, device)
        disturb(policy, 3)
        rollouts.publish(policy, 0)
        apart, versions = mismatch(policy, rollouts, config, device)
        rollouts.close()
    assert apart <= 2e-5
    assert versions == [0]


def test_weights_travel_while_the_server_samples(models, servers, capsys):
    """In the middle of an update it answers, under the old weights; the update is in place after its end alone."""
    config = make_config(models["tied"], servers["tied"])
    client = ServerPool(config)
    client.connect(torch.device("cpu"))
    (url,) = client.servers
    with process_group(120) as device:
        old, new = make_policy(config, device), make_policy(config, device)
    disturb(new, 1)
    for waiting in client.update_weights(published_weights(old), 0):
        client.admit(waiting)
    assert f"weights go to {servers['tied']} over gloo\n" in capsys.readouterr().out
    answers = []

    def halting():
        for number, weight in enumerate(published_weights(new)):
            if number in (2, 20):
                answers.append(url.generate(PROMPT, {"n": 1, "max_tokens": 16, "temperature": 1.0}))
            yield weight

    bucket_bytes = BUCKET_BYTES["cpu"]
    long = {"n": 8, "max_tokens": 100, "temperature": 1.0, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(url.generate, PROMPT, long)  # an idle server would load at once
        time.sleep(0.1)
        try:
            BUCKET_BYTES["cpu"] = 10_000
            client.update_weights(halting(), 1)
        finally:
            BUCKET_BYTES["cpu"] = bucket_bytes
        assert under_way.result()[0].weight_versions[0] == 0
    answers.append(url.generate(PROMPT, {"n": 1, "max_tokens": 16, "temperature": 1.0}))
    client.close()
    for (completion,), policy, version in zip(answers, (old, old, new), (0, 0, 1), strict=True):
        assert completion.weight_versions.eq(version).all()
        (row,) = pack([(PROMPT, [completion.token_ids])], share_prefix=False)
        with torch.no_grad():
            logprobs = completion_logprobs(policy, row)
        assert (logprobs - completion.sampler_logprobs).abs().max() <= 1e-4


def test_an_update_of_a_trainer_that_is_gone(models, servers):
    """Its request may still be on its way when the next one has connected: no weights come of it.

    Neither do they of a stranger whom the server was sent to, and who knows no secret.
    """
    client = ServerPool(make_config(models["tied"], servers["tied"]))
    client.connect(torch.device("cpu"))
    (url,) = client.servers
    with pytest.raises(UpdateBroken, match="they do not meet over gloo"):
        url.update(7, meeting_at(free_port(), timeout_s=5.0))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reply = pool.submit(url.update, 7, meeting_at(store.port, timeout_s=5.0))
        stranger = meeting_at(store.port, timeout_s=5.0, secret="another")
        with pytest.raises(RuntimeError, match="they do not meet over gloo"):
            WeightGroup(stranger, 0, torch.device("cpu"), store)
        with pytest.raises(UpdateBroken, match="they do not meet over gloo"):
            reply.result(20)
    client.close()
    assert_agreement(make_config(models["tied"], servers["tied"]))  # connecting had zeroed it


def check_an_update_in_flight(config):
    """Tokens before an update keep the old version and log-probs; those after are computed under the new weights."""
    sampling = {"n": 4, "max_tokens": 100, "ignore_eos": True, "temperature": 1.0}
    with process_group(120) as device:
        rollouts = Rollouts(config, device)
        old = make_policy(config, device)
        rollouts.publish(old, 0)
        for attempt in range(1, 20):  # until the update hits a request in mid-generation
            new = make_policy(config, device)
            disturb(new, attempt)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                reply = pool.submit(rollouts.pool.servers[0].generate, PROMPT, sampling)
                rollouts.publish(new, attempt)
                completions = reply.result()
            if any(len(version_spans(c.weight_versions)) == 2 for c in completions):
                break
            old = new
        rollouts.close()
        completion = next(c for c in completions if len(version_spans(c.weight_versions)) == 2)
        (_, _, change), (version, start, end) = version_spans(completion.weight_versions)
        assert (version, start, end) == (attempt, change, 100)
        (row,) = pack([(PROMPT, [completion.token_ids])], share_prefix=False)
        with torch.no_grad():
            under_old, under_new = (completion_logprobs(model, row) for model in (old, new))
        sampled = completion.sampler_logprobs
        assert (under_old - sampled)[:change].abs().max() <= 1e-4
        assert (under_new - sampled)[change:].abs().max() <= 1e-4
        assert (under_old - sampled)[change:].abs().max() > 1e-2  # the two do differ


@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_updates_in_flight_keep_both_versions(models, servers, embeddings):
    config = make_config(models[embeddings], servers[embeddings], max_completion_len=100)
    check_an_update_in_flight(config)


def test_merged_weights_are_temporaries(models):
    config = make_config(models["tied"], "http://x", use_peft=True, lora_rank=4)
    with process_group(60) as device:
        policy = make_policy(config, device)
        storages = {p.data_ptr() for p in policy.parameters()}
        merged = {
            name for name, tensor in full_weights(policy) if tensor.data_ptr() not in storages
        }
    assert {name for name in merged if "proj" not in name} == set()
    assert len(merged) == 14


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000")],
)
def test_an_address_can_be_copied(host, address, capsys, monkeypatch):
    """One of IPv6 stands in brackets."""
    import vllm_server

    async def nothing(**_):
        pass

    model_config = SimpleNamespace(max_model_len=64)
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model_config),
        errored=False,
        shutdown=lambda: print("shut down"),
    )
    fake = SimpleNamespace(from_engine_args=lambda _: engine, from_cli_args=lambda _: None)
    monkeypatch.setattr(vllm_server, "AsyncLLM", fake)
    monkeypatch.setattr(vllm_server, "AsyncEngineArgs", fake)
    monkeypatch.setattr(vllm_server, "RolloutServer", lambda *_: SimpleNamespace(app=None))
    monkeypatch.setattr(
        "uvicorn.Server", lambda _: SimpleNamespace(serve=nothing, should_exit=False)
    )
    args = SimpleNamespace(host=host, port=8000, ssl_keyfile=None, ssl_certfile=None)
    asyncio.run(vllm_server.serve(args, None))  # type: ignore[arg-type]
    said = f"serving at {address}, up to 64 tokens\nshut down\n"
    assert capsys.readouterr().out == said


# -- a start without options -----------------------------------------------------------------------------------------

GIB = 1 << 30
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "TORCHDYNAMO_DISABLE",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
)
ON_CPU = {  # of 8 cores and 16 GiB that are free
    "dtype": "float32", "max_model_len": -1, "max_num_seqs": 256, "block_size": 32, "enforce_eager": True,
    "enable_chunked_prefill": False, "mm_processor_cache_gb": 0,
    "gpu_memory_utilization": 1e-9, "kv_cache_memory_bytes": 2 * GIB, "OMP_NUM_THREADS": "4",
    "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
ON_GPU = {  # vLLM's own, but for the cache of images
    "dtype": "auto", "max_model_len": None, "max_num_seqs": None, "block_size": None, "enforce_eager": False,
    "enable_chunked_prefill": None, "mm_processor_cache_gb": 0,
    "gpu_memory_utilization": 0.92, "kv_cache_memory_bytes": None, **dict.fromkeys(ENVIRONMENT),
}  # fmt: skip
COMPILED = {"enforce_eager": False, "TORCHDYNAMO_DISABLE": "0"}
WORKERS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
Choice = tuple[int, int, str, dict[str, str], dict[str, Any]]
CHOICES: list[
    Choice
] = [  # cores, GiB that are free, options, environment, what is not as in ON_CPU
    (8, 16, "", {}, {}),
    (1, 4, "", {}, {"OMP_NUM_THREADS": "1", "kv_cache_memory_bytes": GIB // 2}),
    (8, 99, "", {}, {"kv_cache_memory_bytes": 4 * GIB}),
    (8, 16, "--dtype=bfloat16", {}, {"dtype": "bfloat16"}),
    (8, 16, "--max_model_len 64", {}, {"max_model_len": 64}),
    (8, 16, "--block-size 16 --max-num-seqs 7", {}, {"block_size": 16, "max_num_seqs": 7}),
    (8, 16, "", {"VLLM_CPU_KVCACHE_SPACE": ""}, {}),
    (8, 16, "--enable-chunked-prefill", {}, {"enable_chunked_prefill": True}),
    (8, 16, "--no-enforce-eager", {}, COMPILED),
    (8, 16, "-O3", {}, COMPILED),
    (8, 16, "-cc.mode=3", {}, COMPILED),
    (8, 16, "--enforce_eager -O3", {}, {}),
    (
        8,
        16,
        "--gpu-memory-utilization 0.92",
        {},
        {"gpu_memory_utilization": 0.92, "kv_cache_memory_bytes": None},
    ),
    (8, 16, "--kv_cache_memory_bytes=3G", {}, {"kv_cache_memory_bytes": 3 * GIB}),
    (8, 16, "", {"VLLM_CPU_KVCACHE_SPACE": "3"}, {"kv_cache_memory_bytes": None}),
    (8, 16, "-tp 2", {}, WORKERS),
    (8, 16, "--data-parallel-size=2", {}, WORKERS),
    (8, 16, "", {"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, WORKERS),
    (
        8,
        16,
        "--config FILE",
        {},
        {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": None},
    ),
    *((8, 16, "", {name: "7"}, {name: "7"}) for name in ENVIRONMENT),
]


def choose(argv, log, environment):
    """In a fork: what the server would start with in each case, and at last on a GPU, as JSON in the log."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    import vllm_server

    parser = vllm_server.AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    seen = []

    def start(*words):
        args = vllm_server.options(["--model", "nowhere", *words])
        seen.append({name: getattr(args, name, os.environ.get(name)) for name in ON_CPU})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_server.AsyncEngineArgs, "add_cli_args", lambda _: copy.deepcopy(parser))
        for cores, free, options, variables, _ in CHOICES:
            memory = vllm_server.cpu_resource_utils.MemoryNodeInfo(100 * GIB, free * GIB)
            patch.setattr(vllm_server.torch_utils, "available_cpu_count", lambda n=cores: n)
            patch.setattr(
                vllm_server.cpu_resource_utils, "get_memory_node_info", lambda m=memory: m
            )
            os.environ.clear()
            os.environ.update({"PATH": environment["PATH"], **variables})
            start(*options.replace("FILE", argv[0]).split())
        theirs = ON_GPU.keys() - {*ENVIRONMENT, "mm_processor_cache_gb"}
        parser.set_defaults(**{name: ON_GPU[name] for name in theirs})
        patch.setattr(vllm_server.current_platform, "is_cpu", lambda: False)
        os.environ.clear()
        start()
    Path(log).write_text(json.dumps(seen))


class Choosing(Forked):
    serve = staticmethod(choose)


def test_what_the_user_gave_nothing_for(tmp_path):
    """On the CPU it gets our choice, in the engine's processes, too; on a GPU it stays vLLM's."""
    (tmp_path / "config.yaml").write_text("dtype: bfloat16\ngpu-memory-utilization: 0.3\n")
    choosing = Choosing(
        ["python", "vllm_server.py", str(tmp_path / "config.yaml")], tmp_path / "log", ENV
    )
    choosing.wait(240)
    assert choosing.poll() == 0
    *seen, on_gpu = json.loads((tmp_path / "log").read_text())
    for got, case in zip(seen, CHOICES, strict=True):
        assert got == {**ON_CPU, **case[-1]}, case
    assert on_gpu == ON_GPU


def test_a_start_without_options(models, tmp_path, monkeypatch):
    """It says what it does, and at a sync vLLM warns of layers whose weights did not come, not of those without."""
    log, port = tmp_path / "log", free_port()
    env = {name: value for name, value in ENV.items() if name not in ENVIRONMENT} | {
        "VLLM_LOGGING_LEVEL": "WARNING"
    }
    command = ["python", "vllm_server.py", "--model", models["tied"], "--port", str(port)]
    started = LocalServer(f"http://127.0.0.1:{port}", Forked(command, log, env), log)
    try:
        config = make_config(models["tied"], started.wait())
        assert_agreement(config)
        assert "not loaded" not in log.read_text()
        complete = published_weights
        with process_group(120) as device:
            rollouts = Rollouts(config, device)
            policy = make_policy(config, device)
            rollouts.publish(policy, 0)
            missing = lambda p: (
                (name, t) for name, t in complete(p) if name != "model.norm.weight"
            )
            monkeypatch.setattr("rollouts.rollouts.published_weights", missing)
            rollouts.publish(policy, 1)
            rollouts.close()
    finally:
        os.killpg(started.process.pid, signal.SIGTERM)
        started.process.wait(20)
    printed = log.read_text()
    assert re.findall("not loaded from checkpoint: (.*)", printed) == ["{'model.norm.weight'}"]
    assert "Failed to load weights" not in printed
    assert f"loading {models['tied']} on the CPU: --dtype float32 --kv-cache-memory-" in printed
    assert f"serving at http://127.0.0.1:{port}, up to 256 tokens" in printed


# -- completions -----------------------------------------------------------------------------------------------------


def test_sampling_parameters_take_effect(client):
    ask = lambda **fields: client.generate(
        PROMPT, {"n": 2, "max_tokens": 12, "temperature": 1.0, **fields}
    )
    greedy = ask(temperature=0.0, n=1)
    for same in (ask(top_k=1)[0], ask(top_p=1e-6)[1], ask(min_p=1.0)[0]):
        assert torch.equal(same.token_ids, greedy[0].token_ids)
    cut = ask(ignore_eos=True)[0]
    assert cut.finish_reason == "length"
    assert len(cut.token_ids) == len(cut.sampler_logprobs) == 12
    digits = ask(structured_outputs={"regex": "[0-9]{3}"}, max_tokens=8)
    texts = [
        "".join(chr(token + 28) for token in c.token_ids.tolist() if token > 3) for c in digits
    ]
    assert all(re.fullmatch("[0-9]{3}", text) for text in texts), texts
    (reply, _) = ask(structured_outputs={"json": {"enum": [173, 426]}}, max_tokens=8)
    assert "".join(chr(t + 28) for t in reply.token_ids.tolist() if t > 3) in ("173", "426")


def test_a_stop_string_may_be_a_special_token(client):
    """As `</answer>` in some vocabularies: vLLM leaves such tokens out of the text that it looks at, unless told."""
    sampling = {"n": 64, "max_tokens": 60, "temperature": 2.0, "stop": ["<bos>"]}
    completions = client.generate(PROMPT, sampling)
    ends = [completion.token_ids[-1] == 1 for completion in completions]
    assert any(ends)
    assert not any((completion.token_ids[:-1] == 1).any() for completion in completions)


def test_stop_strings(client):
    token = client.generate(
        PROMPT, {"n": 1, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    )[0].token_ids[2]
    stopped = client.generate(
        PROMPT, {"n": 1, "max_tokens": 20, "temperature": 0.0, "stop": [chr(int(token) + 28)]}
    )[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] == token


def test_a_refused_request_is_not_repeated(client):
    with pytest.raises(ServerError, match="answered 400"):
        client.generate(PROMPT, {"n": 1, "max_tokens": 4, "temperature": -1.0})


# -- access and refusals ---------------------------------------------------------------------------------------------


def test_only_the_trainers_routes_are_open(servers):
    """None of vLLM's own, and none for what the server was not started for."""
    for path in (
        "/collective_rpc", "/v1/chat/completions", "/server_info", "/wake_up", "/docs", "/pause",
        "/v1/completions", "/init_weight_transfer_engine", "/metrics", "/nothing",
    ):  # fmt: skip
        for method in ("GET", "POST"):
            reply = requests.request(method, servers["tied"] + path, json={}, timeout=10)
            assert reply.status_code == 404, path
    for path in TRAINERS:
        assert requests.get(servers["tied"] + path, timeout=10).status_code == 405, path
    reply = requests.post(servers["tied"] + "/sleep", json={"level": 2}, timeout=10)
    assert (reply.status_code, "--enable-sleep-mode" in reply.text) == (400, True)


def test_one_trainer_at_a_time(models, servers):
    """A second one is refused before it changes anything; the server is free when the first has left, or died."""
    script = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]!r}\n"
        "import os, torch\nfrom test_server import make_config\nfrom rollouts.servers import ServerPool\n"
        f"client = ServerPool(make_config({models['tied']!r}, {servers['tied']!r}))\n"
        "client.connect(torch.device('cpu'))\nprint('connected', flush=True)\ninput()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENV,
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "connected\n"
        client = ServerPool(make_config(models["tied"], servers["tied"]))
        with pytest.raises(ServerError, match="another trainer uses this server: one at a time"):
            client.connect(torch.device("cpu"))
        (one,) = client.servers
        one.connect()  # who only asks takes nothing
        other.kill()
    deadline_s = time.monotonic() + 10
    while True:
        try:
            client.connect(torch.device("cpu"))
            break
        except ServerError:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    client.connect(torch.device("cpu"))  # it may come again
    client.close()


TRAINERS = ("/connect", "/sample", "/update", "/sleep")
TRICKS = (
    "/health/../update", "/health/%2e%2e/update", "//update", "/UPDATE", "/update;x", "/update%20",
    "/health/update", "/./update", "/health%2f..%2fupdate", "/x/../../update", "/%75pdate%00",
    "/metrics/../update", "/metrics/%2e%2e/update",
    "/collective_rpc", "/start_profile", "/wake_up", "/pause", "/v1/load_lora_adapter",
    "/openapi.json", "/tokenize", "/invocations",
)  # fmt: skip


def raw_status(url, head, body=b""):
    """The status that a request as it stands gets; 0 where the connection is closed without one."""
    host = urlsplit(url)
    with socket.create_connection((host.hostname, host.port), timeout=20) as connection:
        connection.sendall(head.replace("HOST", host.netloc).encode() + body)
        reply = connection.recv(100)
    return int(reply.split()[1]) if reply else 0


def living():
    """Parent and session of each process that has not ended."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z":
                found[int(folder.name)] = (int(parent), int(session))
    return found


def processes_of(leader):
    """Ids of the processes in a session, and of all their children."""
    alive = living()
    found = {number for number, (_, session) in alive.items() if session == leader}
    while more := {number for number, (parent, _) in alive.items() if parent in found} - found:
        found |= more
    return found


def survivors(processes, seconds=20):
    """Those that are still there after some seconds, at most."""
    deadline = time.monotonic() + seconds
    while (alive := processes & living().keys()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return alive


def test_strangers_are_refused(models, tmp_path, monkeypatch):
    """No token, a wrong one, tricks with the path, bodies too large or of no length, bad JSON: 4xx, and it goes on."""
    short = ("--max-model-len", "128")
    with local_server(
        models["tied"], tmp_path / "log", *short, env={"VLLM_API_KEY": "secret"}
    ) as started:
        url = started.wait()
        token = {"Authorization": "Bearer secret"}
        wrong = [
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "bearer secret "},
        ]
        tried = [
            requests.post(url + path, headers=headers, json={}, timeout=20).status_code == 401
            for path in TRAINERS
            for headers in wrong
        ]
        typed = "Content-Type: application/json\r\n"
        for trick in TRICKS:
            for word in ("", "Authorization: Bearer secret\r\n"):
                head = f"POST {trick} HTTP/1.1\r\nHost: HOST\r\n{word}{typed}"
                tried.append(
                    raw_status(url, f"{head}Content-Length: 2\r\n\r\n", b"{}") in (400, 401, 404)
                )
        generate = "POST /sample HTTP/1.1\r\nHost: HOST\r\nAuthorization: Bearer secret\r\n"
        for rest in (
            f"Content-Length: {1 << 40}\r\n{typed}\r\n",
            f"Transfer-Encoding: chunked\r\n{typed}\r\n2\r\n{{}}\r\n0\r\n\r\n",
            f"Content-Length: -1\r\n{typed}\r\n",
            f"Content-Length: two\r\n{typed}\r\n",
            f"{typed}\r\n",
            f"Content-Length: 9\r\n{typed}\r\n{{not json",
        ):
            tried.append(400 <= raw_status(url, generate + rest) < 500)
        valid = json.dumps({"token_ids": [5], "sampling_params": {"max_tokens": 1}})
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            headers = {**token, "Content-Type": kind}
            reply = requests.post(url + "/sample", headers=headers, data=valid, timeout=20)
            tried.append(reply.status_code == 400)
        bodies: list = [
            {},
            [],
            {"token_ids": "x"},
            {"token_ids": []},
            {"token_ids": [10**9], "sampling_params": {}},
        ]
        for body in bodies:
            reply = requests.post(url + "/sample", headers=token, json=body, timeout=20)
            tried.append(400 <= reply.status_code < 500)
        assert all(tried), [number for number, refused in enumerate(tried) if not refused]
        assert len(tried) > 40
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        client = ServerPool(make_config(models["tied"], url))
        assert client.wait_until_ready() == 128
        assert len(client.servers[0].generate(PROMPT, {"n": 2, "max_tokens": 3})) == 2
        client.close()
        workers = processes_of(started.process.pid)
        started.process.kill()  # the last thing, as it ends the server
        assert len(workers) > 1
        assert not survivors(workers)
    assert "secret" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("token", [None, " \n"])
def test_a_reachable_host_needs_a_token(models, token, tmp_path):
    command = ["python", "vllm_server.py", "--model", models["tied"], "--host", "0.0.0.0"]
    refused = Forked(command, tmp_path / "log", {**ENV, "VLLM_API_KEY": token} if token else ENV)
    refused.wait(120)
    assert refused.poll() == 1
    assert "set VLLM_API_KEY" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "words",
    [
        "--api-server-count 2",
        "--middleware x.y",
        "--enable-auto-tool-choice",
        "--uvicorn-log-level info",
        "--no-such-option",
    ],
)
def test_options_that_are_none_of_the_engines(models, words):
    """Refused by name, in one line, before a model is loaded."""
    import vllm_server

    with pytest.raises(SystemExit) as refused:
        vllm_server.options(["--model", models["tied"], *words.split()])
    said = f"error: unrecognized arguments: {words.split()[0]}; this server takes options of vLLM's"
    assert str(refused.value).startswith(said)


def test_options_that_a_user_cannot_turn(models, monkeypatch):
    """Images are data URIs, probes go first, and the log shows no token."""
    import vllm_server

    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(vllm_server, "share_cpu", lambda *_: None)
    words = "--scheduling-policy fcfs --allowed-media-domains a.b --api-key secret --host 0.0.0.0"
    args = vllm_server.options([models["tied"], *words.split()])
    assert args.model == models["tied"]
    assert args.scheduling_policy == "priority"
    assert args.allowed_media_domains == ["none.invalid"]
    assert args.disable_log_stats
    assert "secret" not in str(args)
    assert os.environ.pop("VLLM_API_KEY") == "secret"


def test_a_port_that_is_taken(models, tmp_path):
    """One line, before a model is loaded."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = ["python", "vllm_server.py", "--model", models["tied"], "--port", str(port)]
        refused = Forked(command, tmp_path / "log", ENV)
        refused.wait(120)
    assert refused.poll() == 1
    said = (tmp_path / "log").read_text().splitlines()[-1]
    assert said.startswith(f"error: --host 127.0.0.1 --port {port}: Address already in use")


def test_server_not_reachable(models):
    client = ServerPool(make_config(models["tied"], "http://127.0.0.1:9", server_timeout=0.0))
    with pytest.raises(
        ServerError,
        match=r"no rollout server at .*start one with `python vllm_server.py --model .* --port 9`",
    ):
        client.wait_until_ready()
    client.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topP": 0.9}, 'vLLM knows no topP"'),
        ({"best_of": 2, "_eos_token_id": 3}, "vLLM knows no _eos_token_id, best_of"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": "high"}, "sampling_params top_p: Input should be a valid number"),
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
    pool = ServerPool(make_config(models["tied"], servers["tied"]))
    with pytest.raises(ServerError, match=message) as refused:
        pool.wait_until_ready({"n": 2, "max_tokens": 512, "temperature": 1.0, **given})
    assert "\n" not in str(refused.value)
    pool.close()


@pytest.mark.parametrize(
    "given",
    [
        {"top_p": 1, "top_k": 5, "stop": ["."]},
        {"logit_bias": {"3": 1.5}},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 4}},
        {"bad_words": ["no"], "allowed_token_ids": [3], "min_p": 0.1, "ignore_eos": True},
    ],
)
def test_sampling_params_that_the_server_takes(models, servers, given):
    pool = ServerPool(make_config(models["tied"], servers["tied"]))
    assert pool.wait_until_ready({"n": 2, "max_tokens": 512, **given}) == 128
    pool.close()


def test_another_model(models, servers, tmp_path):
    client = ServerPool(make_config(models["untied"], servers["tied"]))
    with pytest.raises(
        ServerError,
        match=f"serves {re.escape(models['tied'])}: restart .* --model {re.escape(models['untied'])}",
    ):
        client.wait_until_ready()
    client.close()


def test_unknown_model_is_refused_before_anything(tmp_path):
    from rollouts.processor import load_processor

    with pytest.raises(
        ValueError, match="model_id=.*nowhere, a folder here or a name on the hub: OSError"
    ):
        load_processor(make_config(str(tmp_path / "nowhere"), "http://x"))


def test_lora_target_that_matches_nothing(models):
    config = make_config(
        models["tied"], "http://x", use_peft=True, lora_target_modules=["q_proj", "qkv"]
    )
    with pytest.raises(
        UserError, match="qkv is no module, or a tied embedding; the model has .*q_proj"
    ):
        add_lora(load_model(config), config)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_lora_on_tied_embeddings_is_refused(models, target):
    config = make_config(
        models["tied"], "http://x", use_peft=True, lora_target_modules=["q_proj", target]
    )
    with pytest.raises(UserError, match=f"{target} is no module, or a tied embedding"):
        add_lora(load_model(config), config)
    untied = dataclasses.replace(config, model_id=models["untied"])
    add_lora(load_model(untied), untied)


def test_buckets_and_pieces(monkeypatch):
    """Weights reach the other side bit for bit, whatever has to be joined or split, and keep their types."""
    monkeypatch.setitem(BUCKET_BYTES, "cpu", 1024)
    dtypes = [
        torch.float32,
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    shapes = [(3, 5), (7,), (100,), (9, 9), (50, 60), ()]
    weights = [
        (f"w{i}", torch.randn(s).to(d)) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    joined = list(buckets(weights))
    assert [list(bucket) for bucket in joined] == [["w0", "w1", "w2", "w3"], ["w4"], ["w5"]]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = meeting_at(store.port)
    cpu = torch.device("cpu")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        joining = pool.submit(WeightGroup, meeting, 1, cpu)
        trainer = WeightGroup(meeting, 0, cpu, store)
        worker = joining.result()
        for bucket in joined:
            reply = pool.submit(worker.receive)
            trainer.send(*packed(bucket, cpu, torch.float32))
            got = reply.result()
            assert list(got) == list(bucket)
            assert all(torch.equal(got[name], sent) for name, sent in bucket.items())
            assert all(got[name].dtype == sent.dtype for name, sent in bucket.items())
    trainer.close()
    worker.close()


def make_moe(path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(VOCAB), hidden_size=128, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_experts=4, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return model


def test_experts_reach_the_server(tmp_path):
    """vLLM prepacks them for the CPU, which its reload leaves as they were."""
    make_moe(tmp_path)
    with server(str(tmp_path), tmp_path / "log") as started:
        config = make_config(str(tmp_path), started.wait(), max_completion_len=100)
        assert_agreement(config)
        check_an_update_in_flight(config)


def test_moe_experts_are_published_under_checkpoint_names(tmp_path):
    """transformers fuses experts in memory; the server knows the names that save_pretrained writes."""
    model = make_moe(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    published = dict(published_weights(model))
    assert set(published) == set(saved)
    assert all(torch.equal(saved[name], tensor) for name, tensor in published.items())


def test_seeded_prompts_beyond_a_steps_budget(servers):
    """Staleness 0 seeds its requests, and vLLM's CPU engine ends where it prefills a seeded one in parts."""
    client = Server(servers["untied"], 60.0)
    sampling = {"n": 4, "max_tokens": 8, "temperature": 1.0}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        asked = [
            pool.submit(client.generate, [n % 9 + 1] * 40, {**sampling, "seed": n})
            for n in range(32)
        ]
        assert [len(reply.result()) for reply in asked] == [4] * 32
