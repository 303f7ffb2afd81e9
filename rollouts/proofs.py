"""Proofs that servers compute what the trainer computes."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from config import TrainConfig, bending, sampling_settings, truncating
from rollouts.group import Completion, Group, Prompt
from rollouts.servers import ServerPool
from training.batching import micro_batches
from training.model import token_logprobs
from utils import broadcast_object, is_main
from vllm_client import CONTROL_TIMEOUT_S, Server, ServerError, ServerLost, State

MISMATCH = (
    "and the trainer differ by {:.3g} nats a token after the weight sync: vLLM computes this model"
    " otherwise, takes no new weights for a part of it (as gpt-oss's experts), or has another base"
    " under the adapter (--enable-lora); compare its --model, --dtype and, for images,"
    " --mm-processor-kwargs, or raise max_logprob_mismatch"
)


@dataclass
class Probe:
    """A server's answer to a fixed prompt, to compare with the policy."""

    url: str
    completions: list[Completion]  # empty where it did not answer
    failure: str = ""  # why it cannot be used, "" where its answer is still to be compared


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
        if self.config.rollout_fn or self.config.lora_dropout:
            return
        limit = self.config.max_logprob_mismatch
        settings = sampling_settings(self.config)
        for server in self.pool.servers:
            if bending(settings) or (truncating(settings) and not server.returns_sampling_mask):
                continue
            gap = gaps.get(server.number, math.nan)  # which is neither small nor large
            if gap <= limit:
                server.proved_version = self.version
            elif gap > limit:
                self.pool.lose(server, ServerLost(MISMATCH.format(gap)))

    def overdue(self) -> list[Server]:
        """Some servers that nothing has proved for `probe_steps` versions."""
        due_version = self.version - self.config.probe_steps
        serving = [server for server in self.pool.servers if server.has_weights]
        overdue = [server for server in serving if server.proved_version <= due_version]
        overdue.sort(key=lambda server: server.proved_version)
        return overdue[: 1 + len(serving) // self.config.probe_steps]

    def prove(self, servers: list[Server], is_first: bool = False) -> None:
        """Compare each server's log-probs of a probe, and act accordingly. Collective.

        Args:
            servers: on rank 0; none on the others.
            is_first: at the first sync all must agree, or it is a ServerError.
        """
        waiting = {server for server in servers if not server.has_weights}
        with ThreadPoolExecutor(64) as threads:
            probes = broadcast_object(list(threads.map(self._probe, servers)))

        # LoRA's dropout would differ from the server, and move the random state of the step.
        self.policy.eval()
        for probe in probes:  # every rank takes part in every forward
            if not probe.failure:
                probe.failure = self._difference(probe.completions)
        self.policy.train()

        faults = [f"{probe.url} {probe.failure}" for probe in probes if probe.failure]
        if is_first and faults:
            raise ServerError("; ".join(faults))
        if is_main():
            for server, probe in zip(servers, probes, strict=True):
                self._act_on(server, probe, server in waiting)

    def _act_on(self, server: Server, probe: Probe, is_waiting: bool) -> None:
        """Let a server serve that agrees; leave out a server that differs.

        A server that serves already, and does not answer, may be busy.
        """
        if not probe.failure:
            server.proved_version = self.version
            if is_waiting:
                self.pool.admit(server)
        elif is_waiting:
            self.pool.keep_out(server, probe.failure)
        elif probe.completions:
            self.pool.lose(server, ServerLost(probe.failure))

    def _probe(self, server: Server) -> Probe:
        """Ask for two short completions under the weights that were sent."""
        if server.state is State.LOST:  # in the first sync
            return Probe(server.url, [], f"took no weights: {server.why_out}")
        sampling: dict[str, Any] = {
            "n": 2,
            "max_tokens": min(16, self.config.max_completion_len),
            "temperature": self.config.temperature,
        }
        if server.returns_sampling_mask:  # vLLM then wants one in each request
            sampling["top_k"] = self.config.top_k
        try:
            completions = server.generate(
                self.prompt.token_ids, sampling, self.prompt.images, CONTROL_TIMEOUT_S
            )
        except ServerError as error:
            return Probe(server.url, [], str(error))
        for completion in completions:
            if not completion.weight_versions.eq(self.version).all():
                return Probe(server.url, completions, "answers with other weights than it was sent")
            if server.returns_sampling_mask and completion.sampling_mask is None:
                return Probe(server.url, completions, "announces sampling masks, and returns none")
        return Probe(server.url, completions)

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
