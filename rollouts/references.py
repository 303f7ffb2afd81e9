"""Servers of the reference, which give log-probs in the trainer's place."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import requests
import torch
from torch import Tensor

from config import TrainConfig, UserError
from rollouts.group import Group
from rollouts.servers import ServerPool
from server.messages import SAMPLE, messages
from vllm_client import Server, State


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

    def __init__(self, url: str, temperature: float, **others: Any):
        super().__init__(url, **others)
        self.temperature = temperature  # of the run

    def connect(self, *_: Any, **others: Any) -> None:
        """Tell the server the temperature; from then on it serves."""
        self.post("/init_weight_transfer_engine", {"init_info": {"temperature": self.temperature}})
        self.state = State.SERVING

    def logprobs(self, group: Group) -> Tensor:
        """The log-probs of a group's completion tokens: [n] float32, nats.

        They are a column of the group's `tokens`.
        """
        if self.temperature != 1:  # it may have been restarted meanwhile
            self.connect()

        _, completions = group.sequences
        columns = []
        for segments in completions:
            for prompt_ids, token_ids in segments:
                columns.append(self._segment_logprobs(prompt_ids.tolist(), token_ids.tolist()))
        return torch.cat(columns)

    def _segment_logprobs(self, prompt_ids: list[int], token_ids: list[int]) -> Tensor:
        """The log-probs of a segment, which the server reads as a prompt."""
        body = {
            "token_ids": prompt_ids + token_ids,
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0},
        }
        num_tokens = len(prompt_ids) + len(token_ids)
        read = partial(_prompt_logprobs, num_tokens - 1)  # the first token has none
        return self.request("POST", SAMPLE, json=body, read=read)[len(prompt_ids) - 1 :]


def _prompt_logprobs(num: int, reply: requests.Response) -> Tensor:
    """The `num` log-probs of a prompt's tokens but the first: float32, nats.

    Raises:
        ValueError: some are missing, or no finite numbers, as of a request that was aborted.
    """
    (message,) = messages(reply.iter_content(None))
    logprobs = np.frombuffer(message.prompt_logprobs, "<f4").copy()
    if len(logprobs) != num or not np.isfinite(logprobs).all():
        reason = message.error or message.finish_reason
        raise ValueError(f"{len(logprobs)} of {num} log-probs of a prompt, or some NaN: {reason}")
    return torch.from_numpy(logprobs)
