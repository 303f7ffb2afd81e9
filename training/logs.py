"""What a run writes, prints and sends, and the metrics of a batch."""

import json
import math
import uuid
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from config import TrainConfig, to_json
from rollouts.group import Batch, Group, version_spans
from rollouts.scoring import reward_means
from utils import is_main, naming, over_ranks
from vllm_client import MAX_SERVERS

MAX_SHOWN = 2000  # characters of a dataset column in completions.jsonl
MIN_COMPARED = (
    32  # tokens of a server, from which its difference from the trainer is judged: those of a probe
)
ENCODER = msgspec.json.Encoder(
    enc_hook=repr
)  # NaN and infinity, which JSON does not have, become null
PRINTED = [
    "loss",
    "grad_norm",
    "kl",
    "frac_reward_zero_std",
    "completions/mean_length",
    "time/step_s",
]
Sets = dict[str, list[Group]] | None  # held-out groups, by the name of their data set


class TokenSums:
    """Sums over the trained tokens of a batch, kept on the device until `metrics` adds them up over all ranks."""

    def __init__(self, device: torch.device):
        self.per_token: dict[str, Tensor] = {}  # become means over tokens
        self.by_server = torch.zeros(
            2, 1 + MAX_SERVERS, device=device
        )  # sums of |Δ|, and tokens; indexed by `servers`
        self.totals = {
            name: torch.zeros((), device=device)
            for name in ("loss", "tokens", "weight", "weight_square")
        }
        self.max_gap = torch.zeros((), device=device)

    def add(
        self, sums: dict[str, Tensor], entropy: Tensor, trainer_logprobs: Tensor, sampler_logprobs: Tensor,
        mask: Tensor, servers: Tensor | None,
    ) -> None:  # fmt: skip
        """Count a micro-batch in: what its loss returned as `sums`, and [N] entropies, log-probs (nats) and mask.

        `servers` [N] are a `MicroBatch`'s, None for no comparison by server. Of Δ = trainer - sampler it sums |Δ|,
        k3 of Δ, which estimates KL(server || trainer), and w = exp(Δ), whose effective sample size is (Σw)² / NΣw².
        """
        gap = (trainer_logprobs - sampler_logprobs).where(mask > 0, 0.0)
        size = gap.abs()
        weight = gap.exp() * mask
        means = {
            **sums,
            "entropy": entropy @ mask.to(entropy.dtype),
            "sampling/sampling_logp_difference/mean": size.sum(),
            "sampling/kl": (gap.expm1() - gap).sum(),
        }
        for name, value in means.items():
            self.per_token[name] = self.per_token.get(name, 0.0) + value.detach()
        self.totals["tokens"] += mask.sum()
        self.totals["weight"] += weight.sum()
        self.totals["weight_square"] += weight.square().sum()
        self.max_gap = torch.maximum(self.max_gap, size.max())
        if servers is not None:
            of_tokens = torch.stack([size, mask]).to(self.by_server.dtype)
            self.by_server.index_add_(1, servers.long(), of_tokens)

    def metrics(self) -> tuple[dict[str, float], dict[int, float]]:
        """Means over all ranks' tokens; and mean |Δ| by server, over tokens of the current policy. Collective."""
        dist.all_reduce(self.by_server)
        gaps, counts = self.by_server.tolist()
        num_current = sum(counts[1:])
        num_all = sum(counts)
        totals = over_ranks(self.totals)
        num_tokens = max(totals["tokens"], 1)

        metrics = {name: value / num_tokens for name, value in over_ranks(self.per_token).items()}
        metrics["loss"] = totals["loss"]
        metrics["sampling/current_logp_difference"] = ratio(sum(gaps[1:]), num_current)
        metrics["sampling/stale_logp_difference"] = ratio(gaps[0], counts[0])
        metrics["sampling/current_share"] = num_current / max(num_all, 1)
        largest = over_ranks({"gap": self.max_gap}, dist.ReduceOp.MAX)
        metrics["sampling/sampling_logp_difference/max"] = largest["gap"]
        squares = max(num_tokens * totals["weight_square"], 1e-30)
        metrics["sampling/effective_sample_size"] = totals["weight"] ** 2 / squares

        gap_of_server = {}
        for place in range(1, len(gaps)):
            if counts[place] >= MIN_COMPARED:
                gap_of_server[place - 1] = gaps[place] / counts[place]
        return metrics, gap_of_server


