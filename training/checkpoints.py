"""Checkpoints: the one that a run goes on from, and those that it saves in the background."""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import huggingface_hub
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from filelock import FileLock
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from config import TrainConfig, UserError, to_json
from utils import (
    Stopped,
    broadcast_object,
    call_on_main,
    gather_objects,
    is_main,
    naming,
)
from weights.publish import host_weights, unwrap

TRAINER = "trainer"  # the folder of a checkpoint that holds the optimizer's shards and state.pt
MEETING_S = 10.0  # in which all ranks that have an error meet, to save what there is
WRITTEN = (  # by a run in its `output_dir`, beside the logs of servers
    "checkpoint-*", "config.json", "run_id", "run.html", "images", "rollouts", "completions.jsonl",
    "held_out.jsonl", "dropped.jsonl", "failed_rewards.jsonl", "failed_rollouts.jsonl",
    "metrics.jsonl",  # the last one: by it an earlier run is known
)  # fmt: skip
# A run that goes on may change these settings. None changes the mathematics, except those that
# say how long the run is, and those that a message advises to change. Prompts are compared
# themselves (`fingerprint`), wherever their data set is.
MAY_CHANGE = frozenset({
    "vllm_urls", "server_timeout", "request_timeout", "sync_timeout", "collective_timeout",
    "max_concurrent_requests", "max_logprob_mismatch", "max_tokens_per_gpu", "max_steps",
    "num_epochs", "use_fsdp", "gradient_checkpoint", "fsdp_offload", "fsdp_shard_size",
    "output_dir", "log_steps", "logged_groups", "log_completions_steps", "eval_steps",
    "eval_dataset_id", "use_wandb", "use_trackio", "wandb_project",
    "on_step", "save_steps",
    "keep_last_n", "hub_private", "resume_from_checkpoint", "push_to_hub", "hub_repo_id",
    "reward_workers", "accuracy_func", "reward_timeout", "share_prefix",
    "eval_generations", "eval_temperature", "torch_compile",
    "dataset_id", "learning_rate", "beta", "max_completion_len", "max_staleness",
})  # fmt: skip

# -- Before a run ----------------------------------------------------------------------------------


@contextmanager
def run_folder(config: TrainConfig) -> Iterator[tuple[Path | None, dict[str, Any]]]:
    """Keep other runs out of `output_dir`, and choose the checkpoint that this one goes on from.

    Yields what `find_start` returns. Collective: rank 0 chooses for all.

    Raises:
        UserError: the folder or the checkpoint cannot be used.
    """
    folder = Path(config.output_dir)
    with ExitStack() as lock:
        found = None
        if is_main():
            with naming(f"output_dir={folder} cannot be written, or has another run in it"):
                folder.mkdir(parents=True, exist_ok=True)
                lock.enter_context(FileLock(folder / "lock").acquire(timeout=0))
            checkpoint, before = find_start(config)
            if config.hub_repo_id:
                with naming("hub_repo_id: nothing can be pushed there"):
                    hub = huggingface_hub.HfApi()
                    hub.create_repo(config.hub_repo_id, private=config.hub_private, exist_ok=True)
                    hub.auth_check(config.hub_repo_id, write=True)  # it may be another's
            # A name that no rank has seen; `_make_way` removes it.
            found = (checkpoint, before, Path(mkdtemp(".part", "checkpoint-", folder)))

        checkpoint, before, probe = broadcast_object(found)
        if not all(gather_objects(probe.is_dir())):
            raise UserError(
                f"output_dir={folder} is not one folder for all ranks: use a disk that they share"
            )
        yield checkpoint, before


