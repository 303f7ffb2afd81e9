"""What our server touches of vLLM is in the installed version; and the script would say what is not."""

import pytest
from vllm_surface import compare, installed

pytest.importorskip("vllm")


def test_the_installed_version_has_it():
    assert [row for row in compare(installed(), installed()) if row[2]] == []


OTHER = {  # a version made here: a module that re-exports, and two that are otherwise
    "__init__.py": "",
    "inputs/__init__.py": "from .data import TokensPrompt\n",
    "inputs/data.py": "class TokensPrompt(dict):\n    pass\n",
    "exceptions.py": "try:\n    import torch\nexcept ImportError:\n    VLLMClientError = None\n",
    "config/model.py": "enable_sleep_mode: bool = False\n",
    "v1/engine/async_llm.py": "class AsyncLLM:\n    async def abort(self, *names):\n        pass\n",
}
ENGINE = "vllm.v1.engine.async_llm.AsyncLLM"
FAULTS = {  # of names that are imported, attributes of modules, called of objects, or options
    "vllm.inputs.TokensPrompt": "",
    "vllm.exceptions.VLLMClientError": "",
    "vllm.sampling_params.SamplingParams": "missing",
    "vllm.utils.nccl.unpinned_nccl_env": "missing",
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
