"""An agent of three turns and three tools, written for OpenAI's client: five to eight minutes on two cores.

    bash scripts/demo.sh recipes/tool_agent.py

`347+482~=` is answered by a thought and a call, `(347+482)347+482?`; `add` says `829`; `(829)829~?` gives `928`;
last is `(928)928`. The chat template drops thoughts from the history: every turn is a segment, and what they have in
common is forwarded once. Expected: from 30 to 75 % held out, sampled.
"""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

from openai import OpenAI

from recipes import openai_agent, tiny

NAMES = {"+": "add", "-": "subtract", "~": "mirror"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in NAMES.values()
]
client: Any = cache(
    lambda: OpenAI(api_key="none")
)  # one for all rollouts: to make it takes longer than a rollout


def parse_calls(text):
    """The thought of a reply, and its call."""
    found = re.fullmatch(r"(.*?)(\d+(?:([-+])\d+|(~)))\?", text)
    return (
        (found[1], [(NAMES[found[3] or found[4]], json.dumps({"of": found[2]}))])
        if found
        else (text, [])
    )


def use(name, of):
    """What a tool says."""
    a, _, b = re.split("([-+~])", of)
    return (
        a[::-1] if name == "mirror" else str(int(a) + int(b) if name == "add" else int(a) - int(b))
    )


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
        messages += [
            message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": said},
        ]


def right(completions, said, answer, **_):
    """1 where the last turn's words are the answer, else 0."""
    return [float(words == truth) for words, truth in zip(said, answer, strict=True)]


config = replace(
    tiny.config, model_id="outputs/agent/model", dataset_id="outputs/agent/train.jsonl", no_apply_chat_template=False,
    eval_dataset_id="outputs/agent/heldout.jsonl", eval_temperature=1.0, reward_funcs=[right], max_completion_len=20,
    rollout_fn=openai_agent.trained(solve, max_len=100, parse_calls=parse_calls), batch_size=32, max_steps=60,
    learning_rate=2e-4, eval_steps=20, output_dir="outputs/agent/run",
)  # fmt: skip
