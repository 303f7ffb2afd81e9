"""`recipes/openai_agent.py` through the `openai` client: what an agent saw and sampled, each token once."""

import asyncio
import json
import socket
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from documents import DOCUMENTS, blocks
from fake_server import fake_server
from test_turns import TOOLS, ids_of, tokenizer_of

openai = pytest.importorskip("openai", reason="comes with vLLM")

from config import TrainConfig, UserError
from recipes.openai_agent import hermes_calls, trained
from rollouts.custom import fill_by_rollout_fn
from rollouts.data import make_prompt
from rollouts.group import Group, Prompt, version_spans
from vllm_client import Server, ServerLost

SAMPLING = {"n": 1, "max_tokens": 200, "temperature": 1.0}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("Qwen3")


@pytest.fixture
def scripted(models, tokenizer):
    """A rollout server that says what `replies` has for the last line of a prompt, and remembers what it was asked."""
    end = tokenizer.eos_token_id

    def answer(prompt_ids, number):
        said.asked.append(prompt_ids)
        text = tokenizer.decode(prompt_ids)
        asked = text.rpartition("\n<|im_start|>")[0] or text  # without the generation prompt
        reply = next(text_of for part, text_of in said.replies.items() if part in asked)
        ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
        return [*ids, end], said.seconds

    said = SimpleNamespace(asked=[], replies={}, seconds=0.0)
    with fake_server(models["tied"], answer, with_logprobs=False, max_model_len=10_000) as fake:
        said.server = Server(fake.url, 10, tokenizer)
        yield said


def run(scripted, agent, **more):
    """The segments of one rollout of an agent."""
    rollout_fn = trained(agent, **{"max_len": 5000, **more})
    (segments,) = rollout_fn(scripted.server, Prompt(0, [5], "2+3", {}), SAMPLING)
    return segments


def client_of(base_url, **options):
    return openai.OpenAI(base_url=base_url, api_key="none", **{"max_retries": 0, **options})


def ask(client, messages, **options):
    """The message that answers."""
    return (
        client.chat.completions.create(model="policy", messages=messages, **options)
        .choices[0]
        .message
    )


def user(text):
    return {"role": "user", "content": text}


def check(scripted, tokenizer, segments, replies):
    """Each reply stands in one segment, below just what the server was asked for it."""
    found = []
    for segment in segments:
        ids = [*segment.prompt_ids.tolist(), *segment.token_ids.tolist()]
        for _, first, last in version_spans(segment.weight_versions):
            start = len(segment.prompt_ids) + first
            assert ids[:start] in scripted.asked
            found.append(tokenizer.decode(ids[start : start + last - first]))
    assert sorted(found) == sorted(reply + "<|im_end|>" for reply in replies)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def calculator_loop(client, question, **options):
    """The usual loop: until no tool is called."""
    messages = [user(question)]
    while True:
        message = ask(client, messages, tools=TOOLS, **options)
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": str(numbers["a"] + numbers["b"]),
                }
            )


def test_what_a_row_gives_the_template_stands_below_what_a_request_gives(scripted, tokenizer):
    scripted.replies = {"hi": "yo", "again": "yes"}
    row = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    prompt = make_prompt(0, {"prompt": [user("hi")], **row}, tokenizer, TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=["os.path.exists"]
    ))  # fmt: skip

    def agent(url, prompt):
        client = client_of(url)
        ask(client, prompt.content)
        ask(client, [user("again")], extra_body={"chat_template_kwargs": {"enable_thinking": True}})

    trained(agent, max_len=5000)(scripted.server, prompt, SAMPLING)
    own, of_request = scripted.asked
    assert own == prompt.token_ids
    assert of_request == ids_of(tokenizer, [user("again")], tools=TOOLS, enable_thinking=True)


