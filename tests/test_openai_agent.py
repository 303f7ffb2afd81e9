"""`recipes/openai_agent.py` through the `openai` client: what an agent saw and sampled, each token once."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import requests
import torch
from documents import DOCUMENTS, blocks
from some_rewards import only_first
from test_config import make as make_config
from test_templates import user
from test_turns import TOOLS, ids_of, tokenizer_of

openai = pytest.importorskip("openai", reason="comes with vLLM")

from recipes.openai_agent import hermes_calls, trained
from rollouts.data import make_prompt
from rollouts.group import ENVIRONMENT, Completion, Group, Prompt, version_spans
from rollouts.scoring import check_rewards
from vllm_client import Server, ServerLost

SAMPLING = {"n": 1, "max_tokens": 200, "temperature": 1.0}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("Qwen3")


class Scripted:
    """A rollout server that says what `replies` has for the last line of a prompt.

    It remembers the prompts that it was `asked`, and the `params` of sampling.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.replies: dict[str, str] = {}
        self.asked: list[list[int]] = []
        self.params: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.goes_on = threading.Event()  # before the seconds are over

    def generate(self, prompt, params):
        ids = torch.as_tensor(prompt).tolist()
        self.asked.append(ids)
        self.params.append(params)
        text = self.tokenizer.decode(ids)
        asked = text.rpartition("\n<|im_start|>")[0] or text  # without the generation prompt
        reply = next(reply for part, reply in self.replies.items() if part in asked)
        self.goes_on.wait(self.seconds)
        said = self.tokenizer(reply + "<|im_end|>")["input_ids"]
        return [Completion(said, [-1.0] * len(said), "stop", 0, prompt_ids=ids)]


@pytest.fixture
def scripted(tokenizer):
    return Scripted(tokenizer)


def run(server, agent, sampling=SAMPLING, max_len=5000, prompt=None, rollout_fn=None):
    """The segments of one rollout of an agent."""
    rollout_fn = rollout_fn or trained(agent, max_len=max_len)
    (segments,) = rollout_fn(server, prompt or Prompt(0, [5], "2+3", {}), sampling)
    return segments if isinstance(segments, list) else [segments]


class Talk:
    """A conversation of an agent: each question is asked below all before it."""

    def __init__(self, url, max_retries=0, timeout=None):
        self.client = openai.OpenAI(
            base_url=url, api_key="none", max_retries=max_retries, timeout=timeout
        )
        self.messages: list[Any] = []

    def answer(self, messages, **options):
        create = self.client.chat.completions.create
        return create(model="policy", messages=messages, **options).choices[0].message

    def ask(self, text, **options):
        asked = [*self.messages, user(text)]
        message = self.answer(asked, **options)
        self.messages = [*asked, message.model_dump()]
        return message.content


def check(scripted, agent, replies, num_segments, **options):
    """The segments of a rollout: each reply stands in one, below just what the server was asked for it."""
    segments = run(scripted, agent, **options)
    assert len(segments) == num_segments
    found = []
    for segment in segments:
        ids = [*segment.prompt_ids.tolist(), *segment.token_ids.tolist()]
        for _, first, last in version_spans(segment.weight_versions):
            start = len(segment.prompt_ids) + first
            assert ids[:start] in scripted.asked
            found.append(scripted.tokenizer.decode(ids[start : start + last - first]))
    assert sorted(found) == sorted(reply + "<|im_end|>" for reply in replies)
    return segments


def test_what_a_row_gives_the_template_stands_below_what_a_request_gives(scripted, tokenizer):
    scripted.replies = {"hi": "yo", "again": "yes"}
    row = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    prompt = make_prompt(0, {"prompt": [user("hi")], **row}, tokenizer, make_config())
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}

    def agent(url, prompt):
        Talk(url).answer(prompt.content)
        Talk(url).answer([user("again")], extra_body=thinks)

    run(scripted, agent, prompt=prompt)
    own, of_request = scripted.asked
    assert own == prompt.token_ids
    assert of_request == ids_of(tokenizer, [user("again")], tools=TOOLS, enable_thinking=True)


@pytest.fixture(scope="module")
def documents():
    """What docs/agents.md defines."""
    ran: dict[str, Any] = {}
    exec("".join(blocks("python", DOCUMENTS["docs/agents.md"])), ran)
    return ran


LENGTH = CALL.replace("add", "length").replace('{"a": 2, "b": 3}', '{"of": "abc"}')
ABC = {"question": "abc", "answer": "3"}


