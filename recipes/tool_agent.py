"""An agent of three turns and three tools, written for OpenAI's client: about four minutes on two cores.

    bash scripts/demo.sh recipes/tool_agent.py

`347+482~=` is answered by a thought and a call, `(347+482)347+482?`; `add` says `829`; `(829)829~?` asks `mirror`,
which says `928`; the last turn is `(928)928`. The chat template drops thoughts from the history, so that every turn is
a segment, and what they have in common is forwarded once. `--share_prefix false` gives a row per turn: the same
gradients, slower. Expected: sampled 10 to 90 % of the held-out problems right.
"""

import json
import re
from functools import cache

from config import TrainConfig
from recipes.openai_agent import trained

NAMES = {"+": "add", "-": "subtract", "~": "mirror"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES.values()]


def parse_calls(text):
    """The thought of a reply, and its call: `(829)829~?`."""
    found = re.fullmatch(r"(.*?)(\d+(?:([-+])\d+|(~)))\?", text)
    return (found[1], [(NAMES[found[3] or found[4]], json.dumps({"of": found[2]}))]) if found else (text, [])


def use(name, of):
    """What a tool says."""
    a, _, b = re.split("([-+~])", of)
    return a[::-1] if name == "mirror" else str(int(a) + int(b) if name == "add" else int(a) - int(b))


@cache
def client():
    """One for all rollouts: to load its certificates takes longer than a rollout."""
    from openai import OpenAI

    return OpenAI(api_key="none")


def solve(base_url, prompt):
    """The usual loop, for three turns at most."""
    chat = client().with_options(base_url=base_url).chat.completions
    messages = [{"role": "user", "content": prompt.content}]
    for turn in range(3):
        message = chat.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if turn == 2 or not message.tool_calls:
            return {"said": message.content.rpartition(")")[2]}
        (call,) = message.tool_calls
        said = use(call.function.name, **json.loads(call.function.arguments))
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": said}]


def right(completions, said, answer, **_):
    """1 where the last turn's words are the answer, else 0."""
    return [float(words == truth) for words, truth in zip(said, answer, strict=True)]


config = TrainConfig(
    model_id="outputs/agent/model",
    dataset_id="outputs/agent/train.jsonl",
    eval_dataset_id="outputs/agent/heldout.jsonl",
    eval_temperature=1.0,
    reward_funcs=[right],
    rollout_fn=trained(solve, max_len=100, parse_calls=parse_calls),
    num_generations=8,
    max_completion_len=20,
    batch_size=32,
    max_steps=60,
    learning_rate=2e-4,
    warmup_ratio=0.05,
    lr_scheduler="linear",
    max_tokens_per_gpu=2048,
    eval_steps=20,
    output_dir="outputs/agent/run",
)