def test_a_loop_of_tools_is_one_segment(scripted, tokenizer):
    thought = "<think>\nI add\n</think>\n\n"
    scripted.replies = {"tool_response>\n5": "It is 5", "2+3": thought + CALL}
    agent = lambda url, prompt: {
        "right": calculator_loop(client_of(url), prompt.content) == "It is 5"
    }
    (segment,) = run(scripted, agent)
    check(scripted, tokenizer, [segment], [thought + CALL, "It is 5"])
    assert segment.finish_reason == "stop"
    assert segment.info["right"] is True
    messages = segment.info["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": {"a": 2, "b": 3},
    }
    # what the policy saw is what the template makes of the conversation
    raw = [messages[0], {"role": "assistant", "content": thought + CALL}, messages[2]]
    assert scripted.asked[1] == ids_of(tokenizer, raw, tools=TOOLS)
    whole = [*scripted.asked[1], *tokenizer("It is 5<|im_end|>")["input_ids"]]
    assert [*segment.prompt_ids, *segment.token_ids] == whole


def test_stripped_thinking_and_compaction_are_segments(scripted, tokenizer):
    """The template forgets the first thought; later the agent itself replaces its history by a summary."""
    first = "<think>\nhm\n</think>\n\nfour"
    scripted.replies = {"summary": "six", "really": "five", "2+3": first}

    def agent(url, prompt):
        client, messages = client_of(url), [user("2+3")]
        messages += [ask(client, messages).model_dump(), user("really?")]
        message = ask(client, messages)
        compacted = [{"role": "system", "content": f"summary: {message.content}"}, user("so?")]
        assert ask(client, compacted).content == "six"

    segments = run(scripted, agent)
    assert len(segments) == 3
    check(scripted, tokenizer, segments, [first, "five", "six"])
    assert "hm" not in tokenizer.decode(segments[1].prompt_ids)
    assert tokenizer.decode(segments[1].prompt_ids).count("four") == 1
    group = Group(Prompt(0, [5], "", {}))
    group.fill([segments])
    assert len(group.segments[0]) == 3
    assert group.completions[0].info["messages"][-1]["content"] == "six"


