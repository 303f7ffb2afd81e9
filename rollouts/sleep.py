"""Servers that give up their GPU's memory while the trainer trains: `--enable-sleep-mode`."""

import torch
import torch.distributed as dist

from config import TrainConfig, UserError
from rollouts.servers import ServerPool
from vllm_client import Server


def check_synchronous(config: TrainConfig) -> None:
    """Refuse a run whose servers would have to sample while they sleep."""
    if config.max_staleness > 0:
        raise UserError(
            "a server with --enable-sleep-mode sleeps while this trains: set max_staleness=0, "
            "or restart it without"
        )


def fall_asleep(pool: ServerPool) -> None:
    """Let servers give up their GPU's memory, until the next update wakes them."""
    servers = [server for server in pool.serving if server.can_sleep]
    pool.do_apart(servers, _fall_asleep)


def _fall_asleep(server: Server) -> None:
    # Level 2 discards the weights: the next update brings them. Level 1 keeps them in the host's
    # memory: an update of an adapter alone brings no base.
    level = 1 if server.takes_adapter else 2
    server.post(f"/sleep?level={level}")


def release_unused_memory() -> None:
    """Return cached memory to the GPU, on all ranks, before servers wake up. Collective."""
    torch.cuda.empty_cache()
    dist.barrier()
