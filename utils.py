"""Process groups, weights in checkpoint form, checkpoints, metrics, sampling order. No RL, no prompts, no vLLM."""

import copy
import ctypes
import fcntl
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from config import TrainConfig, UserError, to_json

BUCKET_BYTES = 32 << 20  # per broadcast; two are alive at a time: one being loaded, one being gathered


# --------------------------------------------------------------------------------------------------------------------
# Process groups


@contextmanager
def process_group(timeout_s: float) -> Iterator[torch.device]:
    """The world of this run, up and down: torchrun's ranks, or a world of one without torchrun.

    Yields the device of this rank. Tensors on CUDA travel over nccl, everything else over gloo.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield device
    except BaseException:
        if dist.get_world_size() == 1:
            dist.destroy_process_group()
        raise  # with peers waiting in a collective, tearing down could hang: torchrun ends them once this rank is gone
    # A gloo group's end holds Python's lock while it waits for the group's threads, and they may be waiting for that
    # lock to free the last collective's tensors (torch 2.13): let them have it first.
    time.sleep(0.1)
    dist.destroy_process_group()


def is_main() -> bool:
    """True on rank 0, which alone talks to servers, files and people."""
    return dist.get_rank() == 0


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value`, on every rank. Collective: every rank calls it."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def scatter_objects(values: list[Any] | None) -> Any:
    """Item r of rank 0's list, on rank r. Collective: every rank calls it; the others pass None."""
    box: list[Any] = [None]
    shares = values if is_main() else [None] * dist.get_world_size()
    dist.scatter_object_list(box, shares, src=0)  # pickled bytes go over gloo, the group's CPU side
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, on every rank. Collective: every rank calls it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class TransferGroup:
    """A process group of its own between one trainer (rank 0) and the workers of one server (ranks 1..N).

    Every member tells the others its device through the store; the group then runs over nccl where all sit on
    different GPUs, and over gloo elsewhere (CPU, or one GPU shared by server and trainer, which nccl refuses).

    Args:
        store: a TCPStore that all members reach; the trainer hosts it.
        rank: place in the group; 0 is the trainer's.
        world_size: its members, the trainer included.
        device: where this member's weights live.
        timeout_s: bound on every broadcast, in seconds.
    """

    def __init__(self, store: dist.TCPStore, rank: int, world_size: int, device: torch.device, timeout_s: float):
        timeout = timedelta(seconds=timeout_s)
        store.set(f"device/{rank}", _device_identity(device))
        devices = [store.get(f"device/{member}").decode() for member in range(world_size)]
        use_nccl = "cpu" not in devices and len(set(devices)) == world_size
        self.backend = "nccl" if use_nccl else "gloo"
        self.device = device if use_nccl else torch.device("cpu")
        prefix = dist.PrefixStore(f"weights/{self.backend}", store)
        if use_nccl:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(prefix, rank, world_size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo  # whose options torch's stubs lack
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address_towards(store.host))]
            options._timeout = timeout
            self._group = gloo(prefix, rank, world_size, options)
        self._store = store  # the group lives as long as its store

    def send(self, bucket: dict[str, Tensor]) -> list[Any]:
        """Start the broadcast of named tensors, of any shape and dtype, from rank 0; an empty bucket ends the stream.

        Tensors that are contiguous and on the group's device (the CPU for gloo) are not copied.

        Returns:
            Handles to `wait()` on; they keep the tensors, which must not change until then.
        """
        entries = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in bucket.items()]
        header = torch.tensor(list(json.dumps([BUCKET_BYTES, entries]).encode()), dtype=torch.uint8)
        handles = [*self._broadcast(torch.tensor([len(header)])), *self._broadcast(header)]
        for tensor in bucket.values():
            handles += self._broadcast(tensor.reshape(-1).view(torch.uint8), BUCKET_BYTES)
        return handles

    def receive(self) -> dict[str, Tensor]:
        """The next bucket that rank 0 sends, in fresh memory; empty at the end of the stream.

        Shapes and dtypes are the sender's; the tensors are on the group's device (the CPU for gloo).
        """
        size = self._receive_into(torch.zeros(1, dtype=torch.int64, device=self.device))
        header = self._receive_into(torch.empty(int(size), dtype=torch.uint8, device=self.device))
        piece_bytes, entries = json.loads(bytes(header.tolist()))
        bucket = {}
        for name, dtype, shape in entries:
            bucket[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self._receive_into(bucket[name].view(-1).view(torch.uint8), piece_bytes)
        return bucket

    def _broadcast(self, data: Tensor, piece_bytes: int | None = None) -> list[Any]:
        data = data.to(self.device)
        pieces = data.split(piece_bytes) if piece_bytes else [data]
        return [self._group.broadcast([piece], dist.BroadcastOptions()) for piece in pieces]

    def _receive_into(self, data: Tensor, piece_bytes: int | None = None) -> Tensor:
        for handle in self._broadcast(data, piece_bytes):
            handle.wait()
        if self.device.type == "cuda":  # nccl's wait orders streams only; other threads read the bytes
            torch.cuda.current_stream(self.device).synchronize()
        return data

    def trainer_lives(self) -> bool:
        """Whether the process that hosts the store still does."""
        try:
            self._store.check(["device/0"])
        except RuntimeError:  # torch's DistError: its end of the connection is closed
            return False
        return True

    def close(self) -> None:
        """Leave the group; what the other side is waiting for fails there."""
        self._group.shutdown()
        self._group = None


def _device_identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def address_towards(host: str) -> str:
    """The address of this machine on the route to `host` (no packet is sent)."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def api_token() -> str:
    """What servers and trainer share, of `VLLM_API_KEY`; a line's end is none of it. Empty where there is none."""
    return os.environ.get("VLLM_API_KEY", "").strip()


# --------------------------------------------------------------------------------------------------------------------
# Weights in checkpoint form


def unwrap(model: nn.Module) -> Any:
    """The module inside DistributedDataParallel; FSDP2 and plain models are their own."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def base_model(model: nn.Module) -> Any:
    """The Hugging Face model inside DDP and peft wrappers."""
    inner = unwrap(model)
    return inner.get_base_model() if hasattr(inner, "peft_config") else inner


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, detached: an all-gather for an FSDP2 shard (collective), the tensor itself otherwise.

    Of the shape and dtype that `tensor` has; an FSDP2 shard has the shape of the whole.
    """
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather else tensor).detach()