def find_start(config: TrainConfig) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint that `resume_from_checkpoint` names, and what was saved with it.

    `auto` is the one of the largest step in `output_dir`. None, {} where the run starts anew.

    Raises:
        UserError: a file cannot be read, or the run had other settings.
    """
    wanted: Any = config.resume_from_checkpoint
    if wanted == "auto":
        found = checkpoints_in(Path(config.output_dir))
        wanted = found.get(max(found, default=0))
    if wanted is None:
        return None, {}

    checkpoint = Path(wanted)
    of_trainer = checkpoint / TRAINER
    with naming(f"resume_from_checkpoint: {of_trainer} cannot be read"):
        before = torch.load(of_trainer / "state.pt", weights_only=True)
        saved = json.loads((of_trainer / "config.json").read_text())

    now = to_json(config)
    # `use_fsdp` may change, and by default decides which of the two kinds of bf16 is on.
    for settings in (saved, now):
        settings["bf16"] = bool(settings.pop("fsdp_bf16", False) or settings["bf16"])
    may_change = MAY_CHANGE.union(dict(config.unread()))
    if not (config.use_peft or config.has_reference):
        may_change |= {"model_id"}  # all weights are the checkpoint's
    for name, value in now.items():
        old = saved.get(name, value)  # or there was no such field yet
        # The same path may be written otherwise, or from another folder.
        is_same_path = Path(str(value)).resolve() == Path(before["cwd"], str(old)).resolve()
        if name not in may_change and value != old and not is_same_path:
            raise UserError(
                f"{checkpoint} was trained with {name}={old}, not {value}: "
                "use that, or another output_dir"
            )
    return checkpoint, before


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """The folder's checkpoints by their steps; those of other trainers are left out."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal() and (path / TRAINER).is_dir():
            found[int(step)] = path
    return found


