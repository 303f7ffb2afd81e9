"""Two completions more than a group needs, of which the last to finish are aborted, on `recipes/tiny.py`.

    bash scripts/demo.sh recipes/first_to_finish.py

Nobody waits for the longest ones. That saves time where lengths differ much, and biases the batch towards short ones.
"""

from dataclasses import replace

from recipes import tiny
from vllm_client import DECODER, completion_of

EXTRA = 2


def first_to_finish(num, reply):
    """The `num` completions of a stream that end first, and the prompt's tokens as the server expanded them."""
    found: dict[int, tuple[list, list]] = {}
    finished, prompt_ids = [], None
    for line in reply.iter_lines():
        if not line.startswith(b"data: {"):
            continue
        chunk = DECODER.decode(line.removeprefix(b"data: "))
        if chunk.error:
            raise ValueError(f"the stream broke off: {chunk.error}")
        prompt_ids = chunk.prompt_token_ids or prompt_ids  # only the first chunk has them
        for part in chunk.choices:
            ids, content = found.setdefault(part.index, ([], []))
            ids += part.token_ids or []
            content += (part.logprobs or {}).get("content") or []
            if part.finish_reason:
                part.token_ids, part.logprobs = ids, {"content": content}
                finished.append(part)
        if len(finished) >= num:
            return [completion_of(choice) for choice in finished[:num]], prompt_ids or []
    raise ValueError(f"the stream ended after {len(finished)} of {num} completions")


def sample(server, prompt, sampling):
    """One request for all; an evaluation of one completion needs no others."""
    if sampling["n"] == 1:
        return server.generate(prompt.token_ids, sampling, prompt.images)
    return server.generate(
        prompt.token_ids, sampling, prompt.images, read=first_to_finish, extra=EXTRA
    )


config = replace(tiny.config, rollout_fn=sample, output_dir="outputs/tiny/first_to_finish")