def sync_gradients(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward sums gradients over ranks: DDP can wait for the last one, FSDP2 always scatters."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = enabled


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, whole, LoRA merged: `(name in the plain Hugging Face model, tensor)`, one at a time.

    Shapes and dtypes are those of the plain model in memory, devices the model's. Merged weights are temporaries,
    W + s·B·A computed in the wider of the dtypes and rounded to W's; other tensors may be the model's own storage and
    must not be written to. Tied weights appear under their first name. Collective: every rank iterates to the end, in
    the same order.
    """
    base = base_model(model)
    weights = base.state_dict(keep_vars=True)
    seen: set[int] = set()
    for name, tensor in weights.items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        module_name, _, leaf = name.rpartition(".base_layer.")
        if leaf == "weight":
            yield f"{module_name}.weight", _merged(base.get_submodule(module_name), full_tensor(tensor))
        else:
            yield name.replace(".base_layer.", "."), full_tensor(tensor)


@torch.no_grad()
def _merged(layer: Any, weight: Tensor) -> Tensor:
    """W + s·B·A of a LoRA linear or embedding layer with one adapter, as a new tensor."""
    (adapter,) = layer.active_adapters
    if adapter in layer.lora_A:
        delta = full_tensor(layer.lora_B[adapter].weight) @ full_tensor(layer.lora_A[adapter].weight)
        transpose = layer.fan_in_fan_out
    else:
        delta = full_tensor(layer.lora_embedding_B[adapter]) @ full_tensor(layer.lora_embedding_A[adapter])
        transpose = True
    return (weight + layer.scaling[adapter] * (delta.T if transpose else delta)).to(weight.dtype)


def published_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`full_weights` under the names and in the shapes that `save_pretrained` would write, decoder layer by layer.

    transformers keeps some weights in another form in memory (fused experts, renamed towers); its own conversion
    is undone one layer at a time, so no more than a layer is alive. Collective, as `full_weights`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    base = base_model(model)
    for _, layer in groupby(full_weights(model), key=lambda item: _layer_of(item[0])):
        yield from revert_weight_conversion(base, dict(layer)).items()


def _layer_of(name: str) -> str:
    """A weight's name up to its layer's number (`model.layers.3.`), empty outside of layers."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else ""


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Consecutive weights, of any shapes, of together at most `BUCKET_BYTES`; a larger one is a bucket of its own."""
    bucket: dict[str, Tensor] = {}
    for name, tensor in weights:
        if bucket and sum(t.nbytes for t in bucket.values()) + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints


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

    def finish(self, step: int, state: dict[str, Any]) -> None:
        """Save this step unless it is, and wait until it is on the disk.

        Raises:
            UserError: it could not be written.
        """
        failure = self._written()
        if step > 0 and step not in self.steps[-1:]:
            self.save(step, state)
            failure = self._written()
        if failure:
            raise UserError(failure)

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


def host_weights(model: nn.Module) -> dict[str, Tensor]:
    """What `save_pretrained` takes as `state_dict`, copied to host memory: all weights, or LoRA's. Collective.

    Whole tensors in the model's own shapes and dtypes; empty on ranks other than 0.
    """
    inner = unwrap(model)
    adapter = ((n, t) for n, t in inner.state_dict(keep_vars=True).items() if ".lora_" in n)
    weights = ((n, full_tensor(t)) for n, t in adapter) if hasattr(inner, "peft_config") else full_weights(model)
    state = {}
    for name, tensor in weights:  # every rank takes part in the gathers
        if is_main():
            state[name] = tensor.to("cpu", copy=True)
    return state


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


# --------------------------------------------------------------------------------------------------------------------
# Metrics, logs, order


def over_ranks(values: dict[str, Tensor], op: Any = dist.ReduceOp.SUM) -> dict[str, float]:
    """Each 0-d value reduced over all ranks. Collective: every rank calls it, with the same names."""
    stacked = torch.stack([value.double() for value in values.values()])
    dist.all_reduce(stacked, op)
    return dict(zip(values, stacked.tolist(), strict=True))


def push_to_hub(path: Path, repo_id: str, private: bool) -> None:
    """Upload a checkpoint directory to a model repository of the Hugging Face hub, made where there is none."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    api.upload_folder(
        repo_id=repo_id, folder_path=path, commit_message=f"Upload {path.name}", ignore_patterns=[f"{TRAINER}/*"]
    )


