"""Finds the checkpoint that a run continues, and what is damaged in others."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from config import TrainConfig, UserError, changed_fields, to_json
from training.intact import TRAINER
from utils import naming

INDEX = "model.safetensors.index.json"  # of weights in several files
# A run that goes on may change these settings. None changes the mathematics, except those that
# say how long the run is.
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
})  # fmt: skip


def find_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names; None where `auto` finds none."""
    wanted: Any = config.resume_from_checkpoint
    if wanted == "auto":
        path = _newest(Path(config.output_dir))
        if not path:
            return None
    else:
        path = Path(wanted)
        fault = fault_of(path)
        if fault:
            raise UserError(f"resume_from_checkpoint={path}: {fault}")

    before = json.loads((path / TRAINER / "config.json").read_text())
    now = to_json(config)
    # `use_fsdp` may change, and by default decides which of the two kinds of bf16 is on.
    for settings in (before, now):
        settings["bf16"] = bool(settings.pop("fsdp_bf16", False) or settings.get("bf16"))
    changed = changed_fields(config)
    for name, value in now.items():
        # A run from before there was such a field had its default.
        old = before.get(name, "its default" if name in changed else value)
        if name not in MAY_CHANGE and old != value:
            raise UserError(
                f"{path} was trained with {name}={old}, not {value}: "
                "use that, or another output_dir"
            )
    return path


def _newest(folder: Path) -> Path | None:
    """The last whole checkpoint of the last run here.

    A run that starts anew leaves the checkpoints of earlier ones alone.

    Raises:
        UserError: all that may be of this run are damaged.
    """
    states, faults = states_in(folder)
    own = list(states)
    if (folder / "run_id").is_file():
        last = (folder / "run_id").read_text()
        own = [path for path, state in states.items() if state["run_id"] == last]
    if states and not own:
        _say(
            f"the checkpoints in {folder} are of an earlier run than its last: "
            "name one to go on from it"
        )

    newest = None
    for path in sorted(own, key=lambda path: states[path]["saved_s"], reverse=True):
        fault = fault_of(path)
        if not fault:
            newest = path
            break
        faults[path] = fault
    for path, fault in faults.items():
        _say(f"left out {path}: {fault}")
    if not newest and any(_may_be_of_last_run(path) for path in faults):
        raise UserError(
            f"resume_from_checkpoint=auto: no checkpoint in {folder} is whole: mend one, or give "
            "another output_dir"
        )
    return newest


def _may_be_of_last_run(checkpoint: Path) -> bool:
    """False where a checkpoint that cannot be read names another run than its folder's last."""
    last = checkpoint.parent / "run_id"
    own = checkpoint / TRAINER / "run_id"
    if not last.is_file() or not own.is_file():
        return True
    return own.read_text() in ("", last.read_text())


def _say(line: str) -> None:
    """Print a line on rank 0, before the ranks know each other."""
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def states_in(folder: Path) -> tuple[dict[Path, dict[str, Any]], dict[Path, str]]:
    """The states of a folder's checkpoints, and the faults of those that cannot be read."""
    states = {}
    faults = {}
    for path in sorted(folder.glob("checkpoint-*")):
        is_ours = (path / TRAINER).is_dir()  # and not another trainer's
        if is_ours and path.name.removeprefix("checkpoint-").isdecimal():
            try:
                states[path] = read_state(path)
            except UserError as error:
                faults[path] = fault_of(path) or str(error)
    return states, faults


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The `state` that `Checkpoints.save` got, with `step`, `scheduler` and `saved_s`.

    `saved_s` is Unix time, in seconds.

    Raises:
        UserError: it cannot be read.
    """
    with naming(f"{TRAINER}/state.pt cannot be read"):
        state = torch.load(checkpoint / TRAINER / "state.pt", weights_only=True)
        lacking = {"run_id", "step", "scheduler", "saved_s"} - {*state}
        if lacking:
            raise ValueError(f"it has no {min(lacking)}")
        return state


def fault_of(checkpoint: Path) -> str | None:
    """The first damaged file of a checkpoint, and how; None where all can be read.

    Heads and sizes of files are read, and not the weights.
    """
    if not (checkpoint / TRAINER).is_dir():
        return f"no such folder, or one without {TRAINER}/state.pt"
    files = [
        checkpoint / TRAINER / "state.pt",
        checkpoint / TRAINER / "config.json",
        checkpoint / TRAINER / ".metadata",
    ]
    own_json = [path for path in checkpoint.glob("*.json") if path.is_file()]
    weights = [path for path in checkpoint.glob("*.safetensors") if path.is_file()]
    names = {path.name for path in [*own_json, *weights]}
    if not names & {"config.json", "adapter_config.json"}:
        return "it has no config.json"
    if not names & {"model.safetensors", "adapter_model.safetensors", INDEX}:
        return f"it has neither model.safetensors nor {INDEX}"
    for file in [*files, *own_json, *weights]:
        try:
            _read_head(file)
        except Exception as error:  # each format has its own
            cause = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
            return f"{file.relative_to(checkpoint)} cannot be read: {cause}"
    return None


def _read_head(file: Path) -> None:
    """Read as much of a checkpoint's file as shows that it is whole.

    Raises:
        Exception: it is not.
    """
    if file.suffix == ".json":
        content = json.loads(file.read_text(encoding="utf-8"))
        if file.name == INDEX:
            for name in content["weight_map"].values():
                file.with_name(name).stat()
    elif file.suffix == ".safetensors":
        with safe_open(file, framework="pt"):  # compares the size with the head's
            pass
    elif file.suffix == ".pt":
        torch.load(file, weights_only=True)
    else:
        _check_shards(file.parent)


def _check_shards(folder: Path) -> None:
    """Raise ValueError where a shard of the optimizer is shorter than the list of shards says."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for place in metadata.storage_data.values():
        shard = folder / place.relative_path
        if not shard.is_file() or shard.stat().st_size < place.offset + place.length:
            raise ValueError(f"{place.relative_path} is missing, or cut short")
