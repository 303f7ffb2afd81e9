"""Train a second run on the completions of a first one: in their order, and without servers.

    torchrun train.py recipe.py --output_dir outputs/first --parts recipes.replay.save
    torchrun -m recipes.replay outputs/first recipe.py --output_dir outputs/second

The first saves all that it trains, about 20 bytes a token. Where nothing else is changed, the
second ends with the same weights, to the bit; losses, advantages and weights of rewards may change.
Replay only folders that you trust: its files are pickles.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from config import UserError, parse_args, to_json
from rollouts.custom import check_segments
from rollouts.group import Group, Prompt
from rollouts.images import with_tokens
from rollouts.scoring import weighted
from train import main
from utils import exits, naming
from vllm_client import ServerError

# What a file has of a group, beside its segments; its prompt is found again in the data.
FIELDS = (
    "texts",
    "rewards",
    "started_version",
    "trained_version",
    "server",
    "started_s",
    "sampled_s",
    "scored_s",
)
MUST_BE_EQUAL = ("batch_size", "num_generations", "temperature", "reward_funcs")  # in both runs


def file_of(folder, step):
    """The file that has the groups of a step."""
    return Path(folder) / "rollouts" / f"{step:06}.pt"


def save(run):
    """A part of the first run: writes a file a step."""
    folder = run.config.output_dir

    def save_step(step, metrics, groups):
        if groups:  # step 0 evaluates, and has none
            write(folder, step, groups)

    run.on_step.append(save_step)


def write(folder, step, groups):
    """Write the file of a step, whole or not at all."""
    saved = []
    for group in groups:
        fields = {name: getattr(group, name) for name in FIELDS}
        saved.append((group.prompt.index, group.prompt.token_ids, group.segments, fields))
    path = file_of(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(saved, part)
    os.replace(part, path)
    # A run that went on from an earlier step will write the later ones anew.
    file_of(folder, step + 1).unlink(missing_ok=True)


class Replay:
    """The part of the second run: groups out of the files of the first one."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, run):
        """Let the run's groups come from the files."""
        self.run = run
        self.prompts = {prompt.index: prompt for prompt in run.prompts}
        check_settings(self.folder, run.config)
        steps = 0
        while file_of(self.folder, steps + 1).exists():
            steps += 1
        if steps == 0:
            raise UserError(f"replay: {self.folder} has no rollouts of step 1")
        run.num_steps = steps
        run.choose = self.choose
        run.fill = self.fill
        # A replay that goes on reads its groups again.
        size = run.config.batch_size
        run.before |= {"open": [], "next": run.before["step"] * size}

    def choose(self, first):
        """The groups of a step, by the number of the first."""
        step = first // self.run.config.batch_size + 1
        groups = []
        path = file_of(self.folder, step)
        for number, (row, ids, segments, fields) in enumerate(torch.load(path, weights_only=False)):
            if "texts" not in fields:
                raise UserError(f"replay: {path} is of an earlier version: sample again")
            group = Group(Prompt(row, ids, "", {}), id=first + number, **fields)
            group.set_rollouts(segments)
            groups.append(group)
        return groups

    def fill(self, group):
        """Fill in what is not saved: the prompt, and this run's weighted rewards."""
        run = self.run
        row = group.prompt.index
        prompt = self.prompts.get(row)
        if prompt and prompt.sources:
            prompt = with_tokens(prompt, run.processor, run.config)
        if not prompt or prompt.token_ids != group.prompt.token_ids:
            raise UserError(
                f"replay: dataset row {row} is not the prompt that it was in {self.folder}"
            )
        group.prompt = prompt
        with naming(f"replay: dataset row {row}"):
            check_segments(group, (), run.config)
        group.reward = weighted(group.rewards, run.config)


def check_settings(folder, config):
    """Refuse a first run with other settings than `MUST_BE_EQUAL`."""
    with naming(f"replay: {folder} has no run with --parts recipes.replay.save"):
        theirs = json.loads((Path(folder) / "config.json").read_text())
    ours = to_json(config)
    if "recipes.replay.save" not in theirs["parts"]:
        raise UserError(f"replay: {folder} has a run without --parts recipes.replay.save")
    for settings in (theirs, ours):  # recipes may have the same function in files of other names
        settings["reward_funcs"] = [path.rpartition(".")[2] for path in settings["reward_funcs"]]
    for name in MUST_BE_EQUAL:
        if theirs[name] != ours[name]:
            raise UserError(f"replay: that run had {name}={theirs[name]}: set it")


def replaying(config, folder):
    """A recipe's config as a replay of the run in `folder`, which drops and evaluates nothing."""
    if Path(folder).absolute() == Path(config.output_dir).absolute():
        raise UserError("replay: set another output_dir than the folder that is replayed")
    if config.reference_is_a_part:
        raise UserError("replay asks no server: leave the Teacher out, and set reference_id")
    kept = [part for part in config.parts if part is not save]
    return replace(
        config, parts=[*kept, Replay(folder)], vllm_urls=[], order_fn=None,
        drop_zero_advantage=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.modules["recipes.replay"] = sys.modules["__main__"]  # for `--parts recipes.replay.save`
    with exits(UserError, ServerError):
        main(replaying(parse_args(sys.argv[2:]), sys.argv[1]))
