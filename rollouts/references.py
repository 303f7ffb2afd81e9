"""Servers of the reference, which give log-probs in the trainer's place."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from config import TrainConfig, UserError
from rollouts.group import Group
from rollouts.servers import ServerPool
from vllm_client import Server


def reference_pool(forbidden: Sequence[int], config: TrainConfig) -> ServerPool:
    """Give the servers of the reference that `reference_urls` lists.

    Raises:
        UserError: the model has placeholders of images, `forbidden`.
    """
    if forbidden:
        raise UserError(
            "reference_urls: with images the trainer needs its own reference, see reference_id"
        )

    urls: Any = config.reference_urls
    theirs = replace(config, vllm_urls=urls, model_id=config.reference_id or config.model_id)
    pool = ServerPool(theirs, kind=partial(ReferenceServer, temperature=config.temperature))
    pool.version = 0  # of the weights that they have, and keep
    return pool


class ReferenceServer(Server):
    """A server of the reference, which gets no weights.

    It gives log-probs at the run's `temperature`.
    """

    def __init__(self, url: str, temperature: float, **others: Any):
        super().__init__(url, **others)
        self.temperature = temperature

    def connect(self, *_: Any, **others: Any) -> None:
        """Tell it the temperature: it serves from then on."""
        self.post("/init_weight_transfer_engine", {"init_info": {"temperature": self.temperature}})
        self.is_connected = self.has_weights = True

    def logprobs(self, group: Group) -> Tensor:
        """Give the log-probs of a group's tokens, [n] float32, nats.

        They are a column as those of `Group.tokens`.
        """
        if self.temperature != 1:  # it may have been restarted meanwhile
            self.connect()
        _, completions = group.sequences
        of_segments = [self._of_segment(*segment) for segment in chain.from_iterable(completions)]
        return torch.cat(of_segments)

    def _of_segment(self, prompt_ids: Tensor, token_ids: Tensor) -> Tensor:
        ids = token_ids.tolist()
        body = {
            "token_ids": [*prompt_ids.tolist(), *ids],
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0},
        }
        given = self.request("POST", "/inference/v1/generate", json=body)["prompt_logprobs"][
            len(prompt_ids) :
        ]
        return torch.tensor(
            [of_place[str(token)]["logprob"] for token, of_place in zip(ids, given, strict=True)]
        )