class RunLog:
    """What a run writes: `config.json`, the `.jsonl` files, the terminal, wandb when asked.

    Exists on every rank; only rank 0's writes.

    Args:
        config: output_dir, log_steps, log_completions_steps, use_wandb, wandb_project.
        num_steps: for the time that is left.
        resumed: of the run that this one goes on with: `step`, after which what was written is dropped, `wandb_id`
            and `run_id`.
    """

    PRINTED = (
        "reward", "eval/accuracy", "eval/reward", "loss", "grad_norm", "kl", "frac_reward_zero_std",
        "completions/mean_length", "time/step_s",
    )  # fmt: skip

    def __init__(self, config: TrainConfig, num_steps: int, resumed: dict[str, Any] | None = None):
        self.config = config
        self.wandb_id: str | None = None
        self.run_id = resumed["run_id"] if resumed else uuid.uuid4().hex
        self._files = ExitStack()
        self._wandb: Any = None
        if not is_main():
            return
        folder = Path(config.output_dir)
        (folder / "run_id").write_text(self.run_id)
        (folder / "config.json").write_text(json.dumps(to_json(config), indent=2) + "\n")
        paths = {name: folder / f"{name}.jsonl" for name in ("metrics", "completions", "dropped")}
        if paths["metrics"].exists() and not resumed:
            print(f"{folder} has an earlier run: its logs get the ending .old", flush=True)
        for path in filter(Path.exists, paths.values()):
            if resumed:
                _cut_lines(path, resumed["step"])
            else:
                path.rename(path.with_name(path.name + ".old"))  # of an earlier run
        self._num_steps, self._first_step = num_steps, resumed["step"] if resumed else 0
        self._started_s = time.monotonic()
        self._held_out: float | None = None  # the last evaluation's reward
        self._lines = {n: self._files.enter_context(path.open("a", 1, "utf-8")) for n, path in paths.items()}
        self._bar = self._files.enter_context(tqdm(disable=None, bar_format="{desc}"))
        if config.use_wandb:
            import wandb

            known = {"id": resumed["wandb_id"], "resume": "allow"} if resumed and resumed["wandb_id"] else {}
            self._wandb = wandb.init(project=config.wandb_project, dir=folder, config=to_json(config), **known)
            self.wandb_id = self._wandb.id
            self._files.callback(wandb.finish)

    def step(
        self,
        step: int,
        metrics: dict[str, float],
        samples: Sequence[dict[str, Any]] = (),
        dropped: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Write one step: metrics everywhere, samples to `completions.jsonl`, groups not trained to `dropped.jsonl`.

        Raises:
            UserError: a file cannot be written, as on a full disk.
        """
        if not is_main() or not metrics:
            return
        for name, rows in (("metrics", [metrics]), ("completions", samples), ("dropped", dropped)):
            for row in rows:
                line = json.dumps(_finite({"step": step, **row}), ensure_ascii=False, default=str) + "\n"
                try:
                    self._lines[name].write(line)
                except OSError as error:
                    raise UserError(f"{self._lines[name].name} cannot be written: {error.strerror}") from error
        if self._wandb:  # which has a section of panels for each word before a slash
            self._wandb.log({n if "/" in n else f"train/{n}": value for n, value in metrics.items()}, step=step)
        self._held_out = metrics.get("eval/reward", self._held_out)
        pace = self._pace(step, metrics)
        known = (("reward", metrics.get("reward")), ("eval", self._held_out))
        good = [f"{name} {value:.3g}" for name, value in known if value is not None]
        self._bar.set_description_str(" · ".join([f"step {step}/{self._num_steps}", *good, *pace]))
        if step % self.config.log_steps == 0 or "eval/reward" in metrics:
            parts = [name for name in metrics if name.startswith("rewards/")]
            names = [self.PRINTED[0], *(parts if len(parts) > 1 else ()), *self.PRINTED[1:]]
            printed = [f"{name} {metrics[name]:.4g}" for name in names if name in metrics]
            tqdm.write(" · ".join([f"step {step}/{self._num_steps}", *printed, *pace]))
        every = self.config.log_completions_steps
        if samples and every and step % every == 0:
            self._show(step, samples)

    def _pace(self, step: int, metrics: dict[str, float]) -> list[str]:
        """How long yet, how fast, and the share of the time that the trainer and the servers waited."""
        pace = []
        if step > self._first_step:
            step_s = (time.monotonic() - self._started_s) / (step - self._first_step)
            pace += [f"{tqdm.format_interval(step_s * (self._num_steps - step))} left"]
        if "tokens_per_s/trained" in metrics:
            pace += [f"{tqdm.format_sizeof(metrics['tokens_per_s/trained'])} tok/s"]
            pace += [f"idle {metrics['idle/trainer']:.0%}/{metrics['idle/servers']:.0%}"]
        return pace

    def _show(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Some samples on the terminal, and a table of them in wandb."""
        for sample in samples[:8]:
            cells = (f"{str(sample[column])[:2000]!r:<60.60}" for column in ("prompt", "completion"))
            tqdm.write(" │ ".join([f"{sample['reward']!s:>8.8}", *cells]))
        if self._wandb:
            import wandb

            parts = [f"rewards/{name}" for name in samples[0]["rewards"]]
            columns: list[str | int] = ["group", "prompt", "completion", *parts, "reward", "advantage", "finish_reason"]
            texts = ([str(s["prompt"])[:10_000], s["completion"][:10_000]] for s in samples)
            rows: list[Any] = [
                [s["group"], *text, *s["rewards"].values(), s["reward"], s["advantage"], s["finish_reason"]]
                for s, text in zip(samples[:256], texts, strict=False)
            ]
            self._wandb.log({"completions/table": wandb.Table(columns=columns, data=rows)}, step=step)

    def state(self) -> dict[str, Any]:
        """What a later run needs to go on with what is written."""
        return {"wandb_id": self.wandb_id, "run_id": self.run_id}

    def close(self) -> None:
        """Flush and close everything."""
        self._files.close()


def _finite(value: Any) -> Any:
    """A value with None for NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_lines(path: Path, step: int) -> None:
    """Drop the lines after `step`, which come again, and one that a crash cut off."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as kept, path.open(encoding="utf-8") as lines:
        for line in lines:  # not splitlines(), which takes more than \n for an end
            if not line.endswith("\n") or json.loads(line)["step"] > step:
                break
            kept.write(line)
    part.rename(path)


def epochs(num_items: int, seed: int) -> Iterator[int]:
    """Endless item indices: each epoch is a fresh seeded permutation, so every item comes once per epoch."""
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed + epoch)
        yield from torch.randperm(num_items, generator=generator).tolist()
        epoch += 1


