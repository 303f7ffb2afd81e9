"""Final weights after three steps against the stand-in server: this checkout and another one, compared to the bit.

    python benchmarks/same_weights.py --against ../other-checkout [--json PATH]

Every run is synchronous, and what the stand-in server says depends on the prompt alone, so that two checkouts whose
mathematics and order of computation are the same end with the same bits. DDP on two ranks may sum in another order, and
is compared to 1e-6. The exit status is 0 where all is as it should be.
"""

import argparse
import base64
import json
import random
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # at the end: with --train another checkout comes first

from benchmarks.common import arguments, report

DDP = "DDP, 2 ranks"
IMAGES = "images, replayed"
SAVE = "--save_rollouts true"
REPLAY = "--replay"  # and a folder
LIMITS = {DDP: 1e-6}  # the largest difference of a weight, where it is not 0: see above
# The number of ranks, and the options of each command; {folder} is where all cases of a checkout are.
CASES: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, [""]),
    "LoRA, beta": (1, ["--use_peft true --lora_target_modules q_proj,down_proj --beta 0.1 --kl_gradient forward"]),
    "2 iterations of 2 mini-batches": (1, ["--num_iterations 2 --num_minibatches 2"]),
    "FSDP2, 2 ranks": (2, ["--use_fsdp true"]),
    "FSDP2, LoRA, 2 ranks": (2, ["--use_fsdp true --use_peft true"]),
    "evaluation, drop_zero_advantage": (1, [
        "--reward_funcs is_long --drop_zero_advantage true --eval_steps 1 "
        "--eval_dataset_id {folder}/held_out.jsonl"
    ]),
    "an agent's segments": (1, ["--rollout_fn rewritten_turns"]),
    "sequence levels, truncation": (1, [
        "--importance_level sequence --off_policy_correction geometric_mask --max_completion_len 6 "
        "--mask_truncated_completions true --scale_rewards batch"
    ]),
    "a replay": (1, [f"{SAVE} --output_dir {{folder}}/sampled", f"{REPLAY} {{folder}}/sampled"]),
    "resumed": (1, ["--max_steps 2", "--resume_from_checkpoint auto"]),
    IMAGES: (1, [f"{REPLAY} {{folder}}/sampled_images"]),
    DDP: (2, [""]),
}  # fmt: skip
RECIPE = """
from config import TrainConfig
def rows(): return [{{"prompt": f"{{i}}+{{i}}="}} for i in range(40)]
def mean_id(completion_ids, **_): return [sum(ids) / len(ids) / 50 for ids in completion_ids]
def is_long(completion_ids, **_): return [float(len(ids) > 3) for ids in completion_ids]
def rewritten_turns(server, prompt, sampling):
    rollouts = []
    for first in server.generate(prompt.token_ids, sampling):
        history = [*prompt.token_ids[:2], *first.token_ids.tolist()]
        (second,) = server.generate(history, {{**sampling, "n": 1}})
        longer = [*history, *second.token_ids.tolist(), 7, 8]
        (third,) = server.generate(longer, {{**sampling, "n": 1}})
        rollouts.append([first, second.then([7, 8], third)])
    return rollouts
config = TrainConfig(
    model_id={model!r}, vllm_urls=[{url!r}], dataset_id=rows, reward_funcs=[mean_id], max_completion_len=12,
    batch_size=6, num_generations=4, max_steps=3, learning_rate=1e-3, max_tokens_per_gpu=64, max_staleness=0,
    reward_workers=1,
)
"""
RECIPE_WITH_IMAGES = """
from functools import partial
from config import TrainConfig
from recipes.tiny_vlm import squares
def mean_id(completion_ids, **_): return [sum(ids) / len(ids) / 50 for ids in completion_ids]
config = TrainConfig(
    model_id={model!r}, dataset_id=partial(squares, {num}, seed=1), reward_funcs=[mean_id], batch_size=4,
    num_generations=2, max_completion_len=12, max_steps=3, learning_rate=1e-3, max_tokens_per_gpu=100,
)
"""
NUM_SQUARES = 12  # three batches of four


