"""The tokens between two turns, by the chat templates of five families."""

from pathlib import Path

import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes.turns import turn_ids

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MISTRAL = (  # of Mistral-7B-Instruct-v0.3, without its tools
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] "
    "+ '[/INST]' }}{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_SYSTEM = (  # the system prompt moves to the last user message, as in later versions
    "{{ bos_token }}{% for message in messages[1:] %}{% if message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if loop.last %}{{ messages[0]['content'] + '\n\n' }}{% endif %}{{ message['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FAMILIES = {  # template, end of a turn
    "Qwen3": (TEMPLATES / "qwen3.jinja", "<|im_end|>"), "Llama 3": (TEMPLATES / "llama3.jinja", "<|eot_id|>"),
    "Llama 3.1": (TEMPLATES / "llama3_1.jinja", "<|eot_id|>"), "Gemma": (TEMPLATES / "gemma.jinja", "<end_of_turn>"),
    "Gemma 3": (TEMPLATES / "gemma3.jinja", "<end_of_turn>"), "Mistral": (MISTRAL, "</s>"),
    "SmolLM": (SMOLLM, "<|im_end|>"),
}  # fmt: skip
MARKS = ["<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>"]
MARKS += ["[INST]", "[/INST]"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
HELLO = [{"role": "user", "content": "Hello there"}]
AGAIN = [{"role": "user", "content": "And again?"}]
TALK = [*HELLO, {"role": "assistant", "content": "one and all"}, *AGAIN]


def tokenizer_of(family, kind="bytes"):
    """Byte-level, or of words with a mark before each, at the beginning of a text or also behind special tokens."""
    template, end = FAMILIES[family]
    merges = [("h", "e"), ("l", "l"), ("a", "n"), ("an", "d")]
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "\n", "▁"]
    vocab = {token: number for number, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        backend.decoder = decoders.Metaspace(prepend_scheme=kind)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=end)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(tag) for tag in TAGS])
    tokenizer.chat_template = template.read_text() if isinstance(template, Path) else template
    return tokenizer


def ids_of(tokenizer, messages, **template):
    template |= {"tokenize": False, "add_generation_prompt": True}
    text = tokenizer.apply_chat_template(messages, **template)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def in_context(tokenizer, messages, reply, then):
    """Ids of a reply as the template's text has it, and of what follows: a text in one piece, cut."""
    prompt = ids_of(tokenizer, messages)
    whole = ids_of(tokenizer, [*messages, {"role": "assistant", "content": reply}, *then])
    assert whole[: len(prompt)] == prompt
    stop = whole.index(tokenizer.eos_token_id, len(prompt)) + 1
    return whole[len(prompt) : stop], whole[stop:]


@pytest.mark.parametrize("kind", ["bytes", "first", "always"])
@pytest.mark.parametrize("family", FAMILIES)
def test_as_in_one_piece(family, kind):
    """What follows a reply has the ids that it has when the template's whole text is tokenized."""
    tokenizer = tokenizer_of(family, kind)
    for messages, then in ((HELLO, AGAIN), (TALK, HELLO)):
        reply, expected = in_context(tokenizer, messages, "hello to all and all", then)
        assert turn_ids(tokenizer, messages, reply, then) == expected
        assert tokenizer.decode(expected).count(then[0]["content"]) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_no_sampled_token_is_tokenized_again(family):
    """Letters one by one, where the tokenizer would merge them, and white space that the template trims."""
    tokenizer = tokenizer_of(family)
    reply, expected = in_context(tokenizer, HELLO, "hello and all", AGAIN)
    ids, end = tokenizer.convert_tokens_to_ids, tokenizer.eos_token_id
    letters = ids([*"helloĠandĠall"])
    assert [*letters, end] != reply
    assert turn_ids(tokenizer, HELLO, [*letters, end], AGAIN) == expected
    spaced = [*ids(["Ġ", "Ċ"]), *letters, *ids(["Ċ", "Ċ"]), end]
    assert turn_ids(tokenizer, HELLO, spaced, AGAIN) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_that_was_cut_off_is_closed(family):
    """The end of its turn, which was not sampled, is the environment's."""
    tokenizer = tokenizer_of(family)
    reply, expected = in_context(tokenizer, HELLO, "hello", AGAIN)
    closed = [tokenizer.eos_token_id, *expected]
    assert turn_ids(tokenizer, HELLO, reply[:-1], AGAIN) == closed
    assert turn_ids(tokenizer, HELLO, [*reply[:-2], reply[-1]], AGAIN) == expected
    spaces = tokenizer.convert_tokens_to_ids(["Ċ", "Ċ"])  # which no template writes again
    assert turn_ids(tokenizer, HELLO, [*reply[:-1], *spaces], AGAIN) == closed


THOUGHT = "<think>\nlet me see\n</think>\n\nall"
NO_PARAMETERS = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": NO_PARAMETERS}}]


def test_stripped_thinking_is_a_new_segment():
    """Qwen3 forgets its thoughts when a user speaks, and keeps them while tools answer."""
    tokenizer = tokenizer_of("Qwen3")
    reply = tokenizer(THOUGHT + "<|im_end|>")["input_ids"]
    assert turn_ids(tokenizer, HELLO, reply, AGAIN) is None
    answer = [{"role": "tool", "content": "42"}]
    between = turn_ids(tokenizer, HELLO, reply, answer, tools=TOOLS) or []
    said = {"role": "assistant", "content": THOUGHT}
    whole = ids_of(tokenizer, [*HELLO, said, *answer], tools=TOOLS)
    assert [*ids_of(tokenizer, HELLO, tools=TOOLS), *reply, *between] == whole
    plain = tokenizer("all<|im_end|>")["input_ids"]
    assert turn_ids(tokenizer, HELLO, plain, AGAIN) is not None
    # an empty thought that the template writes for the first turn, and leaves out of the second's history
    assert turn_ids(tokenizer, HELLO, plain, AGAIN, enable_thinking=False) is None
    talk = [*HELLO, said, *answer]  # an earlier reply's
    assert turn_ids(tokenizer, talk, plain, answer) is not None
    assert turn_ids(tokenizer, talk, plain, AGAIN) is None


@pytest.mark.parametrize(
    ("family", "template", "before"),
    [
        ("SmolLM", "{{ messages | length }}" + SMOLLM, []),  # by as many letters as before
        ("Mistral", MISTRAL_SYSTEM, [{"role": "system", "content": "be short"}]),
    ],
)
def test_a_template_that_changes_the_beginning_gives_a_new_segment(family, template, before):
    tokenizer = tokenizer_of(family)
    tokenizer.chat_template = template
    reply = tokenizer(f"hello{FAMILIES[family][1]}")["input_ids"]
    assert turn_ids(tokenizer, [*before, *HELLO], reply, AGAIN) is None
