"""LoRA without merging: servers that were started with `--enable-lora`, and take the adapter alone."""

import json
import os
import re
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import test_images as images
import torch
import torch.distributed as dist
from helpers import on_ranks, server
from launch import end_all
from test_server import (
    bits,
    check_an_update_in_flight,
    disturb,
    make_config,
    make_policy,
    mismatch,
    processes_of,
    survivors,
)

from rollouts.rollouts import Rollouts
from training.model import build_policy, share_prefixes
from utils import process_group
from vllm_client import ServerError, ServerLost
from weights.publish import adapter_weights, unwrap

LORA = ("--enable-lora", "--max-lora-rank", "8")
KINDS = [
    {"use_fsdp": use_fsdp, "lora_target_modules": targets}
    for use_fsdp in (False, True)
    for targets in (None, ["q_proj", "lm_head", "embed_tokens"])
]


def lora_config(model, url, **fields):
    return replace(make_config(model, url), **{"use_peft": True, "lora_rank": 4, **fields})


@pytest.fixture(scope="module")
def url(models, tmp_path_factory):
    """Address of a real server for adapters of `untied`."""
    with server(models["untied"], tmp_path_factory.mktemp("lora") / "log", *LORA) as started:
        yield started.wait()


@contextmanager
def published(config, device, seeds=(1,)):
    """Rollouts and a policy whose adapter was moved and sent once for each seed."""
    with closing(Rollouts(config, device)) as rollouts:
        policy = make_policy(config, device)
        rollouts.publish(policy, 0)
        for version, seed in enumerate(seeds, 1):
            disturb(policy, seed)
            rollouts.publish(policy, version)
        yield rollouts, policy


def sync_main(model, url, folder):
    """On every rank: policies with adapters, two updates each; rank 0 writes what it saw."""
    seen = []
    with process_group(120) as device:
        for number, kind in enumerate(KINDS):
            config = lora_config(model, url, temperature=0.8, **kind)
            seeds = (10 * number, 10 * number + 1)
            with published(config, device, seeds) as (rollouts, policy):
                before = bits(policy)
                rollouts.publish(policy, 3)
                same = all(torch.equal(before[name], after) for name, after in bits(policy).items())
                apart, versions = mismatch(policy, rollouts, config, device)
                seen.append({"mismatch": apart, "versions": versions, "bit_identical": same})
        if dist.get_rank() == 0:
            (Path(folder) / "seen.json").write_text(json.dumps(seen))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_adapters_of_every_kind_of_policy(models, url, tmp_path, num_ranks):
    """The server applies what peft applies, to rounding (1e-6 nats in the mean), after each update."""
    on_ranks(num_ranks, tmp_path, "test_adapters.sync_main", models["untied"], url, tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    for kind, found in zip(KINDS, seen, strict=True):
        assert found["mismatch"] <= 2e-5, kind
        assert found["versions"] == [3], kind
        assert found["bit_identical"], kind


def test_what_travels(models):
    """A and s·B of each target, by peft's names, and nothing else."""
    config = lora_config(models["untied"], "http://x", lora_alpha=12)
    with process_group(60) as device:
        policy = make_policy(config, device)
        disturb(policy, 1)
        sent = dict(adapter_weights(policy))
        from peft import get_peft_model_state_dict

        saved = get_peft_model_state_dict(unwrap(policy))
    assert sent.keys() == saved.keys()
    for name, tensor in saved.items():
        scale = 12 / 4 if ".lora_B." in name else 1
        torch.testing.assert_close(sent[name], scale * tensor)


def test_updates_in_flight(models, url):
    check_an_update_in_flight(lora_config(models["untied"], url, max_completion_len=100))


@pytest.mark.server
def test_tensor_parallel_workers(models, tmp_path):
    """Each has its shard of the adapter."""
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if len(os.sched_getaffinity(0)) > 1 else {}
    options = (*LORA, "--tensor-parallel-size", "2")
    with server(models["untied"], tmp_path / "log", *options, env=env) as started:
        config = lora_config(models["untied"], started.wait())
        with process_group(120) as device, published(config, device) as (rollouts, policy):
            assert mismatch(policy, rollouts, config, device)[0] <= 2e-5


@pytest.mark.server
def test_a_server_that_comes_back(models, tmp_path, monkeypatch):
    """It has the base alone then, and gets the adapter before it serves."""
    monkeypatch.setattr("rollouts.servers.PROBE_S", 0.5)
    with server(models["untied"], tmp_path / "first", *LORA) as first:
        config = lora_config(models["untied"], first.wait())
        with process_group(120) as device, published(config, device) as (rollouts, policy):
            (lost,) = rollouts.pool.servers
            processes = processes_of(first.process.pid)
            end_all([first.process])
            assert not survivors(processes)  # its engine, forked here, has the port, too
            rollouts.pool.lose(lost, ServerLost("it was ended"))
            port = str(urlsplit(first.url).port)
            with server(models["untied"], tmp_path / "second", *LORA, "--port", port):
                deadline_s = time.monotonic() + 120
                while not rollouts.pool.returned and time.monotonic() < deadline_s:
                    time.sleep(0.1)
                rollouts.proofs.prove(rollouts._send(only_returned=True))
                assert rollouts.pool.serving == [lost]
                assert mismatch(policy, rollouts, config, device)[0] <= 2e-5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"use_peft": False, "lora_rank": 16},
            "takes adapters alone: start it without --enable-lora, or set use_peft",
        ),
        (
            {"lora_rank": 9},
            "takes adapters of rank 8 at most: give it --enable-lora --max-lora-rank 16",
        ),
    ],
)
def test_servers_that_do_not_fit_are_refused(models, url, fields, message):
    said = f"^{re.escape(url)} {message}$"
    with process_group(60) as device, pytest.raises(ServerError, match=said):
        Rollouts(lora_config(models["untied"], url, **fields), device)


