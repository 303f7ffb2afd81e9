import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from helpers import RECIPE, make_model, server


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
        started = {kind: stack.enter_context(server(path, folder / f"{kind}.log")) for kind, path in models.items()}
        yield {kind: process.wait() for kind, process in started.items()}


@pytest.fixture
def recipe(models, tmp_path):
    """Writes a short run against fake servers; returns its path."""

    def write(*servers):
        path = tmp_path / f"recipe_{tmp_path.name}.py"
        urls = [server.url for server in servers]
        path.write_text(RECIPE.format(model=models["untied"], urls=urls, output=str(tmp_path / "run")))
        return str(path)

    return write
