"""Checkpoints: saved in the background, found again, and resumed from."""

import copy
import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
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
from training.intact import TRAINER
from training.resume import find_checkpoint, read_state, states_in
from utils import Stopped, broadcast_object, gather_objects, is_main
from weights.publish import host_weights, unwrap

MEETING_S = 10.0  # in which all ranks that have an error meet, to save what there is


def find_start(config: TrainConfig) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint that the run continues, and its state; None, None where it starts anew."""
    if config.resume_from_checkpoint is None:
        return None, None
    checkpoint = find_checkpoint(config)
    return checkpoint, read_state(checkpoint) if checkpoint else None


class Checkpoints:
    """The run's folders `checkpoint-<step>/`, written in the background, whole or absent.

    `from_pretrained` loads them; `trainer/` holds what a run needs to go on. Each is written as
    `.part`, synced to the disk and renamed, so that a crash at any byte leaves the one before.
    Each rank makes one; methods are collective.
    """

    def __init__(
        self, config: TrainConfig, policy: nn.Module, optimizer: Any, scheduler: Any,
        rollouts: Any, reference: Any,
    ):  # fmt: skip
        self.config = config
        self.folder = Path(config.output_dir)
        self.policy = policy
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.processor: Any = getattr(rollouts.run, "processor", None)  # on rank 0
        self.averages = reference.weights if config.reference_decay is not None else {}
        self.steps: list[int] = []  # that this run has saved, and the run that it goes on with
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._last_failed = False
        # The writers' collectives must not meet the trainer's.
        self._group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=config.collective_timeout)
        )
        self._meeting = dist.new_group(backend="gloo", timeout=timedelta(seconds=MEETING_S))

        get_optimizer_state_dict(policy, optimizer)  # fills AdamW's state by a step
        for values in optimizer.state.values():
            values["step"].zero_()  # that step must not count

        self._is_updating = False  # while an update is half done
        optimizer.register_step_pre_hook(partial(self._note_update, True))
        optimizer.register_step_post_hook(partial(self._note_update, False))

        if is_main():
            for left in self.folder.glob("checkpoint-*.part"):
                shutil.rmtree(left, ignore_errors=True)  # a crash left it
        self._check_folder()

    def _note_update(self, begins: bool, *_: Any) -> None:
        self._is_updating = begins

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

        shards = self._shards()
        try:
            dcp.load(shards, checkpoint_id=checkpoint / TRAINER)
        except dcp.CheckpointException as error:
            raise UserError(
                f"the optimizer's state of {checkpoint} cannot be loaded, perhaps by this number "
                f"of ranks: {_in_a_line(error)}"
            ) from None
        set_optimizer_state_dict(self.policy, self.optimizer, shards["optimizer"])

        state = read_state(checkpoint)
        self.scheduler.load_state_dict(state["scheduler"])
        # This run may be longer, and its schedule, the same for all groups, another.
        factor = self.scheduler.lr_lambdas[0]
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor(self.scheduler.last_epoch)

        states, _ = states_in(self.folder)
        for other in states.values():
            if other["run_id"] == state["run_id"] and other["step"] <= state["step"]:
                self.steps.append(other["step"])
        self.steps.sort()

        if is_main() and checkpoint.resolve().parent == self.folder.resolve():
            # It is the newest from now on: `auto` must not leap to later ones, which were left.
            part = checkpoint / TRAINER / "state.part"
            torch.save({**state, "saved_s": time.time()}, part)
            _sync(part)
            part.rename(part.with_suffix(".pt"))
        return state["step"]

    def _shards(self) -> dict[str, Any]:
        """What each rank saves of its own; loading fills the averages in place."""
        optimizer = get_optimizer_state_dict(self.policy, self.optimizer)
        return {"optimizer": optimizer, "reference": self.averages}

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copy everything to host memory, and start to write the checkpoint.

        Raises:
            UserError: the last two saves failed.
        """
        self._wait()
        part = self.folder / f"checkpoint-{step}.part"
        weights = host_weights(self.policy)
        written = dcp.async_save(
            self._shards(), checkpoint_id=part / TRAINER, process_group=self._group
        )
        state = {**state, "step": step, "scheduler": self.scheduler.state_dict()}
        self.steps.append(step)
        self._writing = self._pool.submit(
            self._write, part, written, _detached(self.policy), weights, state
        )

    @contextmanager
    def saving(self, rollouts: Any, log: Any) -> Iterator[None]:
        """Save the last whole step when the block ends, however it ends.

        An error is raised again, but for Stopped. Where it is of one rank alone nothing can be
        saved: the others wait for this rank, in the middle of a step.
        """
        error: BaseException | None = None
        try:
            yield
        except Stopped:
            pass
        except BaseException as raised:
            error = raised

        step = rollouts.version
        if error and not (self._can_save(step) and self._all_ranks_meet()):
            raise error
        try:
            self.finish(step, rollouts.state() | log.state(), step == rollouts.num_steps)
        finally:
            if error:
                raise error  # also where saving failed

    def _can_save(self, step: int) -> bool:
        """True where `step` is not saved yet, and no update of the next one is in the weights."""
        num_updates = step * self.config.updates_per_batch
        is_whole = not self._is_updating and self.scheduler.last_epoch == num_updates
        return is_whole and step > 0 and step not in self.steps[-1:]

    def _all_ranks_meet(self) -> bool:
        """True where every rank comes here, and so has an error, within some seconds."""
        try:
            dist.monitored_barrier(self._meeting, timedelta(seconds=MEETING_S))
        except RuntimeError:
            return False
        return True

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
        own_cause = _in_a_line(error) if error else None

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
            # A second time, for when state.pt is damaged.
            (part / TRAINER / "run_id").write_text(state["run_id"])
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


def _in_a_line(error: BaseException) -> str:
    """The cause of a failed save."""
    if isinstance(error, dcp.CheckpointException):  # of the first rank that failed
        error = next(iter(error.failures.values()))[0]
    text = str(error.__cause__ or error).strip() or repr(error)
    if os.strerror(errno.ENOSPC) in text:
        return "the disk is full"
    return text.splitlines()[0]


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
