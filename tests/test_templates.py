"""From messages to token ids: parts, nulls, prefills, and what tokenizers add to beginnings and ends."""

import json
from functools import partial
from typing import Any

import pytest
from datasets import Dataset
from helpers import CHAT_TEMPLATE, make_tokenizer
from some_rewards import only_first
from test_data import make_config, prompts_of
from test_turns import TEMPLATES, tokenizer_of
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from transformers import PreTrainedTokenizerFast

from config import UserError
from recipes.turns import turn_ids
from rollouts.data import load_sets, make_prompt
from rollouts.processor import as_text, hold_date

QWEN = (TEMPLATES / "qwen3.jinja").read_text()
LLAMA = (  # whose real one, and Gemma's, trim, too
    "<bos>{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}~{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
DROPS_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def rendered(messages, template):
    text, _ = as_text(make_tokenizer(chat_template=template), messages, 0, make_config())
    return text


def user(content):
    return {"role": "user", "content": content}


def answer(content, *calls):
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}


def text_parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA, QWEN])
def test_parts_of_text_are_text(template):
    """Templates of text models show parts as nothing, as Qwen's, or as Python."""
    tokenizer = make_tokenizer(chat_template=template)
    rows = [{"prompt": [user("1+1=")]}, {"prompt": [user(text_parts("1+1="))]}]
    plain, parts = prompts_of(lambda: rows, tokenizer)
    assert parts.token_ids == plain.token_ids
    assert rendered([user(text_parts("a", "b"))], CHAT_TEMPLATE) == "<bos>[user]a\nb>"
    assert "None" not in rendered([user("a"), answer(None), user("b")], template)


CALLS = answer("x", {"function": {"name": "f", "arguments": {}}})
NO_CONTENT = [user(None), user([]), user(3), {"content": "a"}, {"role": None, "content": "a"}]
NO_TEXT = [{"type": "audio", "audio": "x"}, {"type": "video"}, {"type": "text"}, {"text": "x"}, "x"]
NO_PROMPTS = {
    "it has no `prompt`, a string or a list": [None, ("a", "b"), [], 3, {"role": "user"}],
    "it has a message without role or content": [["a"], *([message] for message in NO_CONTENT)],
    "a message with a part neither of type text": [[user([part])] for part in NO_TEXT],
    "its last message calls tools, or is its only one": [[answer("x")], [user("1+1="), CALLS]],
}


@pytest.mark.parametrize(("message", "prompts"), NO_PROMPTS.items())
def test_what_is_no_prompt_is_named(message, prompts):
    tokenizer = make_tokenizer(chat_template=LLAMA)
    for prompt in prompts:
        with pytest.raises(UserError, match=f"row 1: .*{message}"):
            prompts_of(partial(list, [{"prompt": "fine"}, {"prompt": prompt}]), tokenizer)


def test_a_message_that_the_template_leaves_out():
    brief = {"role": "system", "content": "Be brief."}
    for messages in ([brief, user("1+1=")], [user("2+2="), brief, user("1+1=")]):
        with pytest.raises(ValueError, match="shows nothing of its message 'Be brief.'"):
            rendered(messages, DROPS_SYSTEM)
    # A template for images may show one of two texts.
    first = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}"
    processor = make_tokenizer(chat_template=first)
    processor.image_processor = None
    with pytest.raises(ValueError, match="shows nothing of its message 'In a word.'"):
        as_text(processor, [user(text_parts("1+1=", "In a word."))], 0, make_config())
    # That a part of the text is left out, as a thought, is a template's right.
    talk = [user("1+1="), answer("<think>hm</think>2"), user("+1=")]
    assert "hm" not in rendered(talk, QWEN)


OPENS = QWEN + "{% if add_generation_prompt %}<think>\n{% endif %}"
PREFILLS = [
    *((QWEN, prefill, prefill) for prefill in ("<think>\n", "It is ", "\n\n", "</think>x", "")),
    (CHAT_TEMPLATE, "It is ", "It is "),
    (LLAMA, "It is ", "It is "),
    (LLAMA, "\n\n", "\n\n"),
    # A thought that the template has opened, as DeepSeek R1's and Qwen3-Thinking's, is there once.
    (OPENS, "<think>\n", ""),
    (OPENS, "<think>\nI see", "I see"),
    (OPENS, "<think>", "<think>"),
    (OPENS, "\n", "\n"),
]


