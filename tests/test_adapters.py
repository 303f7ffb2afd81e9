"""LoRA without merging: servers that were started with `--enable-lora`, and take the adapter alone."""

import json
import re
from contextlib import closing
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import test_images as images
import torch
from helpers import have_ended, processes_of, server, wait_until
from launch import end_all
from test_server import (
    assert_agreement,
    check_an_update_in_flight,
    check_syncs,
    connected,
    make_config,
    make_policy,
    mismatch,
    two_workers,
)

from rollouts.proofs import prove
from rollouts.rollouts import Rollouts
from utils import process_group
from vllm_client import ServerError, ServerLost

LORA = ("--enable-lora", "--max-lora-rank", "8")
KINDS = [
    {"use_peft": True, "lora_rank": 4, "use_fsdp": use_fsdp, "lora_target_modules": targets}
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


def test_adapters_of_every_kind_of_policy(models, url, tmp_path):
    """The server applies what peft applies, with its scale, to rounding, after each update."""
    check_syncs(2, models["untied"], url, tmp_path, KINDS)


def test_updates_in_flight(models, url):
    check_an_update_in_flight(lora_config(models["untied"], url, max_completion_len=100))


@pytest.mark.server
def test_tensor_parallel_workers(models, tmp_path):
    """Each has its shard of the adapter."""
    with two_workers(models["untied"], tmp_path / "log", *LORA) as started:
        assert_agreement(lora_config(models["untied"], started.wait()))


@pytest.mark.server
def test_a_server_that_comes_back(models, tmp_path, monkeypatch):
    """It has the base alone then, and gets the adapter before it serves."""
    monkeypatch.setattr("rollouts.servers.PROBE_S", 0.5)
    with server(models["untied"], tmp_path / "first", *LORA) as first:
        config = lora_config(models["untied"], first.wait())
        with connected(config, 1) as (rollouts, policy):
            (lost,) = rollouts.pool.servers
            processes = processes_of(first.process.pid)
            end_all([first.process])
            wait_until(lambda: have_ended(processes))  # its engine, forked here, has the port, too
            rollouts.pool.lose(lost, ServerLost("it was ended"))
            port = str(urlsplit(first.url).port)
            with server(models["untied"], tmp_path / "second", *LORA, "--port", port):
                wait_until(lambda: rollouts.pool.waiting, 120)
                prove(rollouts, rollouts._send(only_waiting=True))
                assert rollouts.pool.serving == [lost]
                assert mismatch(policy, rollouts, config)[0] <= 2e-5


ALONE = "takes adapters alone: start it without --enable-lora, or set use_peft"
RANK = "takes adapters of rank 8 at most: give it --enable-lora --max-lora-rank 16"
OTHERS = "differs from others in --enable-lora: give it to all, or to none"


@pytest.mark.parametrize(
    ("others", "fields", "message"),
    [
        ([], {"use_peft": False, "lora_rank": 16}, ALONE),
        ([], {"lora_rank": 9}, RANK),
        (["untied"], {}, OTHERS),
    ],
)
def test_servers_that_do_not_fit_are_refused(models, url, servers, others, fields, message):
    urls = [*(servers[kind] for kind in others), url]
    config = lora_config(models["untied"], url, vllm_urls=urls, **fields)
    said = f"^{re.escape(url)} {message}$"
    with process_group(60) as device, pytest.raises(ServerError, match=said):
        Rollouts(config, device)


def test_another_base_is_noticed(models, url):
    """The probe proves the weights that do not travel."""
    said = "its log-probs differ from the trainer's by .* or has another base under"
    config = lora_config(models["untied"], url)
    with process_group(120) as device, closing(Rollouts(config, device)) as rollouts:
        policy = make_policy(config, device)
        with torch.no_grad():
            policy.get_submodule("base_model.model.model.norm").weight.mul_(2)
        with pytest.raises(ServerError, match=said):
            rollouts.publish(policy, 0)


@pytest.fixture(scope="module")
def vlm_url(vlm, tmp_path_factory):
    """Address of a real server for adapters of `vlm`."""
    log = tmp_path_factory.mktemp("lora_vlm") / "log"
    with server(vlm, log, *LORA, "--limit-mm-per-prompt", '{"image": 2}') as started:
        yield started.wait()


def test_adapters_below_a_vision_tower(vlm, vlm_url):
    """The language model's, on prompts with images and without."""
    fields = {"use_peft": True, "lora_rank": 4, "lora_target_modules": ["q_proj", "o_proj"]}
    images.sync_main(vlm, vlm_url, json.dumps(fields))


def test_adapters_of_a_vision_tower_are_refused(vlm, vlm_url):
    """By the name of the first, at the first sync: vLLM would leave them out, and say nothing."""
    refused = pytest.raises(ServerError, match="no place for the adapters of .* such as visual")
    with refused, images.on_server(vlm, vlm_url, use_peft=True, lora_rank=4):
        pass
