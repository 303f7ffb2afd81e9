"""What our server touches of vLLM is in the installed version; and the script would say what is not."""

import pytest
from vllm_surface import METHODS, OPTIONS, OURS, compare, installed, touched

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


OTHER = {  # a version made here: a module that re-exports, and two that are otherwise
    "__init__.py": "",
    "inputs/__init__.py": "from .data import TokensPrompt\n",
    "inputs/data.py": "class TokensPrompt(dict):\n    pass\n",
    "exceptions.py": "try:\n    import torch\nexcept ImportError:\n    VLLMClientError = None\n",
    "config/model.py": "enable_sleep_mode: bool = False\n",
    "v1/engine/async_llm.py": "class AsyncLLM:\n    async def abort(self, *names):\n        pass\n",
}
ENGINE = "vllm.v1.engine.async_llm.AsyncLLM"
FAULTS = {
    "vllm.inputs.TokensPrompt": "",
    "vllm.exceptions.VLLMClientError": "",
    "vllm.sampling_params.SamplingParams": "missing",
    f"{ENGINE}.abort": "changed: (self, *names), was (self, ",
    f"{ENGINE}.add_request": "missing",
    "enable_sleep_mode": "",
    "scheduling_policy": "missing",
}


def test_what_is_missing_or_changed(tmp_path):
    for name, text in OTHER.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    faults = {name: fault for name, _, fault in compare(installed(), tmp_path)}
    for name, fault in FAULTS.items():
        assert faults[name].startswith(fault), name
        assert bool(faults[name]) == bool(fault), name
