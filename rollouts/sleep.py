"""Servers that give up their GPU's memory while the trainer trains: `--enable-sleep-mode`."""

from contextlib import suppress

import torch
import torch.distributed as dist

from config import TrainConfig, UserError
from rollouts.servers import ServerPool
from vllm_client import Server, ServerError

LOST_TIMEOUT_S = 5.0  # for a server that may never answer


def check_synchronous(config: TrainConfig) -> None:
    """Refuse a run whose servers would have to sample while they sleep."""
    if config.max_staleness > 0:
        raise UserError(
            "a server with --enable-sleep-mode sleeps while this trains: set max_staleness=0, "
            "or restart it without"
        )


def fall_asleep(pool: ServerPool) -> None:
    """Let servers give up their GPU's memory, until the next update wakes them."""
    pool.fall_asleep(_fall_asleep)


def _fall_asleep(server: Server) -> None:
    """Let a server sleep, and a lost one, if it listens: it may have the GPU's memory."""
    # Level 2 discards the weights: the next update brings them. Level 1 keeps them in the host's
    # memory: an update of an adapter alone brings no base.
    level = 1 if server.takes_adapter else 2
    path = f"/sleep?level={level}"
    if server.has_weights:
        server.post(path, timeout_s=server.sync_timeout_s)
        return
    with suppress(ServerError):
        server.post(path, timeout_s=LOST_TIMEOUT_S)


def release_unused_memory() -> None:
    """Return cached memory to the GPU, on all ranks, before servers wake up. Collective."""
    torch.cuda.empty_cache()
    dist.barrier()