# --------------------------------------------------------------------------------------------------------------------
# Threads, signals, the process


def in_threads(
    function: Callable[[Any], Any], items: Iterable[Any], num_threads: int, meanwhile: Callable[[], None] = lambda: None
) -> list[Any]:
    """`function` of every item, in order; the first error ends it without waiting for what is under way.

    `meanwhile` is called about every second.
    """
    pool = ThreadPoolExecutor(num_threads)
    try:
        replies = [pool.submit(function, item) for item in items]
        while (ended := wait(replies, 1, FIRST_EXCEPTION)).not_done and not any(r.exception() for r in ended.done):
            meanwhile()
        if failed := next((reply for reply in replies if reply.done() and reply.exception()), None):
            failed.result()
        return [reply.result() for reply in replies]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def timed(name: str, metrics: dict[str, float]) -> Iterator[None]:
    """Put the seconds that the block takes into `metrics[name]`."""
    started = time.perf_counter()
    yield
    metrics[name] = time.perf_counter() - started


class Stopped(Exception):
    """The run is to end after its last whole step: by a signal, or as no server is left."""


@contextmanager
def stop_signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set the event; a second one ends the process at once.

    torchrun passes on what it gets to its ranks, to which a terminal sent it as well: within half a second it is the
    same one. It kills ranks that have not ended after 30 s.
    """
    first_s = math.inf

    def note(number: int, _: Any) -> None:
        nonlocal first_s
        if time.monotonic() > first_s + 0.5:
            os._exit(128 + number)
        if not stop.is_set() and is_main():
            first_s = time.monotonic()
            line = f"{signal.Signals(number).name}: saving the last whole step; once more ends at once"
            line += " (the same command goes on with --resume_from_checkpoint auto)\n"
            with suppress(OSError):
                os.write(1, line.encode())  # print() may be what the signal interrupted
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and this run's own while the block, or the process, lasts. Rank 0's.

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
        except OSError as error:  # a file system without locks
            print(f"output_dir={folder} cannot be locked ({error.strerror}): keep other runs out of it", flush=True)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def die_with(parent: int) -> None:
    """Let the kernel end this process with the one that started it (Linux), however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it has ended already
            os._exit(1)


