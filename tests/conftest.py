import os
import shutil
import subprocess
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))
# A TCPStore looks up its peer's name, which would take 5 s and more where a name server is silent.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# What a test starts has this mark in its environment, and ends with this process, however that ends: see watch.py.
os.environ["STARTED_BY"] = uuid.uuid4().hex
WATCH = [sys.executable, str(TESTS / "watch.py"), os.environ["STARTED_BY"]]
watching = subprocess.Popen(WATCH, stdin=subprocess.PIPE, process_group=0)

from forked import Forked
from helpers import ENV, answer_in, far_from_uniform, flags, make_model, server, write_recipe

# With more some kernels sum in another order, and equal is not equal to the bit.
torch.set_num_threads(1)
# Fixtures of servers, real or not.
SERVERS = {"servers", "vlm_server", "vlm_url", "url", "place", "chat", "recipe"}
RUNS = ["images", "server", "scripts", "train", "resume", "readme", "faults"]
HOUSE = ["house", "docs", "evidence"]  # what a fork may do otherwise, and documents
LONGEST = [
    *RUNS, "launch", "recipes", "stream", "gradients", "prefix_attention", "rewards", "tools",
]  # fmt: skip


def pytest_configure(config):
    """Only `-m gpu` sees GPUs: on one, all other tests would share it, and its kernels are not equal to the bit."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ENV["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    """The longest files first, so that both workers of scripts/test.sh end at about the same time."""
    place = {name: number for number, name in enumerate(LONGEST)}
    file = lambda item: item.path.stem.removeprefix("test_")
    items.sort(key=lambda item: place.get(file(item), len(place)))
    for item in items:
        if SERVERS & set(item.fixturenames) or file(item) in RUNS:
            item.add_marker("server")
        if file(item) in HOUSE:
            item.add_marker("house")
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup(item):
    """Without the mark no test starts a server: `--quick` and `--versions` do without vLLM."""
    Forked.allowed = item.get_closest_marker("server") is not None


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Paths of random models: `tied` and `untied` embeddings."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_model(folder / kind, tied=kind == "tied") for kind in ("tied", "untied")}


@pytest.fixture(scope="session")
def servers(models, tmp_path_factory):
    """Addresses of real vLLM servers for `models`, started side by side."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        budget = ("--max-num-batched-tokens", "140")  # of a step: many prompts come to more
        started = {
            k: stack.enter_context(server(path, folder / f"{k}.log", *budget))
            for k, path in models.items()
        }
        yield {kind: process.wait() for kind, process in started.items()}


@pytest.fixture(scope="session")
def vlm(tmp_path_factory):
    """A random Qwen2.5-VL whose distributions are far from uniform, and depend on the image."""
    from build_tiny_vlm import build_model, build_processor

    folder = tmp_path_factory.mktemp("vlm")
    torch.manual_seed(0)
    processor = build_processor()
    model = build_model(processor.tokenizer)
    far_from_uniform(model, 4).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def vlm_server(vlm, tmp_path_factory):
    """Address of a real server for it."""
    log = tmp_path_factory.mktemp("vlm_server") / "log"
    with server(vlm, log, "--limit-mm-per-prompt", '{"image": 2}') as started:
        yield started.wait()


@pytest.fixture
def device():
    """The device of a world of one rank, which lives as long as the test."""
    from utils import process_group

    with process_group(60) as device:
        yield device


@pytest.fixture
def recipe(models, tmp_path):
    """Writes a short run against fake servers; returns its path."""

    def write(*servers):
        path = write_recipe(tmp_path, models["untied"], [server.url for server in servers])
        sys.modules.pop(path.stem, None)  # of another server
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        return str(path)

    return write


@pytest.fixture
def stand_in(models):
    """Starts stand-ins for servers, whose completions take about so many seconds."""
    from fake_server import fake_server

    with ExitStack() as stack:

        def start(seconds=0.01, answer=None, **fields):
            server = fake_server(models["untied"], answer or answer_in(seconds), **fields)
            return stack.enter_context(server)

        yield start


@pytest.fixture
def train_on(recipe):
    """Trains `recipe` on servers, with other values of some fields."""
    from config import parse_args
    from train import main

    return lambda *servers, **fields: main(parse_args([recipe(*servers), *flags(**fields)]))
