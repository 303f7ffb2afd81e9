"""What our server touches of vLLM is in the installed version; and the script would say what is not."""

import pytest
from vllm_surface import METHODS, OPTIONS, OURS, Sources, compare, installed, touched

pytest.importorskip("vllm")


def test_the_installed_version_has_it():
    assert [row for row in compare(installed(), installed()) if row[2]] == []


def test_it_knows_what_is_touched():
    """Names that this code imports, uses as attributes of modules, or calls of objects."""
    names = touched()
    assert ("vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_reload",) in names
    assert ("vllm.v1.engine.core.EngineCore",) in names
    assert ("vllm.utils.nccl.unpinned_nccl_env",) in names
    assert ("vllm.v1.engine.async_llm.AsyncLLM.add_request",) in names


def test_nothing_is_listed_that_nobody_calls():
    ours = "\n".join(path.read_text() for path in OURS)
    for names in METHODS.values():
        for name in names:
            assert name in ours, name
    for word in OPTIONS:
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
    write("config/model.py", "enable_sleep_mode: bool = False\n")
    faults = {name: fault for name, _, fault in compare(installed(), Sources(tmp_path))}
    assert faults["vllm.inputs.TokensPrompt"] == ""
    assert faults["vllm.exceptions.VLLMClientError"] == ""
    assert faults["vllm.sampling_params.SamplingParams"] == "missing"
    changed = faults["vllm.config.set_current_vllm_config"]
    assert changed.startswith("changed: (other, way=), was (vllm_config, ")
    engine = "vllm.v1.engine.async_llm.AsyncLLM"
    assert faults[f"{engine}.wake_up"] == ""
    assert faults[f"{engine}.abort"].startswith("changed: (self, *names), was (self, ")
    assert faults[f"{engine}.add_request"] == "missing"
    assert faults["enable_sleep_mode"] == ""
    assert faults["scheduling_policy"] == "missing"
