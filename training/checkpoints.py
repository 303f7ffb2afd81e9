"""Checkpoints: saved in the background, found, and gone on from."""

import copy
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from config import TrainConfig, UserError, to_json
from training.model import host_weights, unwrap
from utils import broadcast_object, gather_objects, is_main

# What a run that goes on may do otherwise than the one that wrote its checkpoint: nothing that its mathematics sees,
# but for how long it goes on.
MAY_CHANGE = frozenset({
    "vllm_urls", "server_timeout", "request_timeout", "sync_timeout", "collective_timeout",
    "max_concurrent_requests", "max_logprob_mismatch", "max_tokens_per_gpu", "max_steps", "num_epochs", "use_fsdp",
    "gradient_checkpoint", "output_dir", "log_steps", "log_completions_steps", "eval_steps", "eval_dataset_id",
    "eval_dataset_split", "use_wandb", "wandb_project", "save_steps", "keep_last_n", "resume_from_checkpoint",
    "push_to_hub", "hub_repo_id", "hub_private", "reward_workers", "reward_timeout", "max_skipped_steps",
    "share_prefix",  # a run turns it off where the model is refused
})  # fmt: skip


TRAINER = "trainer"  # what a checkpoint has beside the model: the optimizer's shards and state.pt


def find_checkpoint(config: TrainConfig) -> Path | None:
    """Where the run goes on from; None where it starts anew, also by `auto` without a whole checkpoint in output_dir.

    Raises:
        UserError: no such checkpoint, or one of a run with other settings.
    """
    if (wanted := config.resume_from_checkpoint) is None:
        return None
    path = Path(wanted)
    if wanted != "auto" and not (path / TRAINER / "state.pt").is_file():
        lack = "has no trainer/state.pt: no run can go on from it" if path.exists() else "no such folder"
        raise UserError(f"resume_from_checkpoint={wanted}: {lack}")
    newest = _newest(Path(config.output_dir)) if wanted == "auto" else path
    before = json.loads((newest / TRAINER / "config.json").read_text()) if newest else {}
    for name, value in json.loads(json.dumps(to_json(config))).items():
        if name in before and name not in MAY_CHANGE and before[name] != value:
            raise UserError(
                f"resume_from_checkpoint: {newest} was trained with {name}={before[name]}, not {value}: give it the "
                "same, or another output_dir"
            )
    return newest


def _newest(folder: Path) -> Path | None:
    """The last checkpoint of the run that was last started here; one that starts anew leaves those before it alone."""
    states = {path: read_state(path) for path in saved_in(folder).values()}
    last = (folder / "run_id").read_text() if (folder / "run_id").is_file() else None
    own = [path for path, state in states.items() if last in (None, state["run_id"])]
    if states and not own:
        print(f"the checkpoints in {folder} are of an earlier run than its last: name one to go on from it", flush=True)
    return max(own, key=lambda path: states[path]["saved_s"], default=None)


