"""The lines of a run: a live one, others, and warnings."""

import math
from collections import deque

from tqdm import tqdm

from config import TrainConfig

PRINTED = (
    "loss", "grad_norm", "kl", "frac_reward_zero_std", "completions/mean_length", "time/step_s",
)  # fmt: skip
WINDOW = 5  # steps whose mean is compared with that of the first ones
MAX_CUT = 0.9  # share of completions that run into max_completion_len without a warning


def warn_of(first: dict[str, float], config: TrainConfig) -> None:
    """Warn of a first batch without signal."""
    has_other_signal = config.advantage_fn or config.loss_fn or config.beta
    if first["frac_reward_zero_std"] == 1 and not has_other_signal:
        tqdm.write(
            "warning: no advantages, as every prompt's completions have the same reward (mean "
            f"{first['reward']:.4g}): read them with `python scripts/show.py {config.output_dir}`"
        )


class Terminal:
    """Prints a run's progress, with the time left."""

    def __init__(self, num_steps: int, config: TrainConfig):
        self.config = config
        self.num_steps = num_steps
        self.recent_s = deque[float](maxlen=50)  # seconds of steps, with their evaluations
        self.held_out: list[str] = []  # the last evaluation's reward, for the live line
        self.values: dict[str, list[float]] = {}  # of some metrics, so far
        self.has_shown = False  # a step, or an evaluation
        self.has_warned = False  # of a collapse
        self.has_warned_of_cuts = False
        self.bar = tqdm(disable=None, bar_format="{desc}")

    def close(self) -> None:
        """End the live line, and say where all of the run can be seen."""
        self.bar.close()
        folder = self.config.output_dir
        if not self.has_shown:  # it ended before its first step
            return
        print(f"curves and completions on a page: `python scripts/show.py {folder} --html`")

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Renew the live line; print one every `log_steps` and after an evaluation."""
        self.has_shown = True
        self._warn_of_cuts(metrics)
        self._warn_of_collapse(metrics)
        head = f"step {step}/{self.num_steps}"
        pace = self._pace(step, metrics)

        live = []
        if "reward" in metrics:
            live.append(f"reward {metrics['reward']:.4g}")
        if "eval/reward" in metrics:
            self.held_out = [f"eval {metrics['eval/reward']:.4g}"]
        self.bar.set_description_str(" · ".join([head, *live, *self.held_out, *pace]))

        if step % self.config.log_steps == 0 or "eval/reward" in metrics:
            names = self._printed_names(metrics)
            values = [f"{name} {metrics[name]:.4g}" for name in names if name in metrics]
            tqdm.write(" · ".join([head, *values, *pace]))

    def _warn_of_cuts(self, metrics: dict[str, float]) -> None:
        """Warn, once, of a batch that is mostly cut off."""
        share = metrics.get("completions/clipped_ratio", 0.0)
        if share > MAX_CUT and not self.has_warned_of_cuts:
            self.has_warned_of_cuts = True
            tqdm.write(
                f"warning: max_completion_len={self.config.max_completion_len} cuts {share:.0%} of "
                "completions: raise it, or see why the model does not end its answers (EOS, chat "
                "template)"
            )

    def _warn_of_collapse(self, metrics: dict[str, float]) -> None:
        """Warn, once, of a reward below a tenth of its start, or of such an entropy.

        A policy that learns to be sure has little entropy too, and a higher reward. Means of
        `WINDOW` steps are compared, as one batch may have no solved problem.
        """
        fallen = []
        learns = False
        for name in ("reward", "entropy"):
            values = self.values.setdefault(name, [])
            if math.isfinite(metrics.get(name, math.nan)):
                values.append(metrics[name])
            if len(values) < 2 * WINDOW:
                continue
            first = sum(values[:WINDOW]) / WINDOW
            last = sum(values[-WINDOW:]) / WINDOW
            if first > 0 and last < first / 10:
                fallen.append(f"{name} fell from {first:.3g} to {last:.3g}")
            learns = learns or (name == "reward" and last > first)
        if fallen and not learns and not self.has_warned:
            self.has_warned = True
            tqdm.write(
                f"warning: {', '.join(fallen)}: has the policy collapsed? Lower learning_rate or "
                f"set beta, and read `python scripts/show.py {self.config.output_dir}`"
            )

    def _pace(self, step: int, metrics: dict[str, float]) -> list[str]:
        """The time left, the tokens a second, and the waiting times."""
        if "time/step_s" not in metrics:
            return []
        self.recent_s.append(metrics["time/step_s"] + metrics.get("time/eval_s", 0.0))
        mean_s = sum(self.recent_s) / len(self.recent_s)

        left = tqdm.format_interval(mean_s * (self.num_steps - step))
        speed = tqdm.format_sizeof(metrics["tokens_per_s/trained"])
        pace = [f"{left} left", f"{speed} tok/s"]
        if len(self.recent_s) > 1:  # the first step's groups were sampled before it began
            pace.append(
                f"idle: trainer {metrics['idle/trainer']:.0%}, "
                f"servers {metrics['idle/servers']:.0%}"
            )
        return pace

    def _printed_names(self, metrics: dict[str, float]) -> list[str]:
        """The names of a line's metrics in order; some may be missing."""
        names = ["reward"]
        function_names = [name for name in metrics if name.startswith("rewards/")]
        if len(function_names) > 1:
            names += function_names

        names += [name for name in ("rewards_failed", "rollouts_failed") if metrics.get(name)]
        names += ["eval/accuracy", "eval/reward"]
        pass_names = [name for name in metrics if name.startswith("eval/pass@")]
        names += pass_names[-1:]
        kind = "accuracy" if metrics.get("eval/accuracy") else "reward"
        names += [f"eval/{set_name}/{kind}" for set_name in self.config.eval_sets]
        of_loss_fn = [name for name in metrics if name.startswith("loss/")]
        return [*names, *PRINTED, *of_loss_fn]