def test_a_loop_of_tools_is_one_segment(scripted, tokenizer, documents):
    """The documents' own."""
    thought = "<think>\nI count\n</think>\n\n"
    scripted.replies = {"tool_response>\n3": "It is 3", "abc": thought + LENGTH}
    fields = {"rollout_fn": documents["config"].rollout_fn, "prompt": Prompt(0, [5], "", ABC)}
    (segment,) = check(scripted, None, [thought + LENGTH, "It is 3"], 1, **fields)
    assert segment.finish_reason == "stop"
    assert segment.info["turns"] == 2
    messages = segment.info["messages"]
    assert documents["says_it"]([""], [messages], ["3"]) == [1.0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    function = {"name": "length", "arguments": {"of": "abc"}}
    assert messages[1]["tool_calls"][0]["function"] == function
    # What the policy saw is what the template makes of the conversation.
    raw = [messages[0], {"role": "assistant", "content": thought + LENGTH}, messages[2]]
    assert scripted.asked[1] == ids_of(tokenizer, raw, tools=documents["TOOLS"])
    whole = [*scripted.asked[1], *tokenizer("It is 3<|im_end|>")["input_ids"]]
    assert [*segment.prompt_ids, *segment.token_ids] == whole


@pytest.mark.parametrize(
    ("rollout_fn", "first", "second", "num_segments"),
    [
        ("answer_and_check", LENGTH, "no", 2),
        ("ask_again", LENGTH, "yes", 1),
        ("ask_again", "<think>\nhm\n</think>\n\n5", "yes", 2),
    ],
)
def test_turns_of_the_documents(
    scripted, tokenizer, documents, rollout_fn, first, second, num_segments
):
    """Segments, and turns that are joined or not."""
    scripted.replies = {"sure": "yes", "Is this right": "no", "abc": first}
    prompt = Prompt(0, ids_of(tokenizer, [user("abc")]), "abc", ABC)
    fields = {"rollout_fn": documents[rollout_fn], "prompt": prompt}
    check(scripted, None, [first, second], num_segments, **fields)


def test_stripped_thinking_and_compaction_are_segments(scripted, tokenizer):
    """The template forgets the first thought; later the agent itself replaces its history by a summary."""
    first = "<think>\nhm\n</think>\n\nfour"
    scripted.replies = {"summary": "six", "really": "five", "2+3": first}

    def agent(url, prompt):
        talk = Talk(url)
        talk.ask("2+3")
        talk.messages = [{"role": "system", "content": f"summary: {talk.ask('really?')}"}]
        assert talk.ask("so?") == "six"

    segments = check(scripted, agent, [first, "five", "six"], 3)
    second_prompt = tokenizer.decode(segments[1].prompt_ids)
    assert "hm" not in second_prompt
    assert second_prompt.count("four") == 1
    group = Group(Prompt(0, [5], "", {}))
    group.set_rollouts([segments])
    assert len(group.segments[0]) == 3
    assert group.completions[0].info["messages"][-1]["content"] == "six"


def test_two_agents_in_parallel(scripted):
    """They ask in turns, one of them the same as the other: every conversation is a segment of its own."""
    scripted.replies = {"agreed": "yes", "criticize": "bad", "plan": "do it"}
    barrier = threading.Barrier(2)

    def converse(url, question):
        talk = Talk(url)
        for text in (question, "agreed?"):
            barrier.wait()
            talk.ask(text)

    def agent(url, prompt):
        for questions in (("plan", "criticize"), ("plan", "plan")):
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(partial(converse, url), questions))

    # Of replies that are alike, a conversation goes on from one that no other has taken.
    check(scripted, agent, ["do it", "bad", "do it", "do it", *["yes"] * 4], 4)


def test_a_lost_reply_trains_once(scripted):
    """A client that hears nothing in time asks again, and gets the reply that was sampled; one that gives up none."""
    scripted.replies = {"again": "three", "2+3": "five", "lost": "never heard"}
    scripted.seconds = 60

    def agent(url, prompt):
        with pytest.raises(openai.APITimeoutError):
            Talk(url, timeout=0.2).ask("lost")
        scripted.goes_on.set()
        scripted.goes_on, scripted.seconds = threading.Event(), 0.5
        talk = Talk(url, timeout=0.2, max_retries=10)
        talk.ask("2+3")
        talk.ask("again")

    check(scripted, agent, ["five", "three"], 1)
    assert len(scripted.asked) == 3


