"""AdamW's state in 8 bits, and a base of LoRA in 4 bits."""

import pytest
import torch
from helpers import ROOT, on_forked_ranks, read
from test_resume import assert_identical, run, start, weights  # noqa: F401

KINDS: dict[str, tuple[int, list]] = {
    "plain": (1, []),
    "ddp": (2, ["--num_minibatches", 2, "--warmup_ratio", 0.5]),
    "fsdp": (2, ["--use_fsdp", "true", "--lr_scheduler", "cosine"]),
    "offload": (2, ["--use_fsdp", "true", "--fsdp_offload", "true"]),
    "lora": (1, ["--use_peft", "true", "--lora_rank", 64]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_bit_for_bit(start, tmp_path, kind):  # noqa: F811
    """As with AdamW's whole state: four steps at once, and the last two again, in other processes."""
    ranks, options = KINDS[kind]
    command = start(*options, "--adam_8bit", "true", "--save_steps", 2)
    run(ranks, command)
    expected = weights(tmp_path / "run")
    middle = tmp_path / "run" / "checkpoint-2"
    run(ranks, [*command, "--resume_from_checkpoint", str(middle)])
    assert_identical(weights(tmp_path / "run"), expected)


WAYS = {
    "two_shards_to_one": (2, True, 1, False),
    "one_to_two_shards": (1, False, 2, True),
    "one_to_two": (1, False, 2, False),
}


@pytest.mark.parametrize("way", WAYS)
def test_another_number_of_ranks_goes_on(start, tmp_path, way):  # noqa: F811
    before, shards_before, after, shards_after = WAYS[way]
    always = start("--adam_8bit", "true", "--save_steps", 2)
    run(1, always)
    expected = weights(tmp_path / "run")
    run(before, [*always, "--use_fsdp", str(shards_before).lower()])
    middle = str(tmp_path / "run" / "checkpoint-2")
    command = [*always, "--use_fsdp", str(shards_after).lower()]
    run(after, [*command, "--resume_from_checkpoint", middle])
    for name, weight in weights(tmp_path / "run").items():
        print(name, (weight - expected[name]).abs().max())
