"""Proofs that servers compute what the trainer computes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from config import TrainConfig, bending
from prefix_attention import evaluating
from rollouts.group import Completion, Group, Prompt
from rollouts.servers import ServerPool
from training.batching import micro_batches
from training.model import token_logprobs
from utils import call_on_main
from vllm_client import ANSWER_TIMEOUT_S, CONTROL_TIMEOUT_S, Server, ServerError, State

MISMATCH = (
    "its log-probs differ from the trainer's by {:.3g} nats a token: vLLM computes this model"
    " otherwise, takes no new weights for a part of it (as gpt-oss's experts), or has another base"
    " under the adapter (--enable-lora); compare its --model, --dtype and, for images,"
    " --mm-processor-kwargs, or raise max_logprob_mismatch"
)


@dataclass
class Proofs:
    """Compares servers with one version of the policy.

    `prove` asks them for log-probs of a probe, `check` takes those of tokens that trained.
    """

    policy: torch.nn.Module
    version: int
    pool: ServerPool  # on rank 0
    prompt: Prompt  # of the probes
    config: TrainConfig
    device: torch.device

    def check(self, gaps: dict[int, float]) -> None:
        """Leave out servers whose tokens have other log-probs here. On rank 0.

        Args:
            gaps: mean |trainer - server|, nats a token, by the server's number; servers with too
                few tokens of this version have none.
        """
        # With these, log-probs differ although the weights are the same.
        if self.config.rollout_fn or self.config.lora_dropout or bending(self.config):
            return
        for server in self.pool.serving:
            gap = gaps.get(server.number, 0.0)
            if gap > self.config.max_logprob_mismatch:
                self.pool.lose(server, MISMATCH.format(gap))

    def prove(self, servers: list[Server], is_first: bool = False) -> None:
        """Compare each server's log-probs of a probe with the policy's. Collective.

        One that waits serves if they agree, and one that serves is left out if they do not.

        Args:
            servers: on rank 0; none on the others.
            is_first: at the first sync all must agree, or it is a ServerError.
        """
        with ThreadPoolExecutor(64) as threads:
            probes = call_on_main(lambda: list(threads.map(self._probe, servers)))

        failures: dict[str, str] = {}  # by the servers' addresses
        # LoRA's dropout would differ from the server, and move the random state of the step.
        with evaluating(self.policy):
            for url, completions, failure in probes:  # every rank takes part in every forward
                failures[url] = self._difference(completions) if completions else failure

        faults = [f"{url}: {failure}" for url, failure in failures.items() if failure]
        if is_first and faults:
            raise ServerError("; ".join(faults))
        for server in servers:
            if failures[server.url]:
                self.pool.lose(server, failures[server.url])
            elif server.state is State.WAITING and server.version == self.version:
                self.pool.admit(server)  # one that was lost meanwhile may be back without weights

    def _probe(self, server: Server) -> tuple[str, list[Completion], str]:
        """Ask for two short completions under the weights that were sent.

        Returns:
            The server's address; the completions, none where it did not answer; and why it cannot
            be used, if that is known without them.
        """
        if server.version != self.version:  # in the first sync
            return server.url, [], f"took no weights: {server.why_out}"
        sampling: dict[str, Any] = {
            "n": 2,
            "max_tokens": min(16, self.config.max_completion_len),
            "temperature": self.config.temperature,
        }
        is_serving = server.state is State.SERVING
        timeout_s = ANSWER_TIMEOUT_S if is_serving else CONTROL_TIMEOUT_S
        try:
            completions = server.generate(
                self.prompt.token_ids, sampling, self.prompt.images,
                timeout_s=timeout_s, priority=-1,
            )  # fmt: skip
        except ServerError as error:
            # Those who ask it for groups notice, too, that it is lost; else it is busy.
            return server.url, [], "" if is_serving else str(error)
        for completion in completions:
            if not completion.weight_versions.eq(self.version).all():
                return server.url, [], "answers with other weights than it was sent"
        return server.url, completions, ""

    def _difference(self, completions: list[Completion]) -> str:
        """The message where log-probs differ from the policy's, else "".

        The message says how far they differ. Collective.
        """
        group = Group(self.prompt, completions, advantages=[0.0] * len(completions))
        [micro_batch] = micro_batches([group], None, self.config)
        row = micro_batch.to(self.device)

        with torch.no_grad():
            trainer_logprobs = token_logprobs(self.policy, row.packed, row.images, self.config)
        mismatch = (trainer_logprobs - row.sampler_logprobs).abs().mean().item()
        if mismatch <= self.config.max_logprob_mismatch:
            return ""
        return MISMATCH.format(mismatch)  # also for a NaN
