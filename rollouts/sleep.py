"""Servers that give up their GPU's memory while the trainer trains: `--enable-sleep-mode`."""

import torch
import torch.distributed as dist

from config import TrainConfig, UserError
from rollouts.servers import ServerPool
from vllm_client import Server


def check_turns(config: TrainConfig) -> None:
    """Refuse a run whose servers would have to sample while they sleep."""
    if config.max_staleness > 0:
        raise UserError(
            "a server with --enable-sleep-mode sleeps while this trains: set max_staleness=0, "
            "or restart it without"
        )


def fall_asleep(pool: ServerPool) -> None:
    """Let servers give up their GPU's memory, until the next update wakes them."""
    with pool._updating:
        pool._on([server for server in pool.serving if server.sleeps], _fall_asleep)


def _fall_asleep(server: Server) -> None:
    # At level 1 weights go to the host's memory: no update would bring a base below adapters.
    level = 1 if server.takes_adapter else 2
    server.post(f"/sleep?level={level}")


def make_room() -> None:
    """Free the memory that no tensor has, on all ranks, for servers to wake up. Collective."""
    torch.cuda.empty_cache()
    dist.barrier()