def ratio(total: float, count: float) -> float:
    """Their ratio, NaN of nothing."""
    return total / count if count else math.nan


def batch_metrics(groups: list[Group], version: int, config: TrainConfig) -> dict[str, float]:
    """What is known of a batch that trained policy `version`: rewards, lengths, staleness, times."""
    rewards = torch.tensor([group.reward for group in groups], dtype=torch.float64)
    deviations = rewards - rewards.nanmean(dim=1, keepdim=True)
    spread = deviations.square().nanmean(dim=1).sqrt().nan_to_num(0.0)

    lengths = []
    staleness = []
    num_versions = 0
    num_clipped = 0
    for group in groups:
        lengths += group.lengths
        for versions in group.versions:
            oldest = versions[0] if versions else version
            staleness.append(version - oldest)
            num_versions += len(versions)
        for completion in group.completions:
            num_clipped += completion.finish_reason == "length"

    num_groups = len(groups)
    num_completions = len(lengths)
    in_flight = sum(group.finished_version - group.started_version for group in groups)
    in_queue = sum(version - group.finished_version for group in groups)
    began_s = min(group.started_s for group in groups)
    return {
        "reward": rewards.nanmean().item(),
        "reward_std": spread.mean().item(),
        "frac_reward_zero_std": sum(not group.can_teach for group in groups) / num_groups,
        **reward_means(groups, config),
        "staleness/mean": sum(staleness) / num_completions,
        "staleness/max": float(max(staleness)),
        "staleness/in_flight": in_flight / num_groups,
        "staleness/in_queue": in_queue / num_groups,
        "completions/mean_length": sum(lengths) / num_completions,
        "completions/clipped_ratio": num_clipped / num_completions,
        "completions/weight_versions": num_versions / num_completions,
        "time/generate_s": max(group.sampled_s for group in groups) - began_s,
        "time/reward_s": sum(group.scored_s - group.sampled_s for group in groups),
    }


def warn_of(first: dict[str, float], config: TrainConfig) -> None:
    """Warn, one line each, of a first batch without signal, or whose completions are mostly cut off."""
    if first["frac_reward_zero_std"] == 1 and not (
        config.advantage_fn or config.loss_fn or config.beta
    ):
        cause = f"every prompt's completions have the same reward (mean {first['reward']:.4g})"
        tqdm.write(
            f"warning: no advantages, as {cause}: read them with `python scripts/show.py {config.output_dir}`"
        )
    if (share := first["completions/clipped_ratio"]) > 0.9:
        cure = "raise it, or see why the model does not end its answers (EOS, chat template)"
        tqdm.write(
            f"warning: max_completion_len={config.max_completion_len} cuts {share:.0%} of completions: {cure}"
        )


def batch_samples(groups: list[Group], config: TrainConfig) -> list[dict[str, Any]]:
    """One JSON object per completion, for `completions.jsonl`; long columns are shortened."""
    functions: Any = config.reward_funcs
    names = [function.__name__ for function in functions]
    samples = []
    for group in groups:
        columns = _shortened(group.prompt.columns)
        for number, completion in enumerate(group.completions):
            sample = {
                "group": group.id,
                "row": group.prompt.index,
                "prompt": group.prompt.content,
                "columns": columns,
                "completion": group.texts[number],
                "reward": group.reward[number],
                "rewards": dict(zip(names, group.rewards[number], strict=True)),
            }
            if group.advantages:  # held-out completions have none
                sample["advantage"] = group.advantages[number]
            sample["finish_reason"] = completion.finish_reason
            sample["weight_versions"] = version_spans(completion.weight_versions)
            sample["info"] = _shortened(completion.info)
            samples.append(sample)
    return samples


