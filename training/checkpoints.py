"""Checkpoints: saved in the background, found again, and resumed from."""

import copy
import json
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from tqdm import tqdm

from config import TrainConfig, UserError, to_json
from utils import broadcast_object, gather_objects, is_main
from weights.publish import host_weights, unwrap

# A run that goes on may change these settings, as its mathematics sees none of them, except for
# how long it goes on.
MAY_CHANGE = frozenset({
    "vllm_urls", "server_timeout", "request_timeout", "sync_timeout", "collective_timeout",
    "max_concurrent_requests", "max_logprob_mismatch", "max_tokens_per_gpu", "max_steps",
    "num_epochs", "use_fsdp", "gradient_checkpoint", "fsdp_offload", "fsdp_shard_size",
    "output_dir", "log_steps", "logged_groups", "log_completions_steps", "eval_steps",
    "eval_dataset_id", "eval_dataset_split", "use_wandb", "wandb_project", "save_steps",
    "keep_last_n", "hub_private", "resume_from_checkpoint", "push_to_hub", "hub_repo_id",
    "reward_workers", "reward_timeout", "max_skipped_steps", "share_prefix", "probe_steps",
    "reference_urls", "eval_generations", "eval_temperature", "save_rollouts", "torch_compile",
})  # fmt: skip
TRAINER = "trainer"  # the folder of a checkpoint that holds the optimizer's shards and state.pt


def find_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint that the run continues; None where it starts anew.

    `resume_from_checkpoint` of `auto` starts anew where there is none.
    """
    wanted = config.resume_from_checkpoint
    if wanted is None:
        return None
    path = _newest(Path(config.output_dir)) if wanted == "auto" else Path(wanted)
    if not path:
        return None
    if not _is_whole(path):
        raise UserError(
            f"resume_from_checkpoint={path}: no such folder, or one without {TRAINER}/state.pt"
        )

    before = json.loads((path / TRAINER / "config.json").read_text())
    now = to_json(config)
    # `use_fsdp` may change, and by default decides which of the two kinds of bf16 is on.
    for settings in (before, now):
        settings["bf16"] = bool(settings.pop("fsdp_bf16", False) or settings.get("bf16"))
    for name, value in now.items():
        old = before.get(name, value)
        if name not in MAY_CHANGE and old != value:
            raise UserError(
                f"{path} was trained with {name}={old}, not {value}: "
                "use that, or another output_dir"
            )
    return path


def _newest(folder: Path) -> Path | None:
    """The last checkpoint of the last run here.

    A run that starts anew leaves the checkpoints of earlier ones alone.
    """
    states = {path: read_state(path) for path in saved_in(folder).values()}
    run_id = folder / "run_id"
    own = list(states)
    if run_id.is_file():
        last = run_id.read_text()
        own = [path for path, state in states.items() if state["run_id"] == last]
    if states and not own:
        print(
            f"the checkpoints in {folder} are of an earlier run than its last: "
            "name one to go on from it",
            flush=True,
        )
    return max(own, key=lambda path: states[path]["saved_s"], default=None)


def saved_in(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder that a run can continue, by step."""
    saved = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal() and _is_whole(path):
            saved[int(step)] = path
    return saved