@pytest.mark.parametrize(("template", "prefill", "goes_on"), PREFILLS)
def test_a_prefill_follows_as_it_is(template, prefill, goes_on):
    """Continuing it by the template, Qwen3 puts an empty thought before it, Llama and Gemma trim."""
    prompt = rendered([user("1+1=")], template)
    assert prompt.endswith("<think>\n") == (template == OPENS)
    for content in (prefill, text_parts(prefill)):
        assert rendered([user("1+1="), answer(content)], template) == prompt + goes_on


# -- What the template takes beside messages -----------------------------------------------------------

TAKES_MORE = (
    "{% if tools %}<{{ tools | tojson }}>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}(no thought){% endif %}{{ level }}"
)
SEARCH = {"type": "function", "function": {"name": "search"}}
OFF = {"enable_thinking": False}


def shown(row, template=TAKES_MORE, **fields):
    tokenizer = make_tokenizer(chat_template=template)
    (prompt,) = prompts_of(lambda: [row], tokenizer, max_prompt_len=1000, **fields)
    return tokenizer.decode(prompt.token_ids), prompt


@pytest.mark.parametrize("content", ["hi", [{"role": "user", "content": "hi"}]])
def test_tools_and_arguments_of_a_row_reach_its_template(content):
    row = {"prompt": content, "answer": "2", "tools": [SEARCH], "chat_template_kwargs": OFF}
    text, prompt = shown(row)
    assert text == f"<[{json.dumps(SEARCH)}]>[user]hi(no thought)"
    assert prompt.columns == {"answer": "2"}  # they are for the template
    assert prompt.template == {"tools": [SEARCH], **OFF}  # and for the turns that follow
    assert shown({**row, "tools": json.dumps([SEARCH])})[0] == text  # as tables have them
    _, asked_for = shown(row, extra_columns=["tools"])
    assert asked_for.columns == {"tools": [SEARCH]}
    empty: list[Any] = [None, [], {}]
    for nothing in empty:
        assert shown({**row, "tools": nothing, "chat_template_kwargs": nothing})[0] == "[user]hi"


def test_arguments_of_all_rows_stand_below_those_of_a_row():
    fields: dict[str, Any] = {"chat_template_kwargs": {**OFF, "level": "low"}}
    own = {"prompt": "hi", "chat_template_kwargs": {"enable_thinking": True}}
    sets = {"hard": lambda: [own, {"prompt": "hi"}]}
    config = make_config(eval_dataset_id=sets, reward_funcs=[only_first], **fields)
    tokenizer = make_tokenizer(chat_template=TAKES_MORE)
    found = load_sets("eval_dataset_id", "test", tokenizer, config)["hard"]
    texts = [tokenizer.decode(prompt.token_ids) for prompt in found]
    assert texts == ["[user]hilow", "[user]hi(no thought)low"]


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"tools": [SEARCH]}, {}),
        ({"chat_template_kwargs": OFF}, {}),
        ({}, {"chat_template_kwargs": OFF}),
    ],
)
def test_arguments_without_a_template_are_refused(row, fields):
    message = "row 0: no chat template reads its (tools|enable_thinking) here"
    unread: list[dict[str, Any]] = [{"template": None}, {"template": CHAT_TEMPLATE}]
    for without in (*unread, {"no_apply_chat_template": True}):
        with pytest.raises(UserError, match=message):
            shown({"prompt": "hi", **row}, **without, **fields)
    assert shown({"prompt": [user("hi")], **row}, no_apply_chat_template=True, **fields)[0]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("chat_template_kwargs", {"thinking": False}, "row 0: no chat template reads its thinking"),
        ("chat_template_kwargs", {"tokenize": True}, "no chat template reads its tokenize"),
        ("chat_template_kwargs", json.dumps(OFF), "row 0: its chat_template_kwargs must be"),
        ("tools", "search", "row 0: JSONDecodeError"),
        ("tools", [json.dumps(SEARCH)], "row 0: Tools should either be a JSON schema"),
        ("tools", SEARCH, "row 0: Tools should either be a JSON schema"),
    ],
)
def test_columns_that_the_template_does_not_take_are_refused(column, value, message):
    with pytest.raises(UserError, match=message) as refused:
        shown({"prompt": "hi", column: value})
    assert "\n" not in str(refused.value)