def _shortened(values: dict[str, Any]) -> dict[str, Any]:
    shortened = {}
    for name, value in values.items():
        text = repr(value)
        shortened[name] = value if len(text) <= MAX_SHOWN else text[:MAX_SHOWN]
    return shortened


class RunLog:
    """What a run writes, on rank 0: `run_id`, `config.json`, the `.jsonl` files, the terminal, and wandb if asked."""

    def __init__(self, config: TrainConfig, num_steps: int, resumed: dict[str, Any] | None = None):
        start = resumed or {"run_id": uuid.uuid4().hex, "wandb_id": None}
        self.config, self.run_id, self.wandb_id = config, start["run_id"], start["wandb_id"]
        files = ExitStack()
        self.close = files.close
        if not is_main():
            return
        folder = Path(config.output_dir)
        (folder / "run_id").write_text(self.run_id)
        (folder / "config.json").write_text(json.dumps(to_json(config), indent=2) + "\n")
        paths = {
            n: folder / f"{n}.jsonl"
            for n in ("metrics", "completions", "held_out", "dropped", "rollouts")
        }
        if paths["metrics"].exists() and not resumed:
            print(f"{folder} has an earlier run: its logs get the ending .old", flush=True)
        for path in filter(Path.exists, [*paths.values(), folder / "failed_rewards.jsonl"]):
            if not resumed:
                path.rename(f"{path}.old")
            elif path in paths.values():
                _cut_lines(path, resumed["step"])  # the run goes on from there
        if not config.save_rollouts:
            del paths["rollouts"]
        self._files = {
            name: files.enter_context(path.open("ab", 0)) for name, path in paths.items()
        }
        self._writer = files.enter_context(ThreadPoolExecutor(1))
        self._written: Future[None] = self._writer.submit(lambda: None)
        files.callback(lambda: self._written.result())
        self._bar = files.enter_context(tqdm(disable=None, bar_format="{desc}"))
        self._num_steps, self._steps_s = (
            num_steps,
            deque[float](maxlen=50),
        )  # seconds of recent steps and evaluations
        self._held_out: list[str] = []  # the last evaluation's reward, for the live line
        self._wandb: Any = None
        if config.use_wandb:
            import wandb

            run = {
                "project": config.wandb_project,
                "dir": folder,
                "config": to_json(config),
                "id": self.wandb_id,
            }
            self._wandb, self.wandb_id = wandb, wandb.init(**run, resume="allow").id
            files.callback(wandb.finish)

    def step(
        self,
        step: int,
        metrics: dict[str, float],
        batch: Batch | None = None,
        held_out: Sets = None,
    ) -> None:
        """Write one step: metrics everywhere, its batch, and the groups of held-out sets, to their `.jsonl` files."""
        if not is_main() or not (metrics or batch):
            return
        rows: dict[str, list[dict[str, Any]]] = {
            "completions": [],
            "dropped": [],
            "rollouts": [],
            "held_out": [],
        }
        if batch:
            metrics = batch_metrics(batch.groups, step - 1, self.config) | batch.metrics | metrics
            metrics["time/train_s"] -= metrics["time/wait_s"]
            if step == 1:
                warn_of(metrics, self.config)
            in_order = sorted(batch.groups, key=lambda group: group.id)
            rows["completions"] = batch_samples(in_order[: self.config.logged_groups], self.config)
            for reason, groups in batch.dropped.items():
                for group in groups:
                    rows["dropped"].append(
                        {"group": group.id, "row": group.prompt.index, "reason": reason}
                    )
            if self.config.save_rollouts:
                from rollouts.replay import saved_group

                rows["rollouts"] = [saved_group(group) for group in batch.groups]
        if held_out:
            for name, groups in held_out.items():
                rows["held_out"] += [
                    {"set": name, **sample} for sample in batch_samples(groups, self.config)
                ]

        self._written.result()  # of the step before: raises what it failed with
        self._written = self._writer.submit(self._write, step, rows | {"metrics": [metrics]})
        self._print(step, metrics)
        if self._wandb:
            self._send(step, metrics, rows["completions"])

    def _send(self, step: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Send a step to wandb, which makes a section of panels for each word before a slash."""
        sent: dict[str, Any] = {}
        for name, value in metrics.items():
            sent[name if "/" in name else f"train/{name}"] = value
        every = self.config.log_completions_steps
        if samples and every and step % every == 0:
            cells = []
            for sample in samples[:256]:
                cells.append(
                    [v if isinstance(v, float | int) else str(v)[:10_000] for v in sample.values()]
                )
            sent["completions/table"] = self._wandb.Table(columns=list(samples[0]), data=cells)
        self._wandb.log(sent, step=step)

    def _write(self, step: int, rows: dict[str, list[dict[str, Any]]]) -> None:
        for name, file in self._files.items():
            with naming(f"{file.name} cannot be written"):
                data = ENCODER.encode_lines({"step": step, **row} for row in rows[name])
                if file.write(data) < len(data):
                    raise ValueError("the disk is full")

    def _print(self, step: int, metrics: dict[str, float]) -> None:
        """Renew the live line, and print one every `log_steps` and after an evaluation, both with the time left."""
        head = f"step {step}/{self._num_steps}"
        pace = self._pace(step, metrics)
        if "eval/reward" in metrics:
            self._held_out = [f"eval {metrics['eval/reward']:.4g}"]
        live = [f"reward {metrics['reward']:.4g}"] if "reward" in metrics else []
        self._bar.set_description_str(" · ".join([head, *live, *self._held_out, *pace]))
        if step % self.config.log_steps == 0 or "eval/reward" in metrics:
            names = self._printed(metrics)
            values = [f"{name} {metrics[name]:.4g}" for name in names if name in metrics]
            tqdm.write(" · ".join([head, *values, *pace]))

    def _pace(self, step: int, metrics: dict[str, float]) -> list[str]:
        """The time left, the tokens a second, and how long either side waits."""
        if "time/step_s" not in metrics:
            return []
        self._steps_s.append(metrics["time/step_s"] + metrics.get("time/eval_s", 0.0))
        mean_s = sum(self._steps_s) / len(self._steps_s)
        left = tqdm.format_interval(mean_s * (self._num_steps - step))
        speed = tqdm.format_sizeof(metrics["tokens_per_s/trained"])
        pace = [f"{left} left", f"{speed} tok/s"]
        if (
            len(self._steps_s) > 1
        ):  # the first step's groups were sampled, in part or all, before it began
            trainer, servers = metrics["idle/trainer"], metrics["idle/servers"]
            pace.append(f"idle: trainer {trainer:.0%}, servers {servers:.0%}")
        return pace

    def _printed(self, metrics: dict[str, float]) -> list[str]:
        """The names of a line's metrics, in their order; some may be missing."""
        names = ["reward"]
        parts = [name for name in metrics if name.startswith("rewards/")]
        if len(parts) > 1:
            names += parts
        names += ["eval/accuracy", "eval/reward"]
        names += [name for name in metrics if name.startswith("eval/pass@")][-1:]
        kind = "accuracy" if metrics.get("eval/accuracy") else "reward"
        names += [f"eval/{name}/{kind}" for name in self.config.eval_sets]
        return names + PRINTED

    def state(self) -> dict[str, Any]:
        """What a later run needs to go on with what is written: all steps until now."""
        if is_main():
            self._written.result()
        return {"wandb_id": self.wandb_id, "run_id": self.run_id}


def _cut_lines(path: Path, step: int) -> None:
    """Cut off the lines after `step`, which come again, and one that a crash left without its end."""
    with path.open("rb+") as lines:  # in bytes, a line ends with \n alone
        kept = takewhile(
            lambda line: line.endswith(b"\n") and json.loads(line)["step"] <= step, lines
        )
        lines.truncate(sum(map(len, kept)))
