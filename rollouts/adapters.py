"""LoRA's adapter by itself, for servers that were started with `--enable-lora`."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from config import TrainConfig, lora_options
from vllm_client import Server, ServerError
from weights.publish import full_tensor, unwrap


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield LoRA's A and s·B, whole, by their names in a checkpoint of peft's. Collective."""
    wrapped = unwrap(model)
    (adapter,) = wrapped.active_adapters
    for name, tensor in wrapped.state_dict(keep_vars=True).items():
        module, is_lora, kind = name.partition(".lora_")
        if not is_lora:
            continue
        whole = full_tensor(tensor)
        if kind.startswith(("B", "embedding_B")):
            # With the scale in it a server needs no rank, alpha, or formula of its own.
            whole = whole * wrapped.get_submodule(module).scaling[adapter]
        yield name.replace(f".{adapter}", ""), whole


def take_adapters(servers: Sequence[Server], config: TrainConfig) -> bool:
    """Tell whether the servers take adapters alone; else they get whole weights, LoRA merged.

    Raises:
        ServerError: one does not fit the run, or the others: one stream goes to all.
    """
    alone = [server for server in servers if server.takes_adapter]
    merged = [server for server in servers if not server.takes_adapter]
    for server in alone:
        _check_rank(server, config)

    if alone and merged:
        raise ServerError(
            f"{merged[0].url} takes whole weights, and {alone[0].url} adapters alone: start all "
            "with --enable-lora, or none"
        )
    options = " ".join(lora_options(config.lora_rank))
    if config.base_4bit and merged:
        cure = f"with {options}" if options else "with a lower lora_rank, and --enable-lora"
        raise ServerError(
            f"{merged[0].url} takes whole weights, and base_4bit has none: restart it {cure}"
        )
    if config.use_peft and merged and options:
        print(
            f"LoRA is merged for the servers; started with {options} they would get adapters alone "
            "(docs/operations.md says when)",
            flush=True,
        )
    return bool(alone)


def _check_rank(server: Server, config: TrainConfig) -> None:
    """Refuse a server for adapters whose run trains all weights, or larger ones."""
    assert server.transfer
    most = server.transfer.lora_rank
    if config.use_peft and config.lora_rank <= most:
        return
    cure = "without --enable-lora, or set use_peft"
    if config.use_peft:
        options = lora_options(config.lora_rank)
        cure = " ".join(["with", *options]) if options else "without --enable-lora"
    raise ServerError(
        f"{server.url} takes adapters alone, of rank {most} at most: restart it {cure}"
    )
