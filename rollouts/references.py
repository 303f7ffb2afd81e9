"""Servers of the reference, which give log-probs in the trainer's place."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from config import TrainConfig, UserError
from rollouts.group import Group
from rollouts.servers import ServerPool
from server.messages import Sampled, SampleRequest
from vllm_client import Server, ServerError, ServerLost, State


def reference_pool(forbidden: Sequence[int], config: TrainConfig) -> ServerPool:
    """The servers of the reference that `reference_urls` lists.

    Raises:
        UserError: the model has placeholders of images, `forbidden`.
    """
    if forbidden:
        raise UserError(
            "reference_urls: with images the trainer needs its own reference, see reference_id"
        )

    urls: Any = config.reference_urls
    model_id = config.reference_id or config.model_id
    theirs = replace(config, vllm_urls=urls, model_id=model_id, reference_urls=None)
    theirs = replace(theirs, top_k=None, sampling_params=None)  # as nothing is sampled there
    pool = ServerPool(theirs, kind=partial(ReferenceServer, temperature=config.temperature))
    pool.version = 0  # of the weights that they have, and keep
    return pool


class ReferenceServer(Server):
    """A server of the reference, for log-probs at a temperature.

    It gets no weights.
    """

    takes_weights = False

    def __init__(self, url: str, temperature: float, **others: Any):
        super().__init__(url, **others)
        self.temperature = temperature  # of the run

    def connect(self, trainer: str = "", *_: Any, **__: Any) -> None:
        """Ask the server about itself; for a trainer tell it the temperature, and let it serve."""
        super().connect(temperature=self.temperature if trainer else 0.0)
        if trainer:
            self.state = State.SERVING

    def logprobs(self, group: Group) -> Tensor:
        """The log-probs of a group's completion tokens: [n] float32, nats.

        They are a column of the group's `tokens`.
        """
        if self.temperature != 1:  # it may have been restarted meanwhile
            super().connect(temperature=self.temperature)

        _, completions = group.sequences
        columns = []
        for segments in completions:
            for prompt_ids, token_ids in segments:
                columns.append(self._segment_logprobs(prompt_ids.tolist(), token_ids.tolist()))
        return torch.cat(columns)

    def _segment_logprobs(self, prompt_ids: list[int], token_ids: list[int]) -> Tensor:
        """The log-probs of a segment, which the server reads as a prompt.

        Raises:
            ServerLost: some are missing, or no finite numbers, as of a request that was aborted.
            ServerError: a trainer has sent the server weights.
        """
        ids = prompt_ids + token_ids
        request = SampleRequest(ids, {"max_tokens": 1, "prompt_logprobs": 0})
        (message,) = self.post("/sample", request, list[Sampled])
        if any(name.isdecimal() for name, _, _ in message.weight_versions):
            raise ServerError(f"{self.url} has the weights of a trainer: start it anew")
        logprobs = np.frombuffer(message.prompt_logprobs, "<f4").copy()
        num = len(ids) - 1  # the first token has none
        if len(logprobs) != num or not np.isfinite(logprobs).all():
            raise ServerLost(
                f"{self.url}: {len(logprobs)} of {num} log-probs of a prompt, or some NaN: "
                f"{message.finish_reason}"
            )
        return torch.from_numpy(logprobs)[len(prompt_ids) - 1 :]