def test_servers_of_two_kinds_are_refused(models, url, servers):
    """One stream of weights goes to all."""
    config = lora_config(models["untied"], url, vllm_urls=[servers["untied"], url])
    said = f"{url} differs from others in --enable-lora: give it to all, or to none"
    with process_group(60) as device, pytest.raises(ServerError, match=said):
        Rollouts(config, device)


def test_another_base_is_noticed(models, url):
    """The probe proves the weights that do not travel."""
    config = lora_config(models["untied"], url)
    with process_group(120) as device:
        rollouts = Rollouts(config, device)
        policy = make_policy(config, device)
        with torch.no_grad():
            policy.get_submodule("base_model.model.model.norm").weight.mul_(2)
        with pytest.raises(
            ServerError,
            match="its log-probs differ from the trainer's by .* or has another base under",
        ):
            rollouts.publish(policy, 0)
        rollouts.close()


def test_adapters_without_a_place_are_refused(models, url):
    """vLLM would leave them out, and say nothing."""
    config = lora_config(models["untied"], url)
    with process_group(120) as device, published(config, device, ()) as (rollouts, policy):
        sent = dict(adapter_weights(policy))
        odd = {name.replace("self_attn", "attention"): tensor for name, tensor in sent.items()}
        rollouts.pool.update_weights(odd.items(), 1)
        assert not rollouts.pool.serving


@pytest.fixture(scope="module")
def vlm_url(vlm, tmp_path_factory):
    """Address of a real server for adapters of `vlm`."""
    log = tmp_path_factory.mktemp("lora_vlm") / "log"
    with server(vlm, log, *LORA, "--limit-mm-per-prompt", '{"image": 2}') as started:
        yield started.wait()


def test_adapters_below_a_vision_tower(vlm, vlm_url):
    """The language model's, on prompts with images and without."""
    fields = {"use_peft": True, "lora_rank": 4, "lora_target_modules": ["q_proj", "o_proj"]}
    config = images.make_config(vlm, vlm_url, **fields)
    with process_group(120) as device, closing(Rollouts(config, device)) as rollouts:
        policy = build_policy(config, device, rollouts.example)
        config = share_prefixes(policy, config, rollouts.example)
        rollouts.publish(policy, 0)
        for version in (1, 2):
            images.changed(policy)
            rollouts.publish(policy, version)
        worst, _ = images.worst_mismatch(rollouts, policy, config, device)
    assert worst <= 1e-4


def test_adapters_of_a_vision_tower_are_refused(vlm, vlm_url):
    """By the name of the first, at the first sync."""
    config = images.make_config(vlm, vlm_url, use_peft=True, lora_rank=4)
    with process_group(120) as device, closing(Rollouts(config, device)) as rollouts:
        policy = build_policy(config, device, rollouts.example)
        with pytest.raises(
            ServerError, match="took no weights.*no place for the adapters of .* such as visual"
        ):
            rollouts.publish(policy, 0)
