"""Two completions more than a group needs: the last two are aborted.

    bash scripts/demo.sh recipes/first_to_finish.py

On `recipes/tiny.py`. Nobody waits for the longest ones. That saves time where lengths differ much,
and biases the batch towards short ones.
"""

from dataclasses import replace

from recipes import tiny
from vllm_client import DECODER, completion_of

EXTRA = 2


def first_to_finish(num, reply):
    """The first `num` completions to end, and the prompt's tokens as served."""
    columns: dict[int, tuple[list, list]] = {}  # token ids and log-probs of a completion, so far
    finished = []
    prompt_ids: list[int] = []

    for line in reply.iter_lines():
        if not line.startswith(b"data: {"):
            continue
        chunk = DECODER.decode(line.removeprefix(b"data: "))
        if chunk.error:
            raise ValueError(f"the stream broke off: {chunk.error}")
        prompt_ids = chunk.prompt_token_ids or prompt_ids  # only the first chunk has them

        for part in chunk.choices:
            ids, content = columns.setdefault(part.index, ([], []))
            ids += part.token_ids or []
            content += (part.logprobs or {}).get("content") or []
            if part.finish_reason:
                part.token_ids = ids
                part.logprobs = {"content": content}
                finished.append(part)
        if len(finished) >= num:
            return [completion_of(choice) for choice in finished[:num]], prompt_ids
    raise ValueError(f"the stream ended after {len(finished)} of {num} completions")


def sample(server, prompt, sampling):
    """Sample all by one request; evaluating one completion needs no others."""
    if sampling["n"] == 1:
        return server.generate(prompt.token_ids, sampling, prompt.images)
    how = {"read": first_to_finish, "extra": EXTRA}
    return server.generate(prompt.token_ids, sampling, prompt.images, **how)


config = replace(tiny.config, rollout_fn=sample, output_dir="outputs/tiny/first_to_finish")