@pytest.mark.parametrize(
    ("changes", "tools", "num_segments"),
    [
        ({}, {"tools": TOOLS}, 1),
        ({}, {}, 2),
        ({"question": "2 +3"}, {"tools": TOOLS}, 2),
        ({"arguments": '{"a": 3, "b": 3}'}, {"tools": TOOLS}, 2),
    ],
)
def test_what_is_not_the_same_conversation(scripted, changes, tools, num_segments):
    """Other tools, another question, another call."""
    scripted.replies = {"tool_response>": "done", "2+3": " " + CALL}

    def agent(url, prompt):
        talk = Talk(url)
        talk.ask("2+3", tools=TOOLS)
        question, answer = talk.messages
        question["content"] = changes.get("question", "2+3")
        function = answer["tool_calls"][0]["function"]
        function["arguments"] = changes.get("arguments", function["arguments"])
        result = {"role": "tool", "tool_call_id": "x", "content": "5"}
        talk.answer([question, answer, result], **tools)

    check(scripted, agent, [" " + CALL, "done"], num_segments)


def test_a_question_asked_twice_is_a_branch(scripted):
    """The first reply trains in one segment, and stands in the prompt of the other."""
    scripted.replies = {"again": "three", "2+3": "five"}

    def agent(url, prompt):
        talk = Talk(url)
        talk.ask("2+3")
        for _ in range(2):
            talk.answer([*talk.messages, user("again")])

    segments = check(scripted, agent, ["five", "three", "three"], 2)
    one, other = sorted(segments, key=lambda segment: len(segment.token_ids))
    assert [*one.prompt_ids, *one.token_ids] == [*other.prompt_ids, *other.token_ids]


def test_a_turn_that_was_too_long_comes_again(scripted):
    """It is refused; what goes on from there, below a stripped answer, joins the turn before."""
    scripted.replies = {"short": "yes", "2+3": " no "}

    def agent(url, prompt):
        talk = Talk(url)
        talk.ask("2+3")
        talk.messages[-1] = {"role": "assistant", "content": "no"}
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
            talk.ask("long" * 100)
        talk.ask("short")

    check(scripted, agent, [" no ", "yes"], 1, max_len=200)


def test_an_agent_that_outgrows_its_room_is_cut(scripted):
    """It stays as it is, and raises; what it said until then trains, as cut."""
    scripted.replies = {"2+3": "five " * 20, "five": "more"}

    def agent(url, prompt):
        talk = Talk(url)
        talk.ask("2+3")
        while True:
            talk.ask("five")

    segments = run(scripted, agent, max_len=400)
    assert segments[-1].finish_reason == "length"
    assert sum((segment.weight_versions != ENVIRONMENT).sum().item() for segment in segments) > 20


@pytest.mark.parametrize(
    ("options", "max_len", "most"),
    [
        ({}, 5000, 200),
        ({"max_tokens": 7}, 5000, 7),
        ({"max_completion_tokens": 9}, 5000, 9),
        ({"max_tokens": 1000}, 5000, 200),
        ({"temperature": 0}, 5000, 200),
        ({}, 50, None),  # what the prompt leaves
    ],
)
def test_what_sampling_is_asked_for(scripted, options, max_len, most):
    """The run's parameters without its seed, and no more tokens than the run, the request and the room allow."""
    scripted.replies = {"": "yes"}
    sampling = {**SAMPLING, "seed": 5, "top_k": 4, "stop": ["!"]}
    run(scripted, lambda url, prompt: Talk(url).ask("2+3", **options) and None, sampling, max_len)
    most = most or max_len - len(scripted.asked[0])
    expected = {"n": 1, "max_tokens": most, "temperature": 1.0, "top_k": 4, "stop": ["!"]}
    assert scripted.params == [expected]


def test_stop_words_are_missing_in_the_reply(scripted):
    """As OpenAI leaves them out; they were sampled, so they train, and stand in what the next turn sees."""
    scripted.replies = {"go on": "done", "2+3": "I look. Observation:"}
    stops = ["Observation:"], ["x", "Observation:"]

    def agent(url, prompt):
        talks = Talk(url), Talk(url)
        for talk, stop in zip(talks, stops, strict=True):
            assert talk.ask("2+3", stop=stop if stop[1:] else stop[0]) == "I look. "
        talks[1].ask("go on")

    check(scripted, agent, ["I look. Observation:", "I look. Observation:", "done"], 2)
    assert [params["stop"] for params in scripted.params] == [*stops, []]


