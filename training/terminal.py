"""The lines of a run: a live one, others, and warnings."""

import math
from collections import deque

from tqdm import tqdm

from config import TrainConfig
from rollouts.scoring import mean

PRINTED = (
    "loss", "grad_norm", "kl", "frac_reward_zero_std", "completions/mean_length", "time/step_s",
)  # fmt: skip
LIVE = {"reward": "reward", "eval/reward": "eval"}  # names in the live line
WINDOW = 5  # steps whose mean is compared with that of the first ones
WARNINGS = {
    "no_signal": (
        "warning: no advantages, as every prompt's completions have the same reward (mean "
        "{metrics[reward]:.4g}): read them with `python scripts/show.py {config.output_dir}`"
    ),
    "cut": (
        "warning: max_completion_len={config.max_completion_len} cuts "
        "{metrics[completions/clipped_ratio]:.0%} of completions: raise it, or see why the model "
        "does not end its answers (EOS, chat template)"
    ),
    "collapse": (
        "warning: {fallen}: has the policy collapsed? Lower learning_rate or set beta, and read "
        "`python scripts/show.py {config.output_dir}`"
    ),
}
MAX_CUT = 0.9  # share of completions that run into max_completion_len without a warning


class Terminal:
    """Prints a run's progress, with the time left."""

    def __init__(self, num_steps: int, config: TrainConfig):
        self.config = config
        self.num_steps = num_steps
        self.recent_s = deque[float](maxlen=50)  # seconds of steps, with their evaluations
        self.last: dict[str, float] = {}  # the last value of each metric
        self.values: dict[str, list[float]] = {"reward": [], "entropy": []}  # the finite ones
        self.told: set[str] = set()  # names of warnings
        self.bar = tqdm(disable=None, bar_format="{desc}")

    def close(self) -> None:
        """End the live line, and say where all of the run can be seen."""
        self.bar.close()
        if self.last:  # else it ended before its first step
            folder = self.config.output_dir
            print(f"curves and completions on a page: `python scripts/show.py {folder} --html`")

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Renew the live line; print one every `log_steps` and after an evaluation."""
        self._warn(step, metrics)
        self.last |= metrics
        head = f"step {step}/{self.num_steps}"
        pace = self._pace(step, metrics)
        live = []
        for name, label in LIVE.items():
            if name in self.last:
                live.append(f"{label} {self.last[name]:.4g}")
        self.bar.set_description_str(" · ".join([head, *live, *pace]))

        if step % self.config.log_steps == 0 or "eval/reward" in metrics:
            names = self._printed_names(metrics)
            shown = [f"{name} {metrics[name]:.4g}" for name in names if name in metrics]
            tqdm.write(" · ".join([head, *shown, *pace]))

    def _warn(self, step: int, metrics: dict[str, float]) -> None:
        """Print each warning that holds, once.

        A policy that learns to be sure has little entropy too, and a higher reward. Means of
        `WINDOW` steps are compared, as one batch may have no solved problem.
        """
        fallen = []
        learns = False
        for name, values in self.values.items():
            if math.isfinite(metrics.get(name, math.nan)):
                values.append(metrics[name])
            if len(values) < 2 * WINDOW:
                continue
            first = mean(values[:WINDOW])
            last = mean(values[-WINDOW:])
            if first > 0 and last < first / 10:
                fallen.append(f"{name} fell from {first:.3g} to {last:.3g}")
            learns = learns or (name == "reward" and last > first)

        config = self.config
        has_other_signal = config.advantage_fn or config.loss_fn or config.beta
        has_none = metrics.get("frac_reward_zero_std") == 1 and not has_other_signal
        tests = {
            "no_signal": step == 1 and has_none,
            "cut": metrics.get("completions/clipped_ratio", 0.0) > MAX_CUT,
            "collapse": fallen and not learns,
        }
        for name, holds in tests.items():
            if holds and name not in self.told:
                self.told.add(name)
                known = {"config": config, "metrics": metrics, "fallen": ", ".join(fallen)}
                tqdm.write(WARNINGS[name].format(**known))

    def _pace(self, step: int, metrics: dict[str, float]) -> list[str]:
        """The time left, the tokens a second, and the waiting times."""
        if "time/step_s" not in metrics:
            return []
        self.recent_s.append(metrics["time/step_s"] + metrics.get("time/eval_s", 0.0))
        left = tqdm.format_interval(
            sum(self.recent_s) / len(self.recent_s) * (self.num_steps - step)
        )
        speed = tqdm.format_sizeof(metrics["tokens_per_s/trained"])
        pace = [f"{left} left", f"{speed} tok/s"]
        if len(self.recent_s) > 1:  # the first step's groups were sampled before it began
            trainer, servers = metrics["idle/trainer"], metrics["idle/servers"]
            pace.append(f"idle: trainer {trainer:.0%}, servers {servers:.0%}")
        return pace

    def _printed_names(self, metrics: dict[str, float]) -> list[str]:
        """The names of a line's metrics in order; some may be missing."""
        functions = [name for name in metrics if name.startswith("rewards/")]
        if len(functions) == 1:  # it is the reward
            functions = []
        failures = [name for name in ("rewards_failed", "rollouts_failed") if metrics.get(name)]
        pass_names = [name for name in metrics if name.startswith("eval/pass@")]
        kind = "accuracy" if metrics.get("eval/accuracy") else "reward"
        sets = [f"eval/{name}/{kind}" for name in self.config.eval_sets]
        evaluated = ["eval/accuracy", "eval/reward", *pass_names[-1:], *sets]
        of_loss_fn = [name for name in metrics if name.startswith("loss/")]
        return ["reward", *functions, *failures, *evaluated, *PRINTED, *of_loss_fn]
