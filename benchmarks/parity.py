"""Our loss beside TRL's own, on the same numbers, and whole runs of both on the same completions.

    pip install -r requirements/dev.txt
    python benchmarks/parity.py [--json PATH] [--quick]

Losses, float64: rewards, completions and log-probs are made up. TRL's side is `GRPOTrainer`'s own code from the rewards
to the loss (`_generate_and_score_completions`, `_compute_loss`), once for each micro-batch of each simulated rank; only
its model is replaced by those log-probs, and its number of ranks. Ours is `compute_advantages`, `off_policy_weights`,
`Dealer`, `grpo_loss` and the normalizer. `loss` and `gradient` (with respect to the log-probs) are the largest absolute
difference of any optimizer step over the largest absolute value in TRL.

Runs, float32: `GRPOTrainer.train()`, given fixed completions by a `rollout_func`, and `train.main` with `replay` of the
same: forward, backward, clipping, AdamW. `grad_norm` is the largest relative difference of a step's gradient norm,
`weights` the largest difference of a final weight over the largest weight, `update` the norm of the difference over the
norm of what the run changed. AdamW divides a gradient near zero by its own size, so that its rounding shows in both.

Rows with a `why` are known to differ, and say how.
"""

import importlib.util
import json
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
# Before they are read:
os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TQDM_DISABLE": "1"}

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import arguments, lines, report
from benchmarks.end_to_end import JOBS, build
from config import TrainConfig, to_json
from recipes.replay import replaying, write
from rollouts.group import ENVIRONMENT, Completion, Group, Prompt
from train import compute_advantages, grpo_loss, loss_normalizer, off_policy_weights
from train import main as train
from training.batching import Dealer

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
NUM_PROMPTS, NUM_GENERATIONS, MAX_LEN = 8, 4, 12
NUM_COMPLETIONS = NUM_PROMPTS * NUM_GENERATIONS


class Setting(NamedTuple):
    """The same loss in the words of both trainers."""

    name: str
    ours: dict[str, Any]
    trl: dict[str, Any]
    loss_types: tuple[str, ...] = LOSS_TYPES
    why: str = ""  # it differs


class Layout(NamedTuple):
    """How the completions of a batch are split: TRL by number, ours by tokens."""

    name: str
    # optimizer steps: steps_per_generation / gradient_accumulation_steps, num_minibatches
    updates: int = 1
    trl_ranks: int = 1
    trl_micro_batches: int = 1  # of a rank and an update
    our_ranks: int = 1
    our_tokens: int = 1000


