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
        if ".lora_" not in name:
            continue
        module, _, kind = name.partition(".lora_")
        whole = full_tensor(tensor)
        if kind.startswith(("B", "embedding_B")):
            # With the scale in it a server needs no rank, alpha, or formula of its own.
            whole = whole * wrapped.get_submodule(module).scaling[adapter]
        yield name.replace(f".{adapter}", ""), whole


def sends_adapter(servers: Sequence[Server], config: TrainConfig) -> bool:
    """Decide whether servers are sent the adapter alone; else all weights, LoRA merged.

    Raises:
        ServerError: a server does not fit the run; or servers differ, and all are sent the same.
    """
    for_adapter = [server for server in servers if server.takes_adapter]
    for_weights = [server for server in servers if not server.takes_adapter]
    for server in for_adapter:
        _check_rank(server, config)

    if for_adapter and for_weights:
        raise ServerError(
            f"{for_weights[0].url} takes whole weights, and {for_adapter[0].url} adapters alone: "
            "start all with --enable-lora, or none"
        )
    options = " ".join(lora_options(config.lora_rank))
    if config.base_4bit and for_weights:
        cure = f"restart it with {options}"
        if not options:
            cure = "set lora_rank to 512 at most, and restart it with --enable-lora"
        raise ServerError(
            f"{for_weights[0].url} takes whole weights, and base_4bit has none: {cure}"
        )
    if config.use_peft and for_weights and options:
        print(
            f"LoRA is merged for the servers; started with {options} they would get adapters alone "
            "(docs/operations.md says when)",
            flush=True,
        )
    return bool(for_adapter)


def check_returned(server: Server, sends_adapter: bool, config: TrainConfig) -> None:
    """Refuse a server that joins a run, and was started otherwise than the run needs.

    Raises:
        ServerError: as `sends_adapter` does; or it can sleep, and would have to sample meanwhile.
    """
    try:
        if server.takes_adapter != sends_adapter:
            how = "with" if sends_adapter else "without"
            raise ServerError(f"restart it {how} --enable-lora, as the others")
        if server.takes_adapter:
            _check_rank(server, config)
        if server.can_sleep and config.max_staleness > 0:
            raise ServerError("restart it without --enable-sleep-mode, or set max_staleness=0")
    except ServerError:
        server.disconnect()
        raise


def _check_rank(server: Server, config: TrainConfig) -> None:
    """Refuse a server for adapters where the run has none, or one of a higher rank."""
    assert server.transfer
    max_rank = server.transfer.lora_rank
    if config.use_peft and config.lora_rank <= max_rank:
        return
    cure = "without --enable-lora, or set use_peft"
    if config.use_peft:
        options = lora_options(config.lora_rank)
        cure = " ".join(["with", *options]) if options else "without --enable-lora"
    raise ServerError(
        f"{server.url} takes adapters alone, of rank {max_rank} at most: restart it {cure}"
    )