def test_two_agents_in_parallel(scripted, tokenizer):
    """They ask in turns, one of them the same as the other: every conversation is a segment of its own."""
    scripted.replies = {"agreed": "yes", "criticize": "bad", "plan": "do it"}
    barrier = threading.Barrier(2)

    def talk(client, first):
        messages = [user(first)]
        barrier.wait()
        messages += [ask(client, messages).model_dump(), user("agreed?")]
        barrier.wait()
        ask(client, messages)

    def agent(url, prompt):
        for questions in (("plan", "criticize"), ("plan", "plan")):
            threads = [
                threading.Thread(target=talk, args=(client_of(url), question))
                for question in questions
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    segments = run(scripted, agent)
    check(scripted, tokenizer, segments, ["do it", "bad", "do it", "do it", *["yes"] * 4])
    assert (
        len(segments) == 4
    )  # of replies that are alike, a conversation goes on from one that no other has taken


def test_a_lost_reply_trains_once(scripted, tokenizer):
    """A client that hears nothing in time asks again, and gets the reply that was sampled; one that gives up none."""
    scripted.replies = {"again": "three", "2+3": "five", "lost": "never heard"}
    scripted.seconds = 0.5

    def agent(url, prompt):
        address = urlsplit(url)
        body = json.dumps({"messages": [user("lost")]})
        with socket.create_connection((address.hostname, address.port)) as connection:
            head = f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
        client = client_of(url, timeout=0.2, max_retries=10)
        messages = [user("2+3")]
        messages += [ask(client, messages).model_dump(), user("again")]
        ask(client, messages)

    segments = run(scripted, agent)
    assert len(scripted.asked) == 3
    assert len(segments) == 1
    check(scripted, tokenizer, segments, ["five", "three"])


def test_what_is_not_the_same_conversation(scripted, tokenizer):
    """Other tools, another call, another question: segments of their own; an answer that was stripped goes on."""
    scripted.replies = {
        "again": "three",
        "tool_response>": "done",
        "2+3": " " + CALL,
        "q 1 2": " five ",
    }

    def count(change, tools=TOOLS):
        def agent(url, prompt):
            client, messages = client_of(url), [user("2+3")]
            messages.append(ask(client, messages, tools=TOOLS).model_dump())
            messages.append({"role": "tool", "tool_call_id": "x", "content": "5"})
            change(messages)
            ask(client, messages, **({"tools": tools} if tools else {}))

        return len(run(scripted, agent))

    assert count(lambda messages: None) == 1
    assert count(lambda messages: None, tools=None) == 2
    assert count(lambda messages: messages[0].update(content="2 +3")) == 2
    call = {"name": "add", "arguments": '{"a": 3, "b": 3}'}
    assert count(lambda messages: messages[1]["tool_calls"][0].update(function=call)) == 2

    def strips(url, prompt):
        client, messages = client_of(url), [user("q 1 2")]
        messages.append({"role": "assistant", "content": ask(client, messages).content.strip()})
        ask(client, [*messages, user("again")])

    assert len(run(scripted, strips)) == 1


def test_what_sampling_is_asked_for(scripted):
    """The run's parameters without its seed, and no more tokens than the run, the request and the room allow."""
    scripted.replies = {"": "yes"}
    asked, generate = [], scripted.server.generate

    def noted(ids, params):
        asked.append((params.pop("stop"), params, len(ids)))
        return generate(ids, params)

    def agent(url, prompt):
        for options in (
            {},
            {"max_tokens": 7},
            {"max_completion_tokens": 9},
            {"max_tokens": 1000},
            {"temperature": 0},
        ):
            ask(client_of(url), [user("2+3")], **options)

    scripted.server.generate = noted
    sampling = {**SAMPLING, "seed": 5, "top_k": 4, "stop": ["!"]}
    (segments,) = trained(agent, max_len=5000)(scripted.server, Prompt(0, [5], "", {}), sampling)
    assert len(segments) == 5
    assert [stop for stop, _, _ in asked] == [["!"]] * 5
    assert [params for _, params, _ in asked] == [
        {"n": 1, "max_tokens": most, "temperature": 1.0, "top_k": 4}
        for most in (200, 7, 9, 200, 200)
    ]
    asked.clear()
    trained(lambda url, prompt: ask(client_of(url), [user("2+3")]) and None, max_len=50)(
        scripted.server, Prompt(0, [5], "", {}), SAMPLING
    )
    assert asked[0][1]["max_tokens"] + asked[0][2] == 50


def test_a_question_asked_twice_is_a_branch(scripted, tokenizer):
    """The first reply trains in one segment, and stands in the prompt of the other."""
    scripted.replies = {"again": "three", "2+3": "five"}

    def agent(url, prompt):
        client, messages = client_of(url), [user("2+3")]
        messages += [ask(client, messages).model_dump(), user("again")]
        for _ in range(2):
            ask(client, messages)

    segments = run(scripted, agent)
    check(scripted, tokenizer, segments, ["five", "three", "three"])
    one, other = sorted(segments, key=lambda segment: len(segment.token_ids))
    assert [*one.prompt_ids, *one.token_ids] == [*other.prompt_ids, *other.token_ids]


def test_stop_words_are_missing_in_the_reply(scripted, tokenizer):
    """As OpenAI leaves them out; they were sampled, so they train, and stand in what the next turn sees."""
    scripted.replies = {"go on": "done", "2+3": "I look. Observation:"}
    asked = []

    def agent(url, prompt):
        client, messages = client_of(url), [user("2+3")]
        for stop in ("Observation:", ["x", "Observation:"]):
            message = ask(client, messages, stop=stop)
            assert message.content == "I look. "
        ask(client, [*messages, message.model_dump(), user("go on")])

    generate = scripted.server.generate

    def noted(ids, params):
        asked.append(params["stop"])
        return generate(ids, params)

    scripted.server.generate = noted
    segments = run(scripted, agent)
    assert asked == [["Observation:"], ["x", "Observation:"], []]
    check(scripted, tokenizer, segments, ["I look. Observation:", "I look. Observation:", "done"])
    assert len(segments) == 2


def test_a_turn_that_was_too_long_comes_again(scripted, tokenizer):
    """It is refused, and what goes on from there in other words still joins the turn before."""
    scripted.replies = {"short": "yes", "2+3": "no"}

    def agent(url, prompt):
        client, messages = client_of(url), [user("2+3")]
        messages.append(ask(client, messages).model_dump())
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
            ask(client, [*messages, user("long" * 100)])
        ask(client, [*messages, user("short")])

    (segment,) = run(scripted, agent, max_len=200)
    check(scripted, tokenizer, [segment], ["no", "yes"])


def test_the_last_answer_gives_the_messages(scripted, tokenizer):
    """Of two agents the one that asked first is answered last: its conversation is what rewards see."""
    scripted.replies = {"slow": "late", "quick": "early"}
    generate, first_is_in, second_is_out = (
        scripted.server.generate,
        threading.Event(),
        threading.Event(),
    )

    def in_turn(ids, params):
        if "slow" in tokenizer.decode(ids):
            first_is_in.set()
            second_is_out.wait(10)
        return generate(ids, params)

    def agent(url, prompt):
        slow = threading.Thread(target=lambda: ask(client_of(url), [user("slow")]))
        slow.start()
        first_is_in.wait(10)
        ask(client_of(url), [user("quick")])
        second_is_out.set()
        slow.join()

    scripted.server.generate = in_turn
    segments = run(scripted, agent)
    assert [message["content"] for message in segments[-1].info["messages"]] == ["slow", "late"]
    assert [segment.info for segment in segments[:-1]] == [{}]


def test_streams(scripted, tokenizer):
    scripted.replies = {"tool_response>\n5": "It is 5", "2+3": CALL}

    def agent(url, prompt):
        client = client_of(url)
        options = {"model": "policy", "messages": [user("2+3")], "tools": TOOLS}
        with client.chat.completions.stream(**options) as stream:
            final = stream.get_final_completion().choices[0]
        plain = client.chat.completions.create(**options).choices[0]
        assert final.finish_reason == plain.finish_reason == "tool_calls"
        (one,), (other,) = final.message.tool_calls, plain.message.tool_calls
        assert one.function.arguments == other.function.arguments
        chunks = list(
            client.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
        )
        assert chunks[-1].usage.completion_tokens == len(tokenizer(CALL)["input_ids"]) + 1
        assert client.models.list().data[0].id == "policy"

    check(scripted, tokenizer, run(scripted, agent), [CALL] * 3)


def test_what_an_agent_does_wrong(scripted):
    scripted.replies = {"": "yes"}

    def told(match, **options):
        def agent(url, prompt):
            with pytest.raises(openai.BadRequestError, match=match):
                ask(client_of(url), **{"messages": [user("2+3")], **options})
            assert requests.get(url.replace("/v1", "/v2"), timeout=5).ok
            assert requests.post(url, json={}, timeout=5).status_code == 404
            ask(client_of(url), [user("2+3")])

        assert len(run(scripted, agent, max_len=100)) == 1

    told("n=2 is not supported", n=2)
    told("context_length_exceeded: 1.. tokens, of max_len=100", messages=[user("2+3" * 50)])
    told(
        "a message has a part that is no text",
        messages=[{"role": "user", "content": [{"type": "image_url"}]}],
    )
    with pytest.raises(ValueError, match="the agent got no reply"):
        run(scripted, lambda url, prompt: None)
    broken: Any = trained(lambda url, prompt: {"": 1 / 0}, max_len=100)
    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=["os.path.exists"], rollout_fn=broken
    )
    with pytest.raises(
        UserError, match="rollout_fn on dataset row 0: ZeroDivisionError: division by zero"
    ):
        fill_by_rollout_fn(Group(Prompt(0, [5], "", {})), scripted.server, SAMPLING, config)


