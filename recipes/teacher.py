"""A teacher, or the initial policy, on servers of its own: they give `ref_logprobs`.

    python vllm_server.py --model my-org/teacher --port 8001

and in the recipe `parts=[Teacher("http://127.0.0.1:8001")]` beside `beta`, a `loss_fn`, or an
`advantage_fn` that reads them. The log-probs of prompt and completion are asked for beside the
rewards, so they overlap with training, and take none of the trainer's memory.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from config import UserError
from prefix_attention import rope_limit
from rollouts.data import leave_out_long
from rollouts.group import RolloutFailed
from rollouts.processor import load_processor, placeholder_ids, tokenizer_of
from rollouts.sampling import on_one_server
from rollouts.servers import ServerPool
from server.messages import Sampled, SampleRequest
from training.loading import load_model_config
from vllm_client import Server, ServerError, ServerLost, State


class Teacher:
    """A part that gives each group the log-probs of a model on servers.

    They have that model, of the policy's vocabulary, and get no weights. One that fails is left
    out until it answers again.

    Args:
        urls: of the servers.
        model_id: of the model; None: the policy's.
    """

    gives_ref_logprobs = True  # so that the trainer loads no reference

    def __init__(self, *urls, model_id=None):
        if not urls:
            raise UserError("Teacher needs the address of a server: Teacher('http://host:port')")
        self.urls = [*urls]
        self.model_id = model_id
        self.__qualname__ = f"Teacher({model_id})"  # a run that goes on must have the same

    def __call__(self, run):
        """Connect the servers, and ask them for each group that was sampled."""
        config = run.config
        if not (config.beta or config.loss_fn or config.advantage_fn):
            raise UserError(
                "Teacher has no effect without beta or a loss_fn, or an advantage_fn that reads "
                "ref_logprobs: leave it out"
            )
        if placeholder_ids(load_model_config(config)[0]):
            raise UserError("Teacher: with images the trainer needs its own reference_id")

        if self.model_id:  # of the same vocabulary, which is asked of a reference that is read
            beta = config.beta or 1.0
            load_processor(replace(config, reference_id=self.model_id, beta=beta, parts=[]))
        theirs = replace(
            config, vllm_urls=self.urls, model_id=self.model_id or config.model_id, parts=[],
            top_k=None, sampling_params=None,  # as nothing is sampled there
            base_4bit=False,  # it is no adapter's base
        )  # fmt: skip
        kind = partial(ReferenceServer, temperature=config.temperature)
        longest = rope_limit(load_model_config(theirs)[0])
        self.pool = ServerPool(theirs, tokenizer_of(run.processor), kind=kind, rope_limit=longest)
        run.exits.callback(self.pool.close)
        # To give log-probs, vLLM must also sample a token.
        longest = self.pool.wait_until_ready() - 1
        run.prompts = leave_out_long(run.prompts, longest - config.max_completion_len, config)
        self.pool.connect(torch.device("cpu"))
        self.sample_and_score = run.fill
        run.fill = self.fill

    def fill(self, group):
        """Sample and score a group, and ask for its log-probs."""
        self.sample_and_score(group)
        try:
            group.ref_logprobs = on_one_server(
                group, self.pool, lambda server: server.logprobs(group)
            )
        except RolloutFailed as error:  # the rollout is not to blame
            raise ServerError(str(error)) from error


class ReferenceServer(Server):
    """A server of the reference, for log-probs at a temperature."""

    def __init__(self, url, temperature, **others):
        super().__init__(url, **others)
        self.temperature = temperature  # of the run

    def connect(self):
        """Tell the server the temperature, and let it serve."""
        self.ask(temperature=self.temperature)
        self.state = State.SERVING

    def logprobs(self, group):
        """The log-probs of a group's completion tokens: [n] float32, nats.

        They are a column of the group's `tokens`.
        """
        if self.temperature != 1:  # it may have been restarted meanwhile
            self.ask(temperature=self.temperature)

        _, completions = group.sequences
        columns = []
        for segments in completions:
            for prompt_ids, token_ids in segments:
                columns.append(self.segment_logprobs(prompt_ids.tolist(), token_ids.tolist()))
        return torch.cat(columns)

    def segment_logprobs(self, prompt_ids, token_ids):
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
