"""Ropes that take other factors for long texts: trainer and servers keep to texts for which both take the same."""

from dataclasses import replace
from typing import Any

import pytest
import test_prefix_models
import torch
import transformers
from doctor import examine
from fake_server import fake_server
from helpers import ROOT, VOCAB, answer_in, far_from_uniform, flags, make_tokenizer
from launch import parse, server_words
from transformers import AutoModelForCausalLM

from config import parse_args
from prefix_attention import completion_logprobs, pack, rope_limit
from recipes import plain_loop
from recipes.teacher import Teacher
from train import main
from vllm_client import ServerError

SIZES = test_prefix_models.SIZES | {"vocab_size": len(VOCAB), "hidden_size": 64}
THETA = {"rope_theta": 1e4}
LONG = [1 + 59 * (i / 7) ** 2 for i in range(8)]
LONGROPE = THETA | {
    "rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 8, "long_factor": LONG,
}  # fmt: skip
DYNAMIC = THETA | {"rope_type": "dynamic", "factor": 2.0}
YARN = THETA | {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BY_LAYER = {"full_attention": LONGROPE, "sliding_attention": THETA | {"rope_type": "default"}}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
PHI = {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE}

CHOOSE: list[Any] = [  # by a text's length: the config, and up to which length
    ("Phi3", PHI, 64),
    ("Llama", {"rope_parameters": LONGROPE}, 64),
    ("Llama", {"rope_parameters": DYNAMIC}, 128),
    ("Qwen2", {"rope_parameters": DYNAMIC, "max_position_embeddings": 100}, 100),
    ("Gemma3Text", {"rope_parameters": BY_LAYER, **LAYERS}, 64),
]
ANY = float("inf")  # where a rope does not choose
OTHERS = [THETA | {"rope_type": "default"}, THETA | {"rope_type": "linear", "factor": 4.0}, YARN]
ROPES = CHOOSE + [("Llama", {"rope_parameters": rope}, ANY) for rope in (*OTHERS, LLAMA3)]


def build(kind, fields):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **fields})
    return far_from_uniform(AutoModelForCausalLM.from_config(config)).eval()


def group(num_tokens):
    """A prompt of ten tokens, and a completion with which it has so many, as the model reads them."""
    return [*range(5, 15)], [[7 + i * i % 80 for i in range(num_tokens - 9)]]


@torch.no_grad()
def logprobs(model, *groups):
    (row,) = pack(groups, share_prefix=False)
    return completion_logprobs(model, row)


@pytest.mark.parametrize(("kind", "fields", "limit"), ROPES)
def test_no_text_changes_its_neighbours(kind, fields, limit):
    """A text that would is refused; where a rope does not choose its factors, none would."""
    model = build(kind, fields)
    assert rope_limit(model.config) == limit
    alone = logprobs(model, group(20))
    beside = logprobs(model, group(20), group(min(limit, 300)))
    torch.testing.assert_close(beside[: len(alone)], alone)
    if limit == ANY:
        return
    for groups in ([group(limit + 1)], [group(20), group(limit + 1)]):
        with pytest.raises(ValueError, match="a text is too long for the rope factors of others"):
            logprobs(model, *groups)


def test_vision_language_models():
    """It is their text model that chooses."""
    text = transformers.LlamaConfig(**SIZES, rope_parameters=DYNAMIC).to_dict()
    assert rope_limit(transformers.LlavaConfig(text_config=text)) == 128
    assert rope_limit(transformers.Qwen2VLConfig()) == ANY


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    """A model of short and long factors, which change beyond 64 tokens."""
    path = str(tmp_path_factory.mktemp("phi"))
    build("Phi3", PHI).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


CURE = "give it --max-model-len 64$"


@pytest.mark.parametrize("run", [main, examine, plain_loop.main], ids=["train", "doctor", "plain"])
def test_a_server_of_long_texts_is_refused(phi, recipe, run):
    """vLLM takes the long factors for all of its texts; at the start, and with the cure, also to the doctor."""
    refused = pytest.raises(ServerError, match=CURE)
    with fake_server(phi, answer_in(0.0), max_model_len=65) as fake, refused:
        run(parse_args([recipe(fake), *flags(model_id=phi, logged_groups=8)]))


def test_a_teachers_server_too(phi, recipe, tmp_path):
    """And with a server of short texts, a run trains."""
    with (
        fake_server(phi, answer_in(0.0), max_model_len=64) as fake,
        fake_server(phi, answer_in(0.0), max_model_len=128) as theirs,
    ):
        config = parse_args([recipe(fake), *flags(model_id=phi, max_steps=1)])
        with pytest.raises(ServerError, match=f"^{theirs.url} .*{CURE}"):
            main(replace(config, beta=0.1, parts=[Teacher(theirs.url)]))
        main(config)
    assert (tmp_path / "run" / "checkpoint-1").exists()


@pytest.mark.parametrize(("kind", "fields", "limit"), [CHOOSE[0], CHOOSE[3]])
def test_launch_keeps_to_it(kind, fields, limit, tmp_path):
    """Whether the trainer's bound is above the model's length, between both, or below."""
    build(kind, fields).save_pretrained(tmp_path)
    for bound in (30, 80, 200, 16384):
        words = flags(model_id=tmp_path, max_tokens_per_gpu=bound)
        args, _, config = parse([str(ROOT / "recipes" / "tiny.py"), *words, "--print"])
        given = server_words(args, config)
        assert given[given.index("--max-model-len") + 1] == str(min(bound, limit))