# -- In a run --------------------------------------------------------------------------------------


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
        self.rollouts = rollouts
        self.averages = getattr(reference, "weights", {})  # of one that moves
        self._saved = 0  # the last step that has a checkpoint in the folder
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        # The writers' collectives must not meet the trainer's. They may take as long as a disk
        # does: `_wait` notices a rank that does not answer.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1))

        get_optimizer_state_dict(policy, optimizer)  # fills AdamW's state by a step
        for values in optimizer.state.values():
            values["step"].zero_()  # that step must not count

        self._updates_begun = 0  # the last update that the weights have, or half of it

        def note_update(*_: Any) -> None:
            self._updates_begun = scheduler.last_epoch + 1

        optimizer.register_step_pre_hook(note_update)

    def resume(self, checkpoint: Path | None, before: dict[str, Any]) -> int:
        """Load optimizer and schedule, and take over the folder.

        Returns the step, 0 without a checkpoint. Any number of ranks may have written the shards.
        """
        step = before.get("step", 0)
        if checkpoint:
            if is_main():
                print(f"going on from {checkpoint}", flush=True)

            shards = self._shards()
            try:
                dcp.load(shards, checkpoint_id=checkpoint / TRAINER)
            except dcp.CheckpointException as error:
                raise UserError(
                    f"the optimizer's state in {checkpoint / TRAINER} cannot be loaded, perhaps by "
                    f"this number of ranks: {_in_a_line(error)}"
                ) from None
            set_optimizer_state_dict(self.policy, self.optimizer, shards["optimizer"])

            # A count of updates is all of its state: this run may be longer, and fall otherwise.
            self.scheduler.last_epoch = step * self.config.updates_per_batch - 1
            self.scheduler.step()
            if checkpoint.resolve().parent == self.folder.resolve():
                self._saved = step

        if is_main():
            _make_way(self.folder, self._saved)
        return step

    def _shards(self) -> dict[str, Any]:
        """What each rank saves of its own; loading fills the averages in place."""
        optimizer = get_optimizer_state_dict(self.policy, self.optimizer)
        return {"optimizer": optimizer, "reference": self.averages}

    def save(self, log: Any) -> None:
        """Copy everything to host memory, and start to write the checkpoint of the last whole step.

        Raises:
            UserError: the last save failed.
        """
        self._wait()
        step = self.rollouts.version
        state = self.rollouts.state() | log.state() | {"step": step, "cwd": os.getcwd()}
        part = self.folder / f"checkpoint-{step}.part"
        weights = host_weights(self.policy)
        shards: Any = dcp.async_save(
            self._shards(), checkpoint_id=part / TRAINER, process_group=self._group
        )
        self._saved = step
        self._writing = shards
        if is_main():
            self._writing = self._pool.submit(self._write, part, shards, weights, state)

    @contextmanager
    def saving(self, log: Any) -> Iterator[None]:
        """Save the last whole step when the block ends, however it ends; push that of a whole run.

        An error is raised again, but for Stopped. Where it is of one rank alone nothing can be
        saved: the others wait for this rank, in the middle of a step.
        """
        try:
            yield
        except Stopped:
            pass
        except BaseException:
            num_updates = self.rollouts.version * self.config.updates_per_batch  # of whole steps
            if num_updates == max(self._updates_begun, self.scheduler.last_epoch):
                # Made for this: no rank can be in the middle of a collective of it.
                timeout = timedelta(seconds=MEETING_S)
                with suppress(RuntimeError):  # the others are in the middle of a step
                    dist.barrier(dist.new_group(backend="gloo", timeout=timeout))
                    try:
                        self._save_last(log)
                    except Exception as failure:  # the first error is the one to raise
                        print(f"the last step is not saved: {_in_a_line(failure)}", flush=True)
            raise
        self._save_last(log)

        step = self.rollouts.version
        repo_id = self.config.hub_repo_id
        if repo_id and step == self.rollouts.num_steps and is_main():
            folder = self.folder / f"checkpoint-{step}"
            with naming(
                "the checkpoint is saved, but not pushed, which "
                f"`hf upload {repo_id} {folder} . --exclude '{TRAINER}/*'` does"
            ):
                huggingface_hub.HfApi().upload_folder(
                    repo_id=repo_id, folder_path=folder, ignore_patterns=f"{TRAINER}/*"
                )

    def _save_last(self, log: Any) -> None:
        """Save the last whole step; a save that fails, or an earlier one, is tried once more."""
        for is_last_try in (False, True):
            try:
                step = self.rollouts.version
                if step > 0 and step != self._saved:
                    self.save(log)
                return self._wait()
            except UserError as failure:  # of all ranks
                if is_last_try:
                    raise
                if is_main():
                    print(failure, flush=True)

    def _wait(self) -> None:
        """Wait until the last save is on the disk, or raise a UserError that says why not."""
        written = self._writing
        if not written:
            return
        cause = call_on_main(lambda: _in_a_line(written.exception()))  # of any rank
        written.exception()  # the others' next save must not begin before, either
        self._writing = None

        if cause:
            path = self.folder / f"checkpoint-{self._saved}"
            self._saved = 0
            raise UserError(f"{path} cannot be written, checkpoints before it are whole: {cause}")

    def _write(self, part: Path, shards: Any, weights: dict[str, Tensor], state: Any) -> None:
        """Write a checkpoint and remove old ones, in the background.

        Raises what safetensors, torch or the disk raise.
        """
        path = part.with_suffix("")
        try:
            shards.result()
            unwrap(self.policy).save_pretrained(part, state_dict=weights)
            # peft's is empty, and the hub refuses a local base_model.
            (part / "README.md").unlink(missing_ok=True)
            self.rollouts.run.processor.save_pretrained(part)
            (part / TRAINER / "config.json").write_text(json.dumps(to_json(self.config)))
            torch.save(state, part / TRAINER / "state.pt")
            for file in [*part.rglob("*"), part]:  # on the disk before it has its name
                _sync(file)
            if path.exists():  # another trainer's, or a try before this one
                path.rename(mkdtemp(".part", "checkpoint-", self.folder))
            part.rename(path)
        finally:  # a half goes at once, as the disk may be full
            shutil.rmtree(part, ignore_errors=True)
        _sync(self.folder)
        print(f"saved {path}")

        if self.config.keep_last_n:
            found = checkpoints_in(self.folder)
            for number in sorted(found)[: -self.config.keep_last_n]:
                # A checkpoint's name never stands for half of it.
                removed = found[number].rename(found[number].with_suffix(".part"))
                shutil.rmtree(removed, ignore_errors=True)


def _make_way(folder: Path, step: int) -> None:
    """Move what is in the way of a run that goes on from `step`, or with 0 starts anew.

    It goes to `<folder>.1`, or the next number that is free: later checkpoints, or all that an
    earlier run has written.
    """
    for left in folder.glob("checkpoint-*.part"):
        shutil.rmtree(left, ignore_errors=True)  # a crash left it
    moved = [path for number, path in checkpoints_in(folder).items() if number > step]
    if step == 0 and (folder / "metrics.jsonl").exists():
        moved = []
        for name in WRITTEN:
            moved += folder.glob(name)
    if not moved:
        return

    numbers = count(1)
    aside = folder
    while aside.exists():
        aside = Path(f"{folder.resolve()}.{next(numbers)}")
    print(f"{folder} has an earlier run, or later steps, which go to {aside}", flush=True)
    with naming(f"output_dir={folder}: what is in its way cannot be moved: take another"):
        aside.mkdir()
        for path in moved:
            path.rename(aside / path.name)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _in_a_line(error: BaseException | None) -> str:
    """The cause of a failed save or load, of any rank; empty where there is no error."""
    if error is None:
        return ""
    return (str(error).strip() or repr(error)).splitlines()[-1]
