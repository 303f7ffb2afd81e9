"""A run as rank 0 puts it together, of parts that a recipe may replace."""

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from tempfile import TemporaryDirectory
from typing import Any

from config import TrainConfig
from prefix_attention import rope_limit
from rollouts import data
from rollouts.group import Group, Prompt, RolloutFailed
from rollouts.processor import hold_date, load_processor, placeholder_ids, tokenizer_of
from rollouts.sampling import sample_group, sampling_params
from rollouts.scoring import Failures, Scorer, check_rewards
from rollouts.servers import ServerPool, server_urls
from training.loading import load_model_config
from utils import naming

PACKAGES = {
    "adam_8bit": "torchao", "base_4bit": "bitsandbytes",
    "use_wandb": "wandb", "use_trackio": "trackio",
}  # fmt: skip


@dataclass
class Run:
    """What a run is made of, on rank 0.

    Each of the config's `parts` is called with it before servers are connected, and may replace
    whatever it wants: `prompts`, `fill`, `choose` and the like.
    """

    config: TrainConfig
    before: dict[str, Any]  # the state from which it goes on; `step` is 0 at a fresh start
    processor: Any  # the model's
    pool: ServerPool
    prompts: list[Prompt]  # to train, without those that are too long
    held_out: dict[str, list[Prompt]]  # by the name of their set
    scorer: Scorer
    failures: Failures  # of rollouts

    # Samples and scores a group, in a thread of its own; `sample_and_score` unless replaced.
    fill: Callable[[Group], None] = field(init=False)
    # The next groups, by the number of the first; None shuffles, or asks `order_fn`.
    choose: Callable[[int], list[Group]] | None = None
    num_steps: int | None = None  # that there are groups for; None: as the config says
    # Called as the config's `on_step` is, after it.
    on_step: list[Callable[[int, dict[str, float], list[Group]], None]] = field(
        default_factory=list
    )
    exits: ExitStack = field(default_factory=ExitStack)  # what ends with the run

    def sample_and_score(self, group: Group, **instead: Any) -> None:
        """Fill in a group's completions, texts and rewards.

        Args:
            group: with its prompt.
            instead: parameters of vLLM in place of the config's.

        Raises:
            RolloutFailed: there are no completions, and no server is to blame.
        """
        streak = self.failures.begin("rollouts")
        try:
            sample_group(group, self.pool, self.processor, self.config, **instead)
        except RolloutFailed as error:
            self.failures.note(streak, str(error), group)
            raise
        self.scorer.score(group)


def check_packages(config: TrainConfig) -> None:
    """Raise a UserError where a package that the config needs cannot be imported."""
    for name, package in PACKAGES.items():
        if getattr(config, name):
            with naming(f"{name} needs {package}: pip install {package}"):
                importlib.import_module(package)


def open_run(config: TrainConfig, before: dict[str, Any]) -> Run:
    """Load and check all that rank 0 needs; servers answer then, and are not connected yet.

    Raises:
        UserError, ServerError: something cannot be used; the message says what to do.
    """
    check_packages(config)
    server_urls(config)  # wrong ones are told first
    processor = load_processor(config)
    hold_date(processor, before.setdefault("began", datetime.now().isoformat()))
    model_config = load_model_config(config)[0]
    # As each checkpoint does; else the end of the training would tell.
    with TemporaryDirectory() as folder, naming("model_id: its checkpoints could not be saved"):
        model_config.save_pretrained(folder)
        processor.save_pretrained(folder)
    pool = ServerPool(
        config,
        tokenizer_of(processor),
        placeholder_ids(model_config),
        rope_limit=rope_limit(model_config),
    )

    sets = data.load_sets("dataset_id", "train", processor, config)
    held_out = data.load_sets("eval_dataset_id", "test", processor, config)
    for found in (*sets.values(), *held_out.values()):
        check_rewards(found, config)
        data.check_vocabulary(found, processor, model_config)
    prompts = list(chain.from_iterable(sets.values()))
    longest = min(config.max_tokens_per_gpu, pool.wait_until_ready(sampling_params(config)))
    max_len = longest - config.max_completion_len
    prompts = data.leave_out_long(prompts, max_len, config)
    for name, found in held_out.items():
        held_out[name] = data.leave_out_long(found, max_len, config)
    run = Run(
        config,
        before,
        processor,
        pool,
        prompts,
        held_out,
        scorer=Scorer(tokenizer_of(processor), config),
        failures=Failures("rollouts", config),
    )
    run.fill = run.sample_and_score
    run.exits.callback(pool.close)
    run.exits.callback(run.scorer.close)
    part: Any
    for part in config.parts:
        part(run)
    return run
