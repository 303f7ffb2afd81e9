"""What our server touches of vLLM is in the installed version; and the script would say what is not."""

import pytest
import vllm_surface
from vllm_surface import METHODS, OPTIONS, OURS, ROUTES, Sources, compare, installed, touched

pytest.importorskip("vllm")


def test_the_installed_version_has_it():
    assert [row for row in compare(installed(), installed()) if row[2]] == []


def test_it_knows_what_is_touched():
    """Names that this code imports or uses as attributes of modules, of which some have moved."""
    names = touched()
    assert ("vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info",) in names
    assert ("vllm.v1.engine.core.EngineCore",) in names
    moved = [each for each in names if len(each) > 1 and each[0].endswith("make_arg_parser")]
    assert moved == [
        (
            "vllm.entrypoints.common.cli_args.make_arg_parser",
            "vllm.entrypoints.launchers.cli_args.make_arg_parser",
        )
    ]


def test_nothing_is_listed_that_nobody_calls():
    ours = "\n".join(path.read_text() for path in OURS)
    client = (vllm_surface.ROOT / "vllm_client.py").read_text()
    ours += client + (vllm_surface.ROOT / "rollouts" / "servers.py").read_text()
    ours += (vllm_surface.ROOT / "rollouts" / "sleep.py").read_text()
    for names in METHODS.values():
        for name in names:
            assert name in ours, name
    for word in (*ROUTES, *OPTIONS):
        assert word in ours or word.replace("_", "-") in ours, word


def test_what_is_missing_or_changed(tmp_path):
    """In a version made here: a module that re-exports, a base class, and two that are otherwise."""

    def write(name, text):
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("__init__.py", "")
    write("inputs/__init__.py", "from .data import TokensPrompt\n")
    write("inputs/data.py", "class TokensPrompt(dict):\n    pass\n")
    write(
        "exceptions.py", "try:\n    import torch\nexcept ImportError:\n    VLLMClientError = None\n"
    )
    write("config/__init__.py", "def set_current_vllm_config(other, *, way=None):\n    pass\n")
    write(
        "v1/engine/async_llm.py",
        "from vllm.v1.base import Base\n\nclass AsyncLLM(Base):\n    async def abort(self, *names):\n        pass\n",
    )
    write("v1/base.py", "class Base:\n    def wake_up(self, tags=None):\n        pass\n")
    write("entrypoints/routes.py", 'router.post("/pause")\n')
    faults = {name: fault for name, _, fault in compare(installed(), Sources(tmp_path))}
    assert faults["vllm.inputs.TokensPrompt"] == ""
    assert faults["vllm.exceptions.VLLMClientError"] == ""
    assert faults["vllm.config.VllmConfig"] == "missing"
    changed = faults["vllm.config.set_current_vllm_config"]
    assert changed.startswith("changed: (other, way=), was (vllm_config, ")
    engine = "vllm.v1.engine.async_llm.AsyncLLM"
    assert faults[f"{engine}.wake_up"] == ""
    assert faults[f"{engine}.abort"].startswith("changed: (self, *names), was (self, ")
    assert faults[f"{engine}.collective_rpc"] == "missing"
    assert faults["/pause"] == ""
    assert faults["/sleep"] == "missing"