class Terminal(io.TextIOWrapper):
    """An output that shows each line as it comes, and whose end a run survives: Ctrl-C ends a `| tee`, too."""

    def __init__(self, stream: Any):
        super().__init__(stream.buffer, stream.encoding, stream.errors, line_buffering=True)

    def write(self, text: str) -> int:
        """As any, but for a reader that is gone."""
        with suppress(BrokenPipeError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """As any, but for a reader that is gone."""
        with suppress(BrokenPipeError):
            super().flush()


@contextmanager
def exits(*kinds: type[Exception]) -> Iterator[None]:
    """End the process with the block: errors of `kinds` in one line, as they are the user's to mend, others in full.

    `os._exit`, because threads with requests in flight, and gloo's own, would keep the process waiting or abort it.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    sys.stdout, sys.stderr = Terminal(sys.stdout), Terminal(sys.stderr)
    rank = os.environ.get("RANK", "0")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # torchrun: without it ranks would train on, beside those of the next run
    status = 1
    report = get_error_handler()  # torchrun's, which ends its own report with the first error
    report.initialize()
    try:
        yield
        status = 0
    except kinds as error:
        report.record_exception(error)
        print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        lost_peer = isinstance(error, RuntimeError) and re.search(r"onnection (closed|reset) by peer", str(error))
        if lost_peer and "RANK" in os.environ:
            print(f"rank {rank} stopped, as another rank ended first: {str(error).splitlines()[0]}", file=sys.stderr)
            time.sleep(3)  # for torchrun to see that one, which is the cause, and to end this one
        else:
            report.record_exception(error)
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
