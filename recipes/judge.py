"""A language model as the judge, for answers that no function can check.

    vllm serve Qwen/Qwen3-8B --port 8001            # or another endpoint of OpenAI's protocol
    bash scripts/demo.sh recipes/judge.py

Others are named by JUDGE_URL and JUDGE_MODEL; JUDGE_REPLIES is the file of replies.

The rewards are coroutines: a group is judged side by side, within limits that hold for each of the
`reward_workers`. OpenAI's client repeats what fails, after growing pauses; a key is read from
OPENAI_API_KEY. Graded replies are kept in a file. A completion without a grade has no reward.
"""

import asyncio
import os
import re
import sqlite3
from functools import cache
from pathlib import Path

import openai

from config import TrainConfig

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8001/v1")
MODEL = os.environ.get("JUDGE_MODEL", "Qwen/Qwen3-8B")
REPLIES = Path(os.environ.get("JUDGE_REPLIES", "outputs/judge/replies.sqlite"))
AT_ONCE = 16  # requests of a worker; there are 4 workers unless `reward_workers` is set
PER_SECOND = 20.0  # requests that a worker begins
RETRIES = 8  # of a request, about 35 seconds in all
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
    asked = [
        ask(GRADE.format(prompt=prompt, text=text), grade_in)
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    return await asyncio.gather(*asked)


def grade_in(reply):
    """The grade that a reply is, as `7` or `7/10`, divided by 10; None for anything else."""
    found = re.fullmatch(r"(\d+)(?:\s*/\s*10)?\.?", without_thoughts(reply))
    return int(found[1]) / 10 if found and int(found[1]) <= 10 else None


async def preferred(prompts, completions, completion, **_):
    """The share of comparisons with the data set's `completion` that are won.

    Two each, as judges favour a place: one with the completion first, one with it last.
    """
    asked = []
    for prompt, text, other in zip(prompts, completions, completion, strict=True):
        asked.append(ask(COMPARE.format(prompt=prompt, first=text, second=other), letter_in))
        asked.append(ask(COMPARE.format(prompt=prompt, first=other, second=text), letter_in))
    letters = await asyncio.gather(*asked)

    rewards: list[float | None] = []
    for when_first, when_last in zip(letters[::2], letters[1::2], strict=True):
        if when_first is None or when_last is None:
            rewards.append(None)
            continue
        wins = (when_first == "A") + (when_last == "B")
        rewards.append(wins / 2)
    return rewards


def letter_in(reply):
    """The letter that a reply is, A or B; None for anything else."""
    found = re.fullmatch(r"\W*([AB])\W*", without_thoughts(reply))
    return found[1] if found else None


def without_thoughts(reply):
    """A reply from the end of its thoughts on."""
    return reply.rpartition("</think>")[2].strip()


# -- Asking ----------------------------------------------------------------------------------------
# What is cached here is made in the worker: neither a client nor a database can be sent to one.


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
    key = os.environ.get("OPENAI_API_KEY", "none")
    return openai.AsyncOpenAI(base_url=URL, api_key=key, max_retries=RETRIES, timeout=120)


@cache
def limits():
    """The pace of this worker, and its places."""
    return Pace(PER_SECOND), asyncio.Semaphore(AT_ONCE)


@cache
def under_way():
    """The questions that are being asked, by their key."""
    return {}


@cache
def database():
    """The replies until now, by their key; all workers share the file."""
    REPLIES.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(REPLIES, timeout=60, isolation_level=None)
    connection.execute("create table if not exists replies (key text primary key, reply text)")
    return connection


async def ask(question, parse):
    """What `parse` finds in the judge's reply; replies in which it finds nothing are not kept."""
    key = f"{URL}\n{MODEL}\n{question}"
    known = database().execute("select reply from replies where key = ?", [key]).fetchone()
    if known:
        return parse(known[0])

    if key not in under_way():  # equal completions are asked once
        under_way()[key] = asyncio.ensure_future(request(question))
    try:
        reply = await under_way()[key]
    finally:
        under_way().pop(key, None)
    found = parse(reply)
    if found is not None:
        database().execute("insert or replace into replies values (?, ?)", [key, reply])
    return found


async def request(question):
    """The judge's reply, within the limits."""
    pace, places = limits()
    async with places:
        await pace.turn()
        try:
            answer = await client().chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": question}], temperature=0
            )
        except openai.APIConnectionError as error:
            raise ConnectionError(f"the judge at JUDGE_URL={URL} does not answer") from error
    return answer.choices[0].message.content or ""


config = TrainConfig(
    model_id="Qwen/Qwen2.5-1.5B-Instruct",
    dataset_id="trl-lib/tldr",  # posts as `prompt`, and people's summaries as `completion`
    eval_dataset_id="trl-lib/tldr::validation[:100]",
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