def answer(prompt_ids: list[int], number: int) -> tuple[list[int], float]:
    """A completion of 1 to 9 tokens that depends on nothing but the prompt and its number in the group."""
    rng = random.Random(1000 * sum(prompt_ids) + number)
    return [rng.randrange(5, 90) for _ in range(rng.randrange(1, 10))], 0.01


def saved_squares(model: str, folder: Path, is_old: bool) -> None:
    """Rollouts of `RECIPE_WITH_IMAGES` as a run that saves them would write them.

    The stand-in server takes no images, so their completions are made up here, and replayed.
    """
    import msgspec
    from transformers import AutoProcessor

    from recipes.tiny_vlm import QUESTION, squares

    processor = AutoProcessor.from_pretrained(model)
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    lines = []
    steps: dict[int, list[Any]] = {}
    for index, row in enumerate(squares(NUM_SQUARES, seed=1)):
        batch = processor(text=[text], images=[[row["image"]]], return_tensors="pt")
        prompt_ids = batch["input_ids"][0].tolist()
        group = {
            "prompt": {"index": index, "token_ids": prompt_ids, "content": "", "columns": {}},
            "completions": [made_up_completion(prompt_ids, number) for number in range(2)],
            "rewards": [[float(number)] for number in range(2)],
            "started_version": index // 4, "finished_version": index // 4,
            "trained_version": index // 4, "server": 0,
            "started_s": 0.0, "sampled_s": 1.0, "scored_s": 2.0,
        }  # fmt: skip
        encoded = base64.b64encode(msgspec.msgpack.encode(group)).decode()
        lines.append(json.dumps({"step": 1 + index // 4, "group": encoded}) + "\n")
        steps.setdefault(1 + index // 4, []).append((index, prompt_ids))
    folder.mkdir()
    settings: dict[str, Any] = {"batch_size": 4, "num_generations": 2, "temperature": 1.0}
    settings["parts"] = ["recipes.replay.save"]
    (folder / "config.json").write_text(json.dumps({**settings, "reward_funcs": ["r.mean_id"]}))
    if is_old:
        (folder / "rollouts.jsonl").write_text("".join(lines))
        return

    from recipes.replay import write
    from rollouts.group import Completion, Group, Prompt

    rewards = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for step, rows in steps.items():
        groups = []
        for index, prompt_ids in rows:
            completions = []
            for number in range(2):
                ids, _ = answer(prompt_ids, number)
                completions.append(Completion(ids, [-4.5] * len(ids), "stop", 0))
            prompt = Prompt(index, prompt_ids, "", {})
            groups.append(
                Group(prompt, completions, rewards=rewards, started_version=step - 1,
                      finished_version=step - 1, trained_version=step - 1)
            )  # fmt: skip
        write(folder, step, groups)


def made_up_completion(prompt_ids: list[int], number: int) -> dict[str, Any]:
    """A completion that depends on nothing but its prompt and number, as a replay reads it."""
    import msgspec

    ids, _ = answer(prompt_ids, number)
    return {
        "token_ids": msgspec.msgpack.Ext(0, array("i", ids).tobytes()),
        "sampler_logprobs": msgspec.msgpack.Ext(1, array("f", [-4.5] * len(ids)).tobytes()),
        "finish_reason": "stop",
        "weight_versions": [[0, 0, len(ids)]],
        "info": {},
        "prompt_ids": None,
        "earlier": [],
    }


def train(checkout: Path, folder: Path) -> None:
    """Run every case with the code of `checkout`; the case's name is its `output_dir` in `folder`.

    Raises:
        RuntimeError: a run failed, with the end of what it printed.
    """
    sys.path[:0] = [str(checkout), str(checkout / "scripts"), str(checkout / "tests")]
    import build_tiny_vlm
    from fake_server import fake_server
    from helpers import make_model

    folder.mkdir(parents=True)
    model = make_model(folder / "model", tied=False)
    held_out = [json.dumps({"prompt": f"{i}-1="}) + "\n" for i in range(7)]
    (folder / "held_out.jsonl").write_text("".join(held_out))
    torch.manual_seed(0)
    processor = build_tiny_vlm.build_processor()
    model_of_images = str(folder / "model_of_images")
    build_tiny_vlm.build_model(processor.tokenizer).save_pretrained(model_of_images)
    processor.save_pretrained(model_of_images)
    is_old = (checkout / "rollouts" / "replay.py").exists()  # until 9eae0c8
    saved_squares(model_of_images, folder / "sampled_images", is_old)

    recipe = folder / "same_weights_recipe.py"
    for case, (num_ranks, commands) in CASES.items():
        with fake_server(model, answer) as server:
            recipe.write_text(RECIPE.format(model=model, url=server.url))
            if case == IMAGES:
                recipe.write_text(RECIPE_WITH_IMAGES.format(model=model_of_images, num=NUM_SQUARES))
            for options in commands:
                words = options.format(folder=folder).split()
                if "--output_dir" not in words:
                    words += ["--output_dir", str(folder / case)]
                run(checkout, num_ranks, [str(recipe), *words])


def run(checkout: Path, num_ranks: int, words: list[str]) -> None:
    """One run of train.py; RuntimeError with the end of its output where it fails."""
    command = [sys.executable]
    is_new = not (checkout / "rollouts" / "replay.py").exists()
    trainer = ["train.py", *words]
    if is_new and REPLAY in words:
        place = words.index(REPLAY)
        trainer = ["-m", "recipes.replay", words[place + 1], *words[:place], *words[place + 2 :]]
    if is_new and "--save_rollouts" in words:
        place = words.index("--save_rollouts")
        words = [*words[:place], "--parts", "recipes.replay.save", *words[place + 2 :]]
        trainer = ["train.py", *words]
    if num_ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    done = subprocess.run(
        [*command, *trainer], cwd=checkout, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stdout + done.stderr)[-3000:]}")


def compare(ours: Path, theirs: Path) -> dict[str, Any]:
    """One case: whether all weights are equal, their largest difference, and how far training moved any of ours."""
    from safetensors.torch import load_file

    (file,) = (ours / "checkpoint-3").glob("*model.safetensors")
    mine, other = load_file(file), load_file(theirs / "checkpoint-3" / file.name)
    if mine.keys() != other.keys():
        raise RuntimeError(
            f"{ours.name}: the checkpoints have different weights: {mine.keys() ^ other.keys()}"
        )
    if file.name.startswith("adapter"):
        moved = [weight for name, weight in mine.items() if "lora_B" in name]  # which starts at 0
    else:
        name = "model_of_images" if ours.name == IMAGES else "model"
        start = load_file(ours.parent / name / "model.safetensors")
        moved = [weight - start[name] for name, weight in mine.items()]
    return {
        "case": ours.name,
        "equal": all(weight.equal(other[name]) for name, weight in mine.items()),
        "largest_difference": max(
            (weight - other[name]).abs().max().item() for name, weight in mine.items()
        ),
        "trained_by": max(difference.abs().max().item() for difference in moved),
    }


def main() -> None:
    """Command line."""
    parser = arguments(__doc__, "as without it", "all cases")
    parser.add_argument("--train", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        checkout, folder = (path.resolve() for path in given.train)
        train(checkout, folder)
        return
    if not given.against:
        parser.error("--against is missing")
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = Path(name) / "ours", Path(name) / "theirs"
        for checkout, folder in ((ROOT, ours), (given.against, theirs)):
            subprocess.run([sys.executable, __file__, "--train", checkout, folder], check=True)
        rows = [compare(ours / case, theirs / case) for case in CASES]
    report(rows, given.json)
    sys.exit(any(row["largest_difference"] > LIMITS.get(row["case"], 0.0) for row in rows))


if __name__ == "__main__":
    main()