def corrected(mode: str, name: str, **bounds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of an off-policy correction, `bounds` are cap and perhaps floor."""
    ours: dict[str, Any] = {"off_policy_correction": name}
    ours |= {f"correction_{side}": value for side, value in bounds.items()}
    trl = {"mode": mode, "clip_max": bounds["cap"], "clip_min": bounds.get("floor")}
    return ours, {f"vllm_importance_sampling_{key}": value for key, value in trl.items()}


NOT_CISPO = LOSS_TYPES[:4]
CLIPS = {"epsilon": 0.1, "epsilon_high": 0.28}
SETTINGS = (
    Setting("default clips", {}, {}),
    Setting("epsilon 0.1, epsilon_high 0.28", CLIPS, CLIPS, NOT_CISPO),
    Setting("delta 1.5", {"delta": 1.5}, {"delta": 1.5}, NOT_CISPO),
    Setting("sequence ratios", {"importance_level": "sequence"}, {"importance_sampling_level": "sequence"}),
    Setting("beta 0.1, gradient of k3", {"beta": 0.1, "kl_gradient": "forward"},
            {"beta": 0.1, "use_bias_correction_kl": False}),
    Setting("beta 0.1, ratio times k3", {"beta": 0.1}, {"beta": 0.1}),
    Setting("truncate (token_truncate, TIS)", *corrected("token_truncate", "truncate", cap=1.5)),
    Setting("mask (token_mask, IcePop)", *corrected("token_mask", "mask", cap=1.5, floor=0.6)),
    Setting("sequence (sequence_truncate)", *corrected("sequence_truncate", "sequence", cap=1.5)),
    Setting("sequence_mask (sequence_mask)", *corrected("sequence_mask", "sequence_mask", cap=3.0, floor=0.3)),
    Setting("sequence ratios, sequence_mask, beta 0.1",
            {"importance_level": "sequence", "beta": 0.1, "kl_gradient": "forward",
             **corrected("", "sequence_mask", cap=3.0, floor=0.3)[0]},
            {"importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": False,
             **corrected("sequence_mask", "", cap=3.0, floor=0.3)[1]}),
    Setting("scale_rewards batch", {"scale_rewards": "batch"}, {"scale_rewards": "batch"}),
    Setting("scale_rewards none", {"scale_rewards": "none"}, {"scale_rewards": "none"}),
    Setting("mask_truncated_completions", {"mask_truncated_completions": True}, {"mask_truncated_completions": True}),
)  # fmt: skip
LAYOUTS = (
    Layout("one micro-batch"),
    Layout("4 micro-batches, rows of 60 tokens", trl_micro_batches=4, our_tokens=60),
    Layout("16 micro-batches, rows of 20 tokens", trl_micro_batches=16, our_tokens=20),
    Layout("4 ranks, 1 rank", trl_ranks=4, our_tokens=100),
    Layout("1 rank, 4 ranks", trl_micro_batches=2, our_ranks=4, our_tokens=40),
    Layout("2 ranks of 4, 3 ranks", trl_ranks=2, trl_micro_batches=4, our_ranks=3, our_tokens=50),
    Layout("4 updates", updates=4),
    Layout("2 updates of 2 ranks of 2, of 2 ranks", 2, 2, 2, 2, 30),
)
SPLIT = "TRL divides each micro-batch by its own tokens"
DIFFERENT = (
    Setting("sequence ratios, token weights",
            {"importance_level": "sequence", **corrected("", "truncate", cap=1.5)[0]},
            {"importance_sampling_level": "sequence", **corrected("token_truncate", "", cap=1.5)[1]}, ("grpo",),
            "TRL averages the weights of a completion's tokens"),
    Setting("sequence ratios, beta 0.1, ratio times k3",
            {"importance_level": "sequence", "beta": 0.1},
            {"importance_sampling_level": "sequence", "beta": 0.1}, ("grpo",),
            "TRL multiplies k3 by the sequence's ratio"),
)  # fmt: skip


class Case(NamedTuple):
    """Made-up completions; tensors are [completions, MAX_LEN] float64, of which the first `lengths` count."""

    token_ids: list[list[int]]
    is_sampled: Tensor  # False on tokens that an environment wrote
    rewards: Tensor  # [prompts, generations]
    logprobs: Tensor
    old: Tensor
    sampler: Tensor  # values of float32
    ref: Tensor
    is_token: Tensor

    @property
    def prompts(self) -> list[str]:
        """A prompt for each completion."""
        numbers = range(NUM_COMPLETIONS)
        return ["0123456789"[: 3 + c // NUM_GENERATIONS % 5] for c in numbers]


def make_case() -> Case:
    """Ratios and weights fall on both sides of every bound; half of the completions end with the end token, 2."""
    rng = random.Random(0)
    noise = torch.Generator().manual_seed(0)
    ids = [rng.choices(range(3, 14), k=rng.randint(2, MAX_LEN)) for _ in range(NUM_COMPLETIONS)]
    ids = [[*of_one[:-1], 2] if rng.random() < 0.5 else of_one for of_one in ids]
    lengths = torch.tensor([len(of_one) for of_one in ids])
    is_token = torch.arange(MAX_LEN) < lengths[:, None]
    around: Any = lambda scale: (
        scale * torch.randn(is_token.shape, generator=noise, dtype=torch.float64)
    )
    logprobs = -2.5 + around(0.5)
    old = logprobs + around(0.3)
    is_sampled = is_token & (
        (torch.arange(MAX_LEN) % 5 != 3) | (torch.arange(MAX_LEN) >= lengths[:, None] - 1)
    )
    rewards = torch.randn(NUM_PROMPTS, NUM_GENERATIONS, generator=noise, dtype=torch.float64)
    sampler = (old + around(0.4)).float().double()
    return Case(ids, is_sampled, rewards, logprobs, old, sampler, logprobs + around(0.3), is_token)


class Figures(NamedTuple):
    """Of each optimizer step: the loss and its gradient with respect to all completion tokens, in their order."""

    losses: Tensor
    gradients: Tensor


def trl_trainer(
    case: Case, config: Any, rows: list[dict[str, str]], answers: list[Tensor], model: Path
) -> Any:
    """TRL's trainer of the case's completions and rewards, whose model gives `answers`, one a time."""
    from datasets import Dataset
    from trl import GRPOTrainer

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        logprobs = []
        env_mask = []
        for number, ids in enumerate(case.token_ids):
            logprobs.append(case.sampler[number, : len(ids)].tolist())
            env_mask.append(case.is_sampled[number, : len(ids)].int().tolist())
        return {
            "prompt_ids": [[3 + int(letter) for letter in prompt] for prompt in prompts],
            "completion_ids": case.token_ids,
            "logprobs": logprobs,
            "env_mask": env_mask,
        }

    def logprobs_and_entropies(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        answer = answers.pop(0)
        return answer, torch.zeros_like(answer), None

    trainer: Any = GRPOTrainer(
        str(model),
        reward_funcs=[sevens],
        args=config,
        train_dataset=Dataset.from_list(rows),
        rollout_func=rollout,
    )
    trainer.model.train()
    trainer._last_loaded_step = trainer.state.global_step  # it has no vLLM to send weights to
    trainer._calculate_rewards = lambda *_: case.rewards.reshape(-1, 1)
    trainer._get_per_token_logps_and_entropies = logprobs_and_entropies
    return trainer


def trl_figures(
    case: Case, setting: Setting, loss_type: str, layout: Layout, model: Path
) -> Figures:
    """TRL's own code, from the rewards on."""
    from trl import GRPOConfig

    size = NUM_COMPLETIONS // (layout.updates * layout.trl_ranks * layout.trl_micro_batches)
    fields = dict(setting.trl)
    if loss_type == "cispo":  # whose bound TRL names whole; ours is 1 + epsilon_high
        fields["epsilon_high"] = 1.2
    config = GRPOConfig(
        output_dir=str(model / "trl"), loss_type=loss_type, max_completion_length=MAX_LEN, report_to=[], use_cpu=True,
        per_device_train_batch_size=NUM_COMPLETIONS, num_generations=NUM_GENERATIONS, bf16=False,
        num_iterations=2, steps_per_generation=1, **fields,
    )  # fmt: skip
    answers: list[Tensor] = []  # of the model, in the order in which TRL asks for them
    rows = [{"prompt": prompt} for prompt in case.prompts]
    trainer = trl_trainer(case, config, rows, answers, model)
    trainer.use_vllm = any(name.startswith("vllm") for name in fields)
    answers += [case.old, case.ref][: 2 if trainer.beta else 1]
    torch.set_default_dtype(torch.float64)  # TRL divides a count by a count in the default type
    batch = trainer._generate_and_score_completions(rows)
    torch.set_default_dtype(torch.float32)

    trainer.accelerator = SimpleNamespace(
        num_processes=layout.trl_ranks, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    trainer.current_gradient_accumulation_steps = layout.trl_micro_batches
    trainer.args.steps_per_generation = layout.trl_micro_batches * layout.updates
    logprobs = case.logprobs.clone().requires_grad_()
    losses, gradients = [], []
    for update in range(layout.updates):
        loss = torch.zeros((), dtype=torch.float64)
        per_update = layout.trl_ranks * layout.trl_micro_batches
        for part in range(update * per_update, (update + 1) * per_update):
            mine = slice(part * size, (part + 1) * size)
            answers.append(logprobs[mine])
            inputs = {name: value[mine] if value.ndim else value for name, value in batch.items()}
            of_part = trainer._compute_loss(trainer.model, inputs)
            loss = loss + of_part / layout.trl_ranks  # as DDP averages over ranks
        (gradient,) = torch.autograd.grad(loss, logprobs)
        losses.append(loss.detach())
        gradients.append(gradient[case.is_token])
    return Figures(torch.stack(losses), torch.stack(gradients))


def our_groups(case: Case, advantages: Tensor, numbers: tuple[Tensor, ...]) -> list[Group]:
    """The case's completions, scored, with `numbers` in the place of log-probs."""
    groups = []
    for g, start in enumerate(range(0, NUM_COMPLETIONS, NUM_GENERATIONS)):
        completions = []
        for c in range(start, start + NUM_GENERATIONS):
            ids = case.token_ids[c]
            reason = "stop" if ids[-1] == 2 else "length"
            is_sampled = torch.as_tensor(case.is_sampled[c, : len(ids)])
            versions = torch.where(is_sampled, 0, ENVIRONMENT)
            completions.append(Completion(ids, numbers[c], reason, versions))
        prompt = Prompt(g, [3 + int(letter) for letter in case.prompts[start]], "", {})
        reward = case.rewards[g].tolist()
        groups.append(Group(prompt, completions, reward=reward, advantages=advantages[g].tolist()))
    return groups


def our_figures(case: Case, setting: Setting, loss_type: str, layout: Layout) -> Figures:
    """Our functions, on rows that `Dealer` deals to the ranks."""
    fields: dict[str, Any] = {
        "off_policy_correction": "none",
        "loss_type": loss_type,
        **setting.ours,
    }
    config = TrainConfig(
        model_id="none", dataset_id="none", reward_funcs=[sevens], batch_size=NUM_PROMPTS,
        num_generations=NUM_GENERATIONS, max_completion_len=MAX_LEN, max_tokens_per_gpu=layout.our_tokens,
        num_minibatches=layout.updates, **fields,
    )  # fmt: skip
    lengths = [len(ids) for ids in case.token_ids]
    # In the place of log-probs, to find a row's tokens again.
    numbers = torch.arange(sum(lengths)).split(lengths)
    advantages = compute_advantages(case.rewards, config.scale_rewards)
    groups = our_groups(case, advantages, numbers)
    logprobs = case.logprobs[case.is_token].requires_grad_()
    old, sampler, ref = (values[case.is_token] for values in (case.old, case.sampler, case.ref))
    # Those of a row are float32.
    by_token = advantages.reshape(-1).repeat_interleave(torch.tensor(lengths))
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    loss = torch.zeros((), dtype=torch.float64)
    rounds = zip(*Dealer(layout.our_ranks, config).deal(groups, is_complete=True), strict=True)
    for this_round in rounds:  # a row of each rank
        for micro in this_round:
            place, completion = micro.sampler_logprobs.long(), micro.packed.completion
            weights = off_policy_weights(old[place], sampler[place], micro.mask, completion, config)
            advantages = by_token[place] * weights
            of_row, _ = grpo_loss(
                logprobs[place], old[place], ref[place], advantages, micro.mask, completion, config
            )
            loss = loss + of_row
        update = this_round[0].update
        if update:
            loss = loss / loss_normalizer(update.num_completions, update.num_trained_tokens, config)
            gradients += torch.autograd.grad(loss, logprobs)
            losses.append(loss.detach())
            loss = torch.zeros((), dtype=torch.float64)
    return Figures(torch.stack(losses), torch.stack(gradients))


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def compare_losses(model: Path, is_quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each loss type under each setting in one layout, and in each layout under one setting."""
    case = make_case()
    everything = {**SETTINGS[1].ours, **SETTINGS[6].ours}, {**SETTINGS[1].trl, **SETTINGS[6].trl}
    clipped = Setting("clips and TIS", *everything)
    for_cispo = Setting("TIS", SETTINGS[6].ours, SETTINGS[6].trl)
    several, whole = (LAYOUTS[4], LAYOUTS[0])
    wanted: list[tuple[Setting, str, Layout]] = []
    for setting in (*SETTINGS, *DIFFERENT):
        kinds = ("dapo",) if is_quick and not setting.why else setting.loss_types
        wanted += [
            (setting, kind, whole if kind == "bnpo" else several)
            for kind in kinds
            if kind in setting.loss_types
        ]
    for layout in LAYOUTS[:2] if is_quick else LAYOUTS:
        for kind in LOSS_TYPES:
            setting = for_cispo if kind == "cispo" else clipped
            is_split = kind == "bnpo" and layout.trl_ranks * layout.trl_micro_batches > 1
            wanted.append((setting._replace(why=SPLIT) if is_split else setting, kind, layout))
    for setting, kind, layout in wanted:
        ours = our_figures(case, setting, kind, layout)
        theirs = trl_figures(case, setting, kind, layout, model)
        yield {
            "part": "loss", "setting": setting.name, "loss_type": kind, "layout": layout.name,
            "loss": relative(ours.losses, theirs.losses), "gradient": relative(ours.gradients, theirs.gradients),
        } | ({"why": setting.why} if setting.why else {})  # fmt: skip


# -- Whole runs --------------------------------------------------------------------------------------------------------

BATCH, STEPS, RUN_LEN = 4, 4, 16  # prompts of a step, steps, tokens of a completion at most


class Run(NamedTuple):
    """A run in the words of both trainers: a step is 16 completions."""

    name: str
    ours: dict[str, Any]
    trl: dict[str, Any]


RUNS = (
    Run("dapo, 2 micro-batches", {"max_tokens_per_gpu": 100},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}),
    Run("grpo, beta 0.1, 2 iterations",
        {"loss_type": "grpo", "beta": 0.1, "kl_gradient": "forward", "num_iterations": 2},
        {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2, "use_bias_correction_kl": False,
         "per_device_train_batch_size": 16}),
    Run("dapo, 2 mini-batches of 2 micro-batches, TIS",
        {"num_minibatches": 2, "epsilon_high": 0.28, "max_tokens_per_gpu": 60, "off_policy_correction": "truncate"},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
         "epsilon_high": 0.28, **corrected("token_truncate", "", cap=2.0)[1]}),
    Run("cispo, linear rate, IcePop",
        {"loss_type": "cispo", "epsilon_high": 0.2, "lr_scheduler": "linear",
         **corrected("", "mask", cap=2.0, floor=0.5)[0]},
        {"loss_type": "cispo", "epsilon_high": 1.2, "lr_scheduler_type": "linear", "per_device_train_batch_size": 16,
         **corrected("token_mask", "", cap=2.0, floor=0.5)[1]}),
)  # fmt: skip


def sevens(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward of both trainers: how many tokens of a completion are above 9."""
    return [float(sum(token > 9 for token in ids)) for ids in completion_ids]


def make_groups(model: Path, num: int) -> list[Group]:
    """Random completions of random prompts, with log-probs near those of the model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rng = random.Random(1)
    policy = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    groups = []
    for g in range(num):
        text = "".join(rng.choices("0123456789", k=rng.randint(4, 16)))
        prompt = tokenizer(text).input_ids
        completions = []
        for _ in range(NUM_GENERATIONS):
            ids = rng.choices(range(3, 14), k=rng.randint(2, RUN_LEN))
            with torch.no_grad():
                logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
            noisy = [logprob + rng.gauss(0, 0.4) for logprob in logprobs.tolist()]
            completions.append(Completion(ids, noisy, "stop", 0))
        group = Group(
            Prompt(g, prompt, text, {}), completions, started_version=0, trained_version=g // BATCH
        )
        values = sevens([c.token_ids.tolist() for c in completions])
        group.rewards = torch.tensor(values, dtype=torch.float64)[:, None]
        groups.append(group)
    return groups


class Result(NamedTuple):
    """Weights by name at the end of a run, and the norm of each step's gradient."""

    weights: dict[str, Tensor]
    grad_norms: list[float]


def trl_run(run: Run, groups: list[Group], model: Path, folder: Path) -> Result:
    """`GRPOTrainer.train()`; the prompts of a step are not shuffled among its mini-batches."""
    from datasets import Dataset
    from trl.trainer import grpo_trainer

    module: Any = grpo_trainer
    by_text = {group.prompt.content: group for group in groups}

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        pairs = [(by_text[text], place % NUM_GENERATIONS) for place, text in enumerate(prompts)]
        completions = [group.completions[c] for group, c in pairs]
        return {
            "prompt_ids": [group.prompt.token_ids for group, _ in pairs],
            "completion_ids": [c.token_ids.tolist() for c in completions],
            "logprobs": [c.sampler_logprobs.tolist() for c in completions],
        }

    fields = {"lr_scheduler_type": "constant", **run.trl}
    parts = fields.get("steps_per_generation", 1) // fields.get("gradient_accumulation_steps", 1)
    updates = len(groups) // BATCH * fields.get("num_iterations", 1) * max(parts, 1)
    config = module.GRPOConfig(
        output_dir=str(folder), max_completion_length=RUN_LEN, num_generations=NUM_GENERATIONS, report_to=[],
        use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", logging_steps=1, disable_tqdm=True,
        learning_rate=1e-3, shuffle_dataset=False, max_steps=updates, **fields,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": group.prompt.content} for group in groups])
    trainer: Any = module.GRPOTrainer(
        str(model), reward_funcs=[sevens], args=config, train_dataset=rows, rollout_func=rollout
    )
    trainer.use_vllm = any(name.startswith("vllm") for name in fields)
    trainer._last_loaded_step = -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    shuffle = module.shuffle_sequence_dict
    module.shuffle_sequence_dict = lambda batch: batch
    try:
        trainer.train()
    finally:
        module.shuffle_sequence_dict = shuffle
    norms = [float(row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]
    return Result(
        {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}, norms
    )


def our_run(run: Run, groups: list[Group], model: Path, folder: Path) -> Result:
    """`train.main`, which replays the groups as a run would have saved them."""
    from safetensors.torch import load_file

    rows = [{"prompt": group.prompt.content} for group in groups]
    config = TrainConfig(
        model_id=str(model), dataset_id=lambda: rows, no_apply_chat_template=True, reward_funcs=[sevens],
        batch_size=BATCH, num_generations=NUM_GENERATIONS, max_completion_len=RUN_LEN, learning_rate=1e-3,
        output_dir=str(folder / "ours"),
        **{"off_policy_correction": "none", **run.ours},
    )  # fmt: skip
    saved = folder / "saved"
    for first in range(0, len(groups), BATCH):
        write(saved, 1 + first // BATCH, groups[first : first + BATCH])
    first_run = replace(config, parts=["recipes.replay.save"])
    (saved / "config.json").write_text(json.dumps(to_json(first_run)))
    train(replaying(config, saved))
    metrics = lines(folder / "ours" / "metrics.jsonl")
    (weights,) = folder.glob("ours/checkpoint-*/model.safetensors")
    return Result(load_file(weights), [row["grad_norm"] for row in metrics])


def compare_runs(model: Path, is_quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each run."""
    from safetensors.torch import load_file

    before = load_file(model / "model.safetensors")
    groups = make_groups(model, BATCH * (2 if is_quick else STEPS))
    for run in RUNS[:1] if is_quick else RUNS:
        with (
            tempfile.TemporaryDirectory() as name,
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
        ):
            theirs = trl_run(run, groups, model, Path(name) / "trl")
            ours = our_run(run, groups, model, Path(name))
        assert ours.weights.keys() == before.keys() == theirs.weights.keys()
        flat = [
            torch.cat([weights[n].flatten() for n in before])
            for weights in (ours.weights, theirs.weights, before)
        ]
        # Ours are means over the updates of a step.
        updates = len(theirs.grad_norms) // len(ours.grad_norms)
        means = torch.tensor(theirs.grad_norms).unflatten(0, (-1, updates)).mean(1)
        yield {
            "part": "run", "setting": run.name, "updates": len(theirs.grad_norms),
            "weights": relative(flat[0], flat[1]),
            "update": ((flat[0] - flat[1]).norm() / (flat[1] - flat[2]).norm()).item(),
            "grad_norm": ((torch.tensor(ours.grad_norms) - means).abs() / means).max().item(),
        }  # fmt: skip


def main() -> None:
    """Command line."""
    args = arguments(__doc__, "fewer loss types and layouts, and one run of two steps").parse_args()
    if not importlib.util.find_spec("trl"):
        sys.exit("trl is not installed: pip install -r requirements/dev.txt")
    warnings.simplefilter("ignore")
    logging.getLogger("trl").setLevel(logging.ERROR)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        build(JOBS["tiny"], model)
        report([*compare_losses(model, args.quick), *compare_runs(model, args.quick)], args.json)


if __name__ == "__main__":
    main()