def test_the_last_answer_gives_the_messages(scripted):
    """Of two agents the one that asked first is answered last: its conversation is what rewards see."""
    scripted.replies = {"slow": "late", "quick": "early"}
    generate = scripted.generate

    def agent(url, prompt):
        def quick_first(ids, params):
            scripted.generate = generate
            Talk(url).ask("quick")
            return generate(ids, params)

        scripted.generate = quick_first
        Talk(url).ask("slow")

    segments = run(scripted, agent)
    assert [message["content"] for message in segments[-1].info["messages"]] == ["slow", "late"]
    assert [segment.info for segment in segments[:-1]] == [{}]


def test_streams(scripted, tokenizer):
    scripted.replies = {"2+3": CALL}
    asked = {"model": "policy", "messages": [user("2+3")], "tools": TOOLS}

    def agent(url, prompt):
        client = Talk(url).client
        create = partial(client.chat.completions.create, **asked)
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        plain = create().choices[0]
        assert final.finish_reason == plain.finish_reason == "tool_calls"
        (one,), (other,) = final.message.tool_calls, plain.message.tool_calls
        assert one.function.arguments == other.function.arguments
        *_, last = create(stream=True, stream_options={"include_usage": True})
        assert last.usage.completion_tokens == len(tokenizer(CALL)["input_ids"]) + 1
        assert client.models.list().data[0].id == "policy"

    check(scripted, agent, [CALL] * 3, 3)


def test_agents_of_coroutines(scripted):
    """Two questions at a time, and columns for the rewards."""
    scripted.replies = {"2+3": "five"}

    async def agent(url, prompt):
        client = openai.AsyncOpenAI(base_url=url, api_key="none")
        ask = partial(client.chat.completions.create, model="policy", messages=[user("2+3")])
        answers = await asyncio.gather(ask(), ask())
        return {"said": [answer.choices[0].message.content for answer in answers]}

    assert check(scripted, agent, ["five", "five"], 2)[-1].info["said"] == ["five", "five"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n=2 is not supported"),
        ({"messages": [user("2+3" * 50)]}, "context_length_exceeded: 1.. tokens, of max_len=100"),
        ({"messages": [user([{"type": "image_url"}])]}, "a message has a part that is no text"),
    ],
)
def test_requests_that_are_refused(scripted, options, message):
    """They end neither the loopback nor the rollout."""
    scripted.replies = {"": "yes"}

    def agent(url, prompt):
        with pytest.raises(openai.BadRequestError, match=message):
            Talk(url).answer(**{"messages": [user("2+3")], **options})
        assert requests.get(url.replace("/v1", "/v2"), timeout=60).ok
        assert requests.post(url, json={}, timeout=60).status_code == 404
        Talk(url).ask("2+3")

    assert len(run(scripted, agent, max_len=100)) == 1


def test_what_an_agent_hands_back(scripted):
    """Columns for the rewards, known at the start: a dataset's of that name is refused."""
    with pytest.raises(ValueError, match="the agent got no reply"):
        run(scripted, lambda *_: None)
    scripted.replies = {"2+3": "five"}
    answers = trained(lambda url, prompt: Talk(url).ask("2+3"), max_len=5000)
    with pytest.raises(TypeError, match="the agent returned 'five': no dictionary of columns"):
        run(scripted, None, rollout_fn=answers)
    config = make_config(rollout_fn=answers, reward_funcs=[only_first])
    with pytest.raises(ValueError, match="multiple values for keyword argument 'messages'"):
        check_rewards([Prompt(0, [5], "a", {"messages": []})], config)


def test_a_lost_server_is_no_fault_of_the_agent(tokenizer):
    """The group is sampled again elsewhere, whatever the agent made of the error."""

    def agent(url, prompt):
        started_s = time.monotonic()
        with pytest.raises(openai.BadRequestError):
            Talk(url, max_retries=5).ask("2+3")
        assert time.monotonic() - started_s < 10  # five more times took 11 s and more

    with pytest.raises(ServerLost):
        run(Server("http://127.0.0.1:9", 1, tokenizer), agent, max_len=100)


def test_calls_of_tools():
    words, calls = hermes_calls(f"I add. {CALL}\n{CALL}")
    assert words == "I add."
    found = [(name, json.loads(arguments)) for name, arguments in calls]
    assert found == [("add", {"a": 2, "b": 3})] * 2
    broken = ["{broken}", '{"arguments": {}}']
    broken += [f'{{"name": "add", "arguments": {arguments}}}' for arguments in ("[1]", "null")]
    for text in ("no call", *(f"<tool_call>\n{call}\n</tool_call>" for call in broken)):
        assert hermes_calls(text) == (text, [])