def test_a_rollout_fn_that_exits_has_failed(scripted):
    """As by any error: rank 0 alone would leave the run, and nothing would be saved."""
    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=["os.path.exists"],
        rollout_fn=lambda *_: sys.exit(3),
    )  # fmt: skip
    with pytest.raises(UserError, match="rollout_fn on dataset row 0: SystemExit: 3"):
        fill_by_rollout_fn(Group(Prompt(0, [5], "", {})), scripted.server, SAMPLING, config)


def test_an_agent_that_outgrows_its_room_is_cut(scripted, tokenizer):
    """It stays as it is, and raises; what it said until then trains, as cut."""
    scripted.replies = {"2+3": "five " * 20, "five": "more"}

    def talks_on(url, prompt):
        messages = [user("2+3")]
        while True:
            messages.append(ask(client_of(url), messages).model_dump())
            messages.append(user("five"))

    segments = run(scripted, talks_on, max_len=400)
    assert segments[-1].finish_reason == "length"
    assert sum(segment.loss_mask.sum().item() for segment in segments) > 20


def test_a_column_that_an_agent_gives_is_refused_at_the_start():
    rollout_fn = trained(lambda url, prompt: None, max_len=100)
    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=["os.path.exists"], rollout_fn=rollout_fn
    )
    with pytest.raises(ValueError, match="its column messages has the name of another argument"):
        make_prompt(0, {"prompt": "a", "messages": []}, None, config)


