"""A group's completions from one server, or from another once that is lost."""

import time
from collections.abc import Callable
from typing import Any

from config import TrainConfig
from rollouts.custom import check_segments, naming_function
from rollouts.group import FOREIGN, Group, RolloutFailed
from rollouts.images import with_tokens
from rollouts.servers import ServerPool
from utils import naming
from vllm_client import Server, ServerError, ServerLost, State


def sampling_params(config: TrainConfig) -> dict[str, Any]:
    """vLLM's sampling parameters for a group, without fields that are None."""
    params: dict[str, Any] = {
        "n": config.num_generations,
        "max_tokens": config.max_completion_len,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "stop": config.stop,
    }
    params |= config.sampling_params or {}
    return {name: value for name, value in params.items() if value is not None}


def sample_group(
    group: Group, pool: ServerPool, processor: Any, config: TrainConfig, **instead: Any
) -> None:
    """Fill in a group's completions, all from one server, by one request or `rollout_fn`.

    `instead` are parameters of vLLM in place of the config's.

    Raises:
        UserError: an image cannot be read.
        RolloutFailed: as `on_one_server`; or `rollout_fn` failed, or returned what is no completion
            under this policy.
        ServerError: as `on_one_server`.
    """
    if group.prompt.sources:
        group.prompt = with_tokens(group.prompt, processor, config)
    rollout_fn: Any = config.rollout_fn
    where = f"rollout_fn on {group.prompt.where}"
    sampling = sampling_params(config) | instead
    if config.max_staleness == 0 and not rollout_fn:
        # vLLM samples completion i with seed + i, and takes 63 bits. So the seeds of two groups are
        # twice as far apart as they have completions, and those of two runs 2^40.
        seed = (config.seed << 40) + group.id * 2 * sampling["n"]
        sampling.setdefault("seed", seed % 2**63)

    def ask(server: Server) -> None:
        group.started_version = server.version
        group.started_s = time.monotonic()
        group.server = server.number
        if not rollout_fn:
            group.set_rollouts(
                server.generate(group.prompt.token_ids, sampling, group.prompt.images)
            )
        else:
            with naming_function(where, RolloutFailed):
                rollouts = list(rollout_fn(server, group.prompt, sampling))
            with naming(f"{where}: it returned no completions to train", RolloutFailed):
                if len(rollouts) != sampling["n"]:
                    raise ValueError(f"{len(rollouts)} rollouts, not {sampling['n']}")
                group.set_rollouts(rollouts)
                check_segments(group, server.forbidden, config)

        if group.oldest_version == FOREIGN:
            error = ServerLost("it sampled with weights of its own: was it restarted?")
            pool.lose(server, error)
            raise error  # so that another one is asked
        if group.oldest_version < group.started_version:  # it could train beyond max_staleness
            raise RolloutFailed(
                f"{group.prompt.where}: a completion has tokens of policy {group.oldest_version}, "
                f"and was asked for under {group.started_version}"
            )

    on_one_server(group, pool, ask)
    group.sampled_s = time.monotonic()


def on_one_server(group: Group, pool: ServerPool, ask: Callable[[Any], Any]) -> Any:
    """The result of `ask(server)`; another server is asked where one is lost.

    Raises:
        RolloutFailed: healthy servers failed three times.
        ServerError: no server is left, or one refused.
    """
    where = group.prompt.where
    num_failures = 0
    while True:
        with pool.lease() as server:
            try:
                return ask(server)
            except ServerLost as error:
                if server.state is not State.SERVING:  # it was lost, and may be back already
                    continue
                try:
                    server.post("/health", None, timeout_s=5)
                except ServerError:
                    pool.lose(server, error)
                    continue
                num_failures += 1
                if num_failures == 3:  # the servers are not to blame
                    raise RolloutFailed(
                        f"{where}: {error}, three times on healthy servers; a completion that "
                        "takes longer than request_timeout needs more of it"
                    ) from error
            except ServerError as error:
                raise ServerError(f"{where}: {error}") from None
