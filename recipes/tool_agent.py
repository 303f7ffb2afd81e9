"""An agent of three turns and three tools, written for OpenAI's client.

    bash scripts/demo.sh recipes/tool_agent.py

`347+482~=` is answered by a thought and a call, `(347+482)347+482?`; `add` says `829`; `(829)829~?`
gives `928`; last is `(928)928`. The chat template drops thoughts from the history: every turn is a
segment, and what they have in common is forwarded once. Five to eight minutes on two cores.
Expected: from 30 to 75 % held out, sampled.
"""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

from openai import OpenAI

from recipes import openai_agent, tiny

NAMES = {"+": "add", "-": "subtract", "~": "mirror"}
PARAMETERS = {"type": "object"}
FUNCTIONS = [{"name": name, "parameters": PARAMETERS} for name in NAMES.values()]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


@cache
def client() -> Any:
    """The client of all rollouts: making another takes longer than a rollout."""
    return OpenAI(api_key="none")


def parse_calls(text):
    """The thought of a reply, and its call."""
    found = re.fullmatch(r"(.*?)(\d+(?:([-+])\d+|(~)))\?", text)
    if not found:
        return text, []
    thought, expression, sign, tilde = found.groups()
    return thought, [(NAMES[sign or tilde], json.dumps({"of": expression}))]


def use(name, of):
    """A tool's word on an expression: `347+482` or `829~`."""
    left, _, right = re.split("([-+~])", of)
    if name == "mirror":
        return left[::-1]
    if name == "add":
        return str(int(left) + int(right))
    return str(int(left) - int(right))


def solve(base_url, prompt):
    """The usual loop, for three turns at most."""
    chat = client().with_options(base_url=base_url).chat.completions
    messages = [{"role": "user", "content": prompt.content}]
    for turn in range(3):
        reply = chat.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if turn == 2 or not message.tool_calls:
            return {"said": message.content.rpartition(")")[2]}

        (call,) = message.tool_calls
        said = use(call.function.name, **json.loads(call.function.arguments))
        messages.append(message.model_dump())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def right(completions, said, answer, **_):
    """1 where the last turn's words are the answer, else 0."""
    return [float(words == truth) for words, truth in zip(said, answer, strict=True)]


config = replace(
    tiny.config,
    model_id="outputs/agent/model",
    dataset_id="outputs/agent/train.jsonl",
    no_apply_chat_template=False,
    eval_dataset_id="outputs/agent/heldout.jsonl",
    eval_temperature=1.0,
    reward_funcs=[right],
    max_completion_len=20,
    rollout_fn=openai_agent.trained(solve, max_len=100, parse_calls=parse_calls),
    batch_size=32,
    max_steps=60,
    learning_rate=2e-4,
    eval_steps=20,
    output_dir="outputs/agent/run",
)