def test_agents_of_coroutines(scripted, tokenizer):
    """Two questions at a time, and columns for the rewards."""
    scripted.replies = {"2+3": "five"}

    async def agent(url, prompt):
        client = openai.AsyncOpenAI(base_url=url, api_key="none")
        ask = partial(client.chat.completions.create, model="policy", messages=[user("2+3")])
        answers = await asyncio.gather(ask(), ask())
        return {"said": [answer.choices[0].message.content for answer in answers]}

    segments = run(scripted, agent)
    check(scripted, tokenizer, segments, ["five", "five"])
    assert segments[-1].info["said"] == ["five", "five"]

    def returns_text(url, prompt):
        return ask(client_of(url), [user("2+3")]).content

    with pytest.raises(TypeError, match="the agent returned 'five': no dictionary of columns"):
        run(scripted, returns_text)


def test_a_lost_server_is_no_fault_of_the_agent(scripted):
    """The group is sampled again elsewhere, whatever the agent made of the error."""
    lost = Server("http://127.0.0.1:9", 1, scripted.server.tokenizer)

    def agent(url, prompt):
        started = time.monotonic()
        try:
            ask(client_of(url, max_retries=5), [user("2+3")])
        except openai.BadRequestError:
            assert time.monotonic() - started < 3

    with pytest.raises(ServerLost):
        trained(agent, max_len=100)(lost, Prompt(0, [5], "", {}), SAMPLING)


def test_the_documents_agents(scripted, tokenizer):
    """Those of docs/agents.md: a loop with a tool, segments, and turns joined or not."""
    loop, check_it, again = blocks("python", DOCUMENTS["docs/agents.md"])
    ran: dict[str, Any] = {}
    exec(loop + check_it + again, ran)
    call = CALL.replace("add", "length").replace('{"a": 2, "b": 3}', '{"of": "abc"}')
    scripted.replies = {
        "sure": "yes",
        "Is this right": "no",
        "tool_response>\n3": "It is 3",
        "abc": call,
    }
    prompt = Prompt(0, ids_of(tokenizer, [user("abc")]), "abc", {"question": "abc", "answer": "3"})
    (segments,) = ran["config"].rollout_fn(scripted.server, prompt, SAMPLING)
    check(scripted, tokenizer, segments, [call, "It is 3"])
    assert segments[-1].info["turns"] == 2
    assert ran["says_it"]([""], [segments[-1].info["messages"]], ["3"]) == [1.0]
    (segments,) = ran["answer_and_check"](scripted.server, prompt, SAMPLING)
    check(scripted, tokenizer, segments, [call, "no"])
    (joined,) = ran["ask_again"](scripted.server, prompt, SAMPLING)
    check(scripted, tokenizer, [joined], [call, "yes"])
    scripted.replies["abc"] = "<think>\nhm\n</think>\n\n5"
    (segments,) = ran["ask_again"](scripted.server, prompt, SAMPLING)
    check(scripted, tokenizer, segments, [scripted.replies["abc"], "yes"])


def test_calls_of_tools():
    words, calls = hermes_calls(f"I add. {CALL}\n{CALL}")
    assert words == "I add."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("add", {"a": 2, "b": 3})
    ] * 2
    broken = (
        "{broken}",
        '{"arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": null}',
    )
    for text in ("no call", *(f"<tool_call>\n{call}\n</tool_call>" for call in broken)):
        assert hermes_calls(text) == (text, [])
