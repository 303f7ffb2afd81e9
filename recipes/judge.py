"""A language model as the judge, for answers that no function can check.

    vllm serve Qwen/Qwen3-8B --port 8001            # or another endpoint of OpenAI's protocol
    bash scripts/demo.sh recipes/judge.py

The environment has JUDGE_URL and JUDGE_MODEL, where they are others.

The rewards are coroutines: a group is judged side by side, within the limits below, each of them
for one of the `reward_workers`. OpenAI's client repeats what fails (429, 5xx, time-outs), after
growing pauses; a key is read from OPENAI_API_KEY. Replies are kept in a file, so that nothing is
asked twice, nor by a resumed run. A completion that the judge does not grade has no reward.
"""

import asyncio
import os
import re
import sqlite3
from functools import cache
from pathlib import Path

from config import TrainConfig

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8001/v1")
MODEL = os.environ.get("JUDGE_MODEL", "Qwen/Qwen3-8B")
REPLIES = Path(os.environ.get("JUDGE_REPLIES", "outputs/judge/replies.sqlite"))
AT_ONCE = 16  # requests
PER_SECOND = 20.0  # requests that begin
GRADE = """Here is a post, and a summary of it.

<post>
{prompt}
</post>

<summary>
{text}
</summary>

Does the summary say what matters, truthfully and briefly?
Reply with a grade from 0 to 10, and nothing else."""
COMPARE = """Here is a post, and two summaries of it.

<post>
{prompt}
</post>

<summary id="A">
{first}
</summary>

<summary id="B">
{second}
</summary>

Which says better, truthfully and briefly, what matters? Reply with A or B, and nothing else."""


async def graded(prompts, completions, **_):
    """A tenth of the judge's grade, which is from 0 to 10; None without one."""
    questions = [
        GRADE.format(prompt=prompt, text=text)
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    replies = await asyncio.gather(*map(ask, questions))
    return [grade_in(reply) for reply in replies]


def grade_in(reply):
    """The last whole number of a reply, from 0 to 10, over 10; else None."""
    numbers = [int(number) for number in re.findall(r"\b\d+\b", reply)]
    return numbers[-1] / 10 if numbers and numbers[-1] <= 10 else None


async def preferred(prompts, completions, completion, **_):
    """The share of comparisons with the data set's `completion` that are won.

    Two each, as judges favour a place: one with the completion first, one with it last.
    """
    questions = []
    for prompt, text, other in zip(prompts, completions, completion, strict=True):
        questions.append(COMPARE.format(prompt=prompt, first=text, second=other))
        questions.append(COMPARE.format(prompt=prompt, first=other, second=text))
    letters = [letter_in(reply) for reply in await asyncio.gather(*map(ask, questions))]

    rewards = []
    for when_first, when_last in zip(letters[::2], letters[1::2], strict=True):
        is_judged = when_first and when_last
        wins = (when_first == "A") + (when_last == "B")
        rewards.append(wins / 2 if is_judged else None)
    return rewards


def letter_in(reply):
    """The last A or B that stands alone in a reply, or None."""
    letters = re.findall(r"\b[AB]\b", reply)
    return letters[-1] if letters else None


# -- Asking ----------------------------------------------------------------------------------------


class Pace:
    """Lets `per_second` requests begin, at even distances."""

    def __init__(self, per_second):
        self.distance_s = 1 / per_second
        self.next_s = 0.0

    async def turn(self):
        """Wait for one's turn."""
        now_s = asyncio.get_running_loop().time()
        at_s = max(self.next_s, now_s)
        self.next_s = at_s + self.distance_s
        await asyncio.sleep(at_s - now_s)


@cache
def client():
    """The client of this worker."""
    from openai import AsyncOpenAI

    key = os.environ.get("OPENAI_API_KEY", "none")
    return AsyncOpenAI(base_url=URL, api_key=key, max_retries=8, timeout=120)


@cache
def limits():
    """The pace of this worker, and its places."""
    return Pace(PER_SECOND), asyncio.Semaphore(AT_ONCE)


@cache
def replies():
    """The replies until now, by model and question; all workers share the file."""
    REPLIES.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(REPLIES, timeout=60, isolation_level=None)
    database.execute("create table if not exists replies (question text primary key, reply text)")
    return database


async def ask(question):
    """The judge's reply."""
    key = f"{MODEL}\n{question}"
    known = replies().execute("select reply from replies where question = ?", [key]).fetchone()
    if known:
        return known[0]

    pace, places = limits()
    async with places:
        await pace.turn()
        answer = await client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": question}], temperature=0
        )
    reply = answer.choices[0].message.content or ""
    replies().execute("insert or replace into replies values (?, ?)", [key, reply])
    return reply


config = TrainConfig(
    model_id="Qwen/Qwen2.5-1.5B-Instruct",
    dataset_id="trl-lib/tldr",  # posts as `prompt`, and people's summaries as `completion`
    eval_dataset_id="trl-lib/tldr",
    eval_dataset_split="validation[:100]",
    reward_funcs=[graded],  # or `preferred`
    reward_timeout=600.0,
    num_generations=8,
    max_completion_len=128,
    batch_size=32,
    max_steps=200,
    learning_rate=1e-6,
    eval_steps=20,
    output_dir="outputs/judge/run",
)