def test_arguments_that_parquet_adds_are_not_given(tmp_path):
    """Columns of one type have nulls for what other rows' calls, tools and arguments have."""

    def row(name, value, **arguments):
        function = {"name": "f", "arguments": {name: value}}
        asks = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        parameters = {"type": "object", "properties": {name: {"type": "string"}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        messages = [user("a"), asks, user("b")]
        return {"prompt": messages, "tools": [tool], "chat_template_kwargs": arguments, "other": {}}

    rows = [row("city", "Rome", enable_thinking=False), row("days", 3, level="low")]
    rows[0]["other"] = {"a": 1}
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    tokenizer = make_tokenizer(chat_template=TAKES_MORE)
    prompts = lambda source: prompts_of(source, tokenizer, max_prompt_len=1000)
    expected = prompts(lambda: rows)
    for found in (prompts(str(tmp_path / "a.parquet")), prompts(lambda: Dataset.from_list(rows))):
        assert [p.token_ids for p in found] == [p.token_ids for p in expected]
        assert [p.template for p in found] == [p.template for p in expected]
        assert found[1].columns == {"other": {"a": None}}  # of rewards, as the file has it
    assert '[assistant]{"city": "Rome"}[user]' in tokenizer.decode(expected[0].token_ids)

    rows[1]["prompt"][1]["tool_calls"][0]["function"]["arguments"]["days"] = None
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[1]))
    (null,) = prompts(str(tmp_path / "a.jsonl"))
    assert '{"days": null}' in tokenizer.decode(null.token_ids)  # as it was written


# -- The date ------------------------------------------------------------------------------------------

DATED = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}" + LLAMA


def test_the_date_of_prompts_and_turns_is_held(tmp_path):
    tokenizer = make_tokenizer(chat_template=DATED)
    hold_date(tokenizer, "2024-07-26T23:59:59")
    assert as_text(tokenizer, "hi", 0, make_config())[0].startswith("26 Jul 2024<bos>[user]hi")
    turn = [user("hi")]
    assert tokenizer.apply_chat_template(turn, tokenize=False).startswith("26 Jul 2024")
    reply = tokenizer("yo", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(turn_ids(tokenizer, turn, reply, turn)) == "~[user]hi~[assistant]"

    asked = as_text(tokenizer, "hi", 0, make_config(), date_string="1 May")
    assert asked[0].startswith("1 May<bos>[user]hi")
    tokenizer.save_pretrained(tmp_path)  # a checkpoint's template goes by its own day again
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert saved.chat_template == DATED
    assert not saved.apply_chat_template(turn, tokenize=False).startswith("26 Jul 2024")


# -- Beginnings and ends -----------------------------------------------------------------------------------------------

BOS, EOS, MARK = "<s>", "<|im_end|>", "[INST]"
BEGINNINGS = [  # what a tokenizer makes of a text, and what of it begins a prompt
    ("$A", []),
    (f"{BOS} $A", [BOS]),
    (f"$A {EOS}", []),
    (f"{BOS} $A {EOS}", [BOS]),
    (f"{MARK} {BOS} $A", [MARK, BOS]),
]


@pytest.mark.parametrize("kind", ["bytes", "first", "always"])
@pytest.mark.parametrize(("single", "beginning"), BEGINNINGS)
def test_beginnings_come_once_and_ends_never(kind, single, beginning):
    tokenizer = tokenizer_of("Qwen3", kind)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, EOS, MARK)]
    adds = TemplateProcessing(single=single, special_tokens=special)
    tokenizer._tokenizer.post_processor = Sequence([ByteLevel(), adds])  # as Llama 3's
    tokenizer.chat_template = None
    beginning = tokenizer.convert_tokens_to_ids(beginning)
    ids_of = lambda text: make_prompt(0, {"prompt": text}, tokenizer, make_config()).token_ids
    plain = tokenizer("1+1=", add_special_tokens=False)["input_ids"]
    assert ids_of("1+1=") == beginning + plain

    ids = ids_of(tokenizer.decode(beginning) + "1+1=")  # a text that has it already
    assert ids[: len(beginning)] == beginning
    assert tokenizer.bos_token_id not in ids[len(beginning) :]
    assert tokenizer.eos_token_id not in ids
    assert ids_of("") == beginning
    tokenizer.chat_template = "{{ messages[0].content }}"  # which writes it, where it is wanted
    assert ids_of("1+1=") == plain
