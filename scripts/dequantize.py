"""Write the base that a run with `base_4bit` trains on, for its servers.

    python scripts/dequantize.py FOLDER [recipe.py] [--field value ...]
    python vllm_server.py --model FOLDER --served-model-name MODEL_ID --enable-lora --max-lora-rank 16

The arguments after FOLDER are the run's, MODEL_ID is its `model_id`, 16 its `lora_rank`. The folder
gets its 4-bit weights, dequantized to `dtype`. A server of it, started in the dtype that the trainer
computes in, has the trainer's base to rounding.
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import TrainConfig, UserError, parse_args
from rollouts.processor import load_processor
from rollouts.run import check_packages
from training.model import load_model, with_bf16
from utils import exits


def write_base(config: TrainConfig, folder: Path) -> None:
    """Write the base in whole weights, with its tokenizer."""
    if not config.base_4bit:
        raise UserError("without base_4bit servers take model_id as it is")
    config = with_bf16(config)
    check_packages(config)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    load_model(config).dequantize().save_pretrained(unfinished)
    load_processor(config).save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier start
    unfinished.rename(folder)


def main() -> None:
    """Command line."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return
    write_base(parse_args(sys.argv[2:]), Path(sys.argv[1]))


if __name__ == "__main__":
    with exits(UserError):
        main()