def saved_in(folder: Path) -> dict[int, Path]:
    """The folders `checkpoint-<step>` here that a run can go on from, by step."""
    named = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("checkpoint-*"))
    return {int(match[1]): path for match, path in named if match and (path / TRAINER / "state.pt").is_file()}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `Checkpoints.save` got as `state`, and `step`, `scheduler` and `saved_s` (Unix time, seconds)."""
    return torch.load(checkpoint / TRAINER / "state.pt", weights_only=True)


class Checkpoints:
    """The run's folders `checkpoint-<step>/`: written in the background, and whole or not there.

    `from_pretrained` loads them; `trainer/` has what a run needs to go on. Each is written as `.part`, synced to the
    disk and renamed, so that a crash at any byte leaves the one before. Collective: every rank makes one and calls
    everything.

    Args:
        config: output_dir (on a disk that all ranks share), keep_last_n, collective_timeout.
        policy: every rank's.
        optimizer: every rank's.
        scheduler: every rank's.
        processor: rank 0's.
    """

    def __init__(self, config: TrainConfig, policy: nn.Module, optimizer: Any, scheduler: Any, processor: Any):
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        self.config, self.folder = config, Path(config.output_dir)
        self.policy, self.optimizer, self.scheduler, self.processor = policy, optimizer, scheduler, processor
        self.steps: list[int] = []  # that are saved, in this run and the one it goes on with
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        # of the writers, whose collectives must not meet the trainer's
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.collective_timeout))
        get_optimizer_state_dict(policy, optimizer)  # makes all of it, by a step of nothing, which counts
        for values in optimizer.state.values():
            values["step"].zero_()
        for left in (
            [*self.folder.glob("checkpoint-*.part"), *self.folder.glob("checkpoint-*.old")] if is_main() else ()
        ):
            shutil.rmtree(left, ignore_errors=True)  # what a crash left

    def resume(self, checkpoint: Path | None) -> int:
        """Load the optimizer, in shards of this run's ranks however many wrote it; returns the step, 0 without one.

        Raises:
            UserError: the ranks see different checkpoints.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

        if len(set(gather_objects(str(checkpoint)))) > 1:
            raise UserError(
                f"output_dir={self.folder} has other checkpoints on other nodes: use a disk that they share"
            )
        if checkpoint is None:
            return 0
        if is_main():
            print(f"going on from {checkpoint}", flush=True)
        shards = {"optimizer": get_optimizer_state_dict(self.policy, self.optimizer)}
        dcp.load(shards, checkpoint_id=checkpoint / TRAINER)
        set_optimizer_state_dict(self.policy, self.optimizer, shards["optimizer"])
        state = read_state(checkpoint)
        self.scheduler.load_state_dict(state["scheduler"])
        for group, factor in zip(self.optimizer.param_groups, self.scheduler.lr_lambdas, strict=True):
            # by this run's schedule, which may be longer
            group["lr"] = self.config.learning_rate * factor(self.scheduler.last_epoch)
        own = (step for step, path in saved_in(self.folder).items() if read_state(path)["run_id"] == state["run_id"])
        self.steps = sorted(step for step in own if step <= state["step"])
        if is_main() and checkpoint.resolve().parent == self.folder.resolve():
            _save_state(state, checkpoint)  # as the newest one: `auto` does not leap to later ones, which were left
        return state["step"]

    def finish(self, step: int, state: dict[str, Any], is_last: bool) -> None:
        """Save this step unless it is saved, and wait until it is on the disk; push the run's last one to the hub.

        Raises:
            UserError: it could not be written.
        """
        failure = self._written()
        if step > 0 and step not in self.steps[-1:]:
            self.save(step, state)
            failure = self._written()
        if failure:
            raise UserError(failure)
        if is_last and is_main() and self.config.hub_repo_id:
            _push_to_hub(self.folder / f"checkpoint-{step}", self.config)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copy everything to host memory and start to write it: the model (of LoRA the adapter) in checkpoint form.

        Args:
            step: which the policy has trained.
            state: of tensors and plain values, for the run that goes on; rank 0's.

        Raises:
            UserError: no folder can be made for it, or not one that all ranks see; or neither the checkpoint before nor
                this one could be written.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        failure = self._written()
        path = self.folder / f"checkpoint-{step}"
        part = path.with_name(path.name + ".part")
        weights = host_weights(self.policy)
        if cause := broadcast_object(_begin(part) if is_main() else None):
            raise UserError(cause)
        if not all(gather_objects(part.is_dir())):
            raise UserError(f"output_dir={self.folder} is not one folder for all ranks: use a disk that they share")
        shards = {"optimizer": get_optimizer_state_dict(self.policy, self.optimizer)}
        written = dcp.async_save(shards, checkpoint_id=part / TRAINER, process_group=self._group)
        state = {**state, "step": step, "scheduler": self.scheduler.state_dict()}
        self.steps.append(step)
        self._writing = self._pool.submit(self._write, path, part, written, _detached(self.policy), weights, state)
        if failure:
            if is_main():
                print(failure, flush=True)
            if failure := self._written():
                raise UserError(failure)

    def _write(
        self, path: Path, part: Path, shards: Any, model: Any, weights: dict[str, Tensor], state: dict[str, Any]
    ) -> None:
        try:
            shards.result()
            if not is_main():
                return
            model.save_pretrained(part, state_dict=weights)
            (part / "README.md").unlink(missing_ok=True)  # peft's, without content; the hub refuses a local base_model
            self.processor.save_pretrained(part)
            (part / TRAINER / "config.json").write_text(json.dumps(to_json(self.config)))
            _save_state(state, part)
            for file in [*part.rglob("*"), part]:
                _synced(file)
            _remove(path)
            part.rename(path)
            _synced(self.folder)
        except Exception as error:  # OSError, and what safetensors and torch make of it
            if is_main():
                shutil.rmtree(part, ignore_errors=True)
            cause = (str(error.__cause__ or error) or repr(error)).splitlines()[0]
            raise UserError(f"{path} cannot be written, checkpoints before it are whole: {cause}") from error
        tqdm.write(f"saved {path}")
        for step in self.steps[: -self.config.keep_last_n] if self.config.keep_last_n else ():
            _remove(self.folder / f"checkpoint-{step}")

    def _written(self) -> str | None:
        """Wait until what was saved last is on the disk; why it is not, on every rank."""
        error = self._writing.exception() if self._writing else None
        self._writing = None
        if failure := next(filter(None, gather_objects(error and str(error))), None):
            self.steps.pop()
        return failure


def _detached(policy: nn.Module) -> Any:
    """The model with a config of its own, to be saved by another thread: forwards change the config for their time."""
    model = unwrap(policy)
    copied = object.__new__(type(model))  # FSDP2's classes cannot be copied
    vars(copied).update(vars(model))
    if "config" in vars(model):
        vars(copied)["config"] = copy.deepcopy(model.config)
    return copied


def _save_state(state: dict[str, Any], folder: Path) -> None:
    """Write `state.pt` of a checkpoint as the newest one's."""
    part = folder / TRAINER / "state.part"
    torch.save({**state, "saved_s": time.time()}, part)
    _synced(part)
    part.rename(part.with_suffix(".pt"))


def _begin(part: Path) -> str | None:
    """Make the folder, empty; returns why it cannot be made."""
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    except OSError as error:
        return f"{part} cannot be made, checkpoints before it are whole: {error.strerror}"
    return None


def _synced(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Remove a checkpoint, in a way that never leaves half of one under its name."""
    if path.exists():
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _push_to_hub(path: Path, config: TrainConfig) -> None:
    """Upload a checkpoint to a model repository of the Hugging Face hub, made where there is none."""
    from huggingface_hub import HfApi

    api, repo_id = HfApi(), config.hub_repo_id or ""
    api.create_repo(repo_id, private=config.hub_private, exist_ok=True)
    ignored = [f"{TRAINER}/*"]
    api.upload_folder(repo_id=repo_id, folder_path=path, commit_message=f"Upload {path.name}", ignore_patterns=ignored)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other runs out of it while the block, or the process, lasts. Rank 0's.

    Raises:
        UserError: it cannot be written, or another process has it.
    """
    if not is_main():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+")
    except OSError as error:
        raise UserError(f"output_dir={folder} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"output_dir={folder} has another run in it, process {file.read()}: end it first") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