def _is_whole(checkpoint: Path) -> bool:
    return (checkpoint / TRAINER / "state.pt").is_file()


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The `state` that `Checkpoints.save` got, with `step`, `scheduler` and `saved_s`.

    `saved_s` is Unix time, in seconds.
    """
    return torch.load(checkpoint / TRAINER / "state.pt", weights_only=True)


class Checkpoints:
    """The run's folders `checkpoint-<step>/`, written in the background, whole or absent.

    `from_pretrained` loads them; `trainer/` holds what a run needs to go on. Each is written as
    `.part`, synced to the disk and renamed, so that a crash at any byte leaves the one before.
    Each rank makes one; methods are collective.
    """

    def __init__(
        self, config: TrainConfig, policy: nn.Module, optimizer: Any, scheduler: Any, processor: Any
    ):
        self.config = config
        self.folder = Path(config.output_dir)
        self.policy = policy
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.processor = processor
        self.steps: list[int] = []  # that this run has saved, and the run that it goes on with
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._last_failed = False
        # The writers' collectives must not meet the trainer's.
        self._group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=config.collective_timeout)
        )

        get_optimizer_state_dict(policy, optimizer)  # fills AdamW's state by a step
        for values in optimizer.state.values():
            values["step"].zero_()  # that step must not count

        if is_main():
            for left in self.folder.glob("checkpoint-*.part"):
                shutil.rmtree(left, ignore_errors=True)  # a crash left it
        self._check_folder()

    def _check_folder(self) -> None:
        """Raise a UserError unless every rank sees rank 0's new folder."""
        probe: Any = nullcontext()
        if is_main():
            probe = TemporaryDirectory(".part", "checkpoint-", self.folder)
        with probe as made:
            if not all(gather_objects(Path(broadcast_object(made)).is_dir())):
                raise UserError(
                    f"output_dir={self.folder} is not one folder for all ranks: "
                    "use a disk that they share"
                )

    def resume(self, checkpoint: Path | None) -> int:
        """Load optimizer and schedule; returns the step, 0 without a checkpoint.

        Any number of ranks may have written the optimizer's shards.
        """
        if not checkpoint:
            return 0
        if is_main():
            print(f"going on from {checkpoint}", flush=True)

        shards = {"optimizer": get_optimizer_state_dict(self.policy, self.optimizer)}
        dcp.load(shards, checkpoint_id=checkpoint / TRAINER)
        set_optimizer_state_dict(self.policy, self.optimizer, shards["optimizer"])

        state = read_state(checkpoint)
        self.scheduler.load_state_dict(state["scheduler"])
        # This run may be longer, and its schedule, the same for all groups, another.
        factor = self.scheduler.lr_lambdas[0]
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor(self.scheduler.last_epoch)

        for step, path in sorted(saved_in(self.folder).items()):
            if read_state(path)["run_id"] == state["run_id"] and step <= state["step"]:
                self.steps.append(step)

        if is_main() and checkpoint.resolve().parent == self.folder.resolve():
            # It is the newest from now on: `auto` must not leap to later ones, which were left.
            part = checkpoint / TRAINER / "state.part"
            torch.save({**state, "saved_s": time.time()}, part)
            _sync(part)
            part.rename(part.with_suffix(".pt"))
        return state["step"]

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copy everything to host memory, and start to write the checkpoint.

        Raises:
            UserError: the last two saves failed.
        """
        self._wait()
        part = self.folder / f"checkpoint-{step}.part"
        weights = host_weights(self.policy)
        shards = {"optimizer": get_optimizer_state_dict(self.policy, self.optimizer)}
        written = dcp.async_save(shards, checkpoint_id=part / TRAINER, process_group=self._group)
        state = {**state, "step": step, "scheduler": self.scheduler.state_dict()}
        self.steps.append(step)
        self._writing = self._pool.submit(
            self._write, part, written, _detached(self.policy), weights, state
        )

    def finish(self, step: int, state: dict[str, Any], is_last: bool) -> None:
        """Save this step unless it was saved, again if that fails.

        The run's last one is pushed to the hub, too. Raises as `save`.
        """
        self._wait()
        while step > 0 and step not in self.steps[-1:]:  # `_wait` takes a failed one out
            self.save(step, state)
            self._wait()

        repo_id = self.config.hub_repo_id
        if is_last and is_main() and repo_id:
            hub = huggingface_hub.HfApi()
            hub.create_repo(repo_id, private=self.config.hub_private, exist_ok=True)
            hub.upload_folder(
                repo_id=repo_id,
                folder_path=self.folder / f"checkpoint-{step}",
                ignore_patterns=[f"{TRAINER}/*"],
            )

    def _wait(self) -> None:
        """Wait until the last save is on the disk.

        Reports a save that failed; a second one in a row is a UserError.
        """
        if not self._writing:
            return
        error = self._writing.exception()
        self._writing = None
        own_cause = None
        if error:
            text = str(error.__cause__ or error).strip() or repr(error)
            own_cause = text.splitlines()[0]

        causes = [cause for cause in gather_objects(own_cause) if cause]
        if causes:
            path = self.folder / f"checkpoint-{self.steps.pop()}"
            failure = f"{path} cannot be written, checkpoints before it are whole: {causes[0]}"
            if self._last_failed:
                raise UserError(failure)
            if is_main():
                tqdm.write(failure)
        self._last_failed = bool(causes)

    def _write(
        self, part: Path, shards: Any, model: Any, weights: dict[str, Tensor], state: Any
    ) -> None:
        """Write a checkpoint and remove old ones, in the background.

        Raises what safetensors, torch or the disk raise.
        """
        if not is_main():
            shards.result()
            return
        path = part.with_suffix("")
        try:
            shards.result()
            model.save_pretrained(part, state_dict=weights)
            # peft's is empty, and the hub refuses a local base_model.
            (part / "README.md").unlink(missing_ok=True)
            self.processor.save_pretrained(part)
            (part / TRAINER / "config.json").write_text(json.dumps(to_json(self.config)))
            torch.save({**state, "saved_s": time.time()}, part / TRAINER / "state.pt")
            for file in [*part.rglob("*"), part]:
                _sync(file)

            _remove(path)
            part.rename(path)
        finally:  # a half goes at once, as the disk may be full
            shutil.rmtree(part, ignore_errors=True)
        _sync(self.folder)
        tqdm.write(f"saved {path}")

        if self.config.keep_last_n:
            for step in self.steps[: -self.config.keep_last_n]:
                _remove(self.folder / f"checkpoint-{step}")


def _detached(policy: nn.Module) -> Any:
    """The model, with its own config, for another thread to save.

    Forwards change the model's config for their time.
    """
    model = unwrap(policy)
    copied = object.__new__(type(model))  # FSDP2's classes cannot be copied
    vars(copied).update(vars(model), config=copy.deepcopy(model.config))
    return copied


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _remove(path: Path) -> None:
    """Remove a checkpoint; its name never stands for half a checkpoint."""
    if path.exists():
        renamed = path.rename(path.with_name(f"{path.name}-{time.time_ns()}.part"))
        shutil.rmtree(renamed, ignore_errors=True)


def locked(folder: Path) -> AbstractContextManager[Any]:
    """Make the folder, and keep other runs out.

    They are kept out while the block, or the process, lasts. Only rank 0 does so.
    """
    if not is_main():
        return nullcontext()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / "lock").acquire(timeout=0)
    except Timeout:
        raise UserError(f"output_dir={folder} has another run in it: end it first") from None
    except OSError as error:
        raise UserError(f"output_dir={folder} cannot be written: {error.strerror}") from None
