"""Ratios under top-k, top-p and min-p: over the tokens that the server could draw."""

import itertools
import json
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_server import fake_server
from helpers import answer_in
from hypothesis import given
from hypothesis import strategies as st
from masking import Masking
from test_data import make_config
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import training.rare_attention  # noqa: F401  for the softcap
from benchmarks.local_server import local_server
from config import UserError, parse_args
from prefix_attention import attach, completion_logprobs, pack
from rollouts.group import ENVIRONMENT, Completion, Group, Prompt
from rollouts.proofs import Proofs
from rollouts.replay import restored, saved_group
from rollouts.sampling_mask import SamplingMask, check_server, joined
from rollouts.servers import ServerPool
from server.messages import Sampled
from train import grpo_loss, main
from training.batching import micro_batches
from vllm_client import Server, ServerError, completion_of

sets_of = st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), min_size=1, max_size=8)


def make_mask(sets):
    return SamplingMask(list(itertools.chain.from_iterable(sets)), [len(ids) for ids in sets])


def sets_in(mask):
    return [ids.tolist() for ids in mask.ids.split(mask.sizes.tolist())]


# -- The sets ----------------------------------------------------------------------------------------------------------


@given(sets=sets_of, data=st.data())
def test_sets_at_places(sets, data):
    mask = make_mask(sets)
    places = data.draw(st.lists(st.integers(0, len(sets) - 1), max_size=6))
    assert sets_in(mask[torch.tensor(places, dtype=torch.int64)]) == [sets[p] for p in places]
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(sets)), st.integers(0, len(sets)))))
    assert sets_in(mask[start:end]) == sets[start:end]
    if start == end:
        return
    logits = torch.arange(10.0).repeat(end - start, 1)
    past = 5 if end == len(sets) else 0  # the last chunk ends before its slice does
    mask.to("cpu").restrict(slice(start, end + past), logits, -7.0)
    for row, ids in zip(logits.tolist(), sets[start:end], strict=True):
        assert row == [token if token in ids or not ids else -7.0 for token in range(10)]


@given(sets=sets_of, data=st.data())
def test_a_token_outside_its_set(sets, data):
    tokens = [data.draw(st.integers(0, 9)) for _ in sets]
    mask = make_mask(sets)
    if all(token in ids for token, ids in zip(tokens, sets, strict=True)):
        mask.check(torch.tensor(tokens))
    else:
        with pytest.raises(ValueError, match="not in its sampling mask"):
            mask.check(torch.tensor(tokens))


def test_sizes_that_do_not_add_up():
    with pytest.raises(ValueError, match="other sum"):
        SamplingMask([1, 2, 3], [1, 1])
    for ids, sizes in (([1, -2, 3], [1, 2]), ([1], [-1, 2])):
        with pytest.raises(ValueError, match="negative"):
            SamplingMask(ids, sizes)


def test_masks_of_neighbours():
    """One without a mask could draw all tokens."""
    mask = joined([make_mask([[1, 2], [3]]), None, make_mask([[4]])], [2, 3, 1])
    assert sets_in(mask) == [[1, 2], [3], [], [], [], [4]]


# -- Log-probs ---------------------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
FAMILIES = {
    "plain": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "softcap": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, final_logit_softcapping=3.0, attn_logit_softcapping=None)
    ),
}
GROUPS = [([5, 6, 7], [[8, 9, 10, 11], [8, 12], [13]]), ([20, 21], [[22, 23, 24]])]


def random_sets(tokens, generator):
    """For each token a set with it in it, or none, which stands for all."""
    sets = []
    for token in tokens:
        others = torch.randperm(40, generator=generator)[:3].tolist()
        sets.append([] if token % 5 == 0 else sorted({token, *others}))
    return sets


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_over_the_sets(family, share_prefix, monkeypatch):
    """And entropies, and the gradients of both, as those of a softmax over the sets alone; in fp64, chunk by chunk."""
    monkeypatch.setattr("prefix_attention.HEAD_CHUNK", {"cpu": 80, "cuda": 80})  # two tokens
    torch.manual_seed(0)
    model = FAMILIES[family]().double()
    completions = [c for _, group in GROUPS for c in group]
    sets = random_sets(
        [token for c in completions for token in c], torch.Generator().manual_seed(1)
    )
    attach(model)
    (row,) = pack(GROUPS, share_prefix=share_prefix)
    row = replace(row, sampling_mask=make_mask(sets)[row.index])
    logprobs, entropies = completion_logprobs(model, row, temperature=0.7, return_entropy=True)
    place = row.index.argsort()
    weights = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)
    (logprobs[place] @ weights + entropies[place] @ weights.flip(0)).backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}

    model.zero_grad()
    model.config._attn_implementation = "sdpa"  # eager takes its softmax in fp32
    expected, expected_entropies = [], []
    left = iter(sets)
    for prompt, group in GROUPS:
        for completion in group:
            logits = (
                model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.7
            )
            for token, of_token in zip(completion, logits, strict=True):
                ids = next(left) or list(range(40))
                log_softmax = of_token[ids].log_softmax(-1)
                expected.append(log_softmax[ids.index(token)])
                expected_entropies.append(-(log_softmax.exp() * log_softmax).sum())
    torch.testing.assert_close(logprobs[place], torch.stack(expected), rtol=1e-6, atol=1e-6)
    entropies = entropies[place]
    torch.testing.assert_close(entropies, torch.stack(expected_entropies), rtol=1e-6, atol=1e-6)
    (torch.stack(expected) @ weights + torch.stack(expected_entropies) @ weights.flip(0)).backward()
    for name, weight in model.named_parameters():
        # norms compute in fp32, also in an fp64 model
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-5, atol=1e-6)


def test_sets_of_unlikely_tokens():
    """Log-probs over a set do not depend on how unlikely it is: at a low temperature its logits are at -10,000 and less."""
    torch.manual_seed(0)
    model = FAMILIES["plain"]()
    attach(model)
    (row,) = pack([([5, 6], [[7, 8]])])
    row = replace(row, sampling_mask=make_mask([[7, 9], [8, 3]]))
    expected = completion_logprobs(model, row, temperature=0.01)
    model.lm_head.bias = torch.nn.Parameter(torch.full((40,), -1e4))
    found = completion_logprobs(model, row, temperature=0.01)
    # logits of a million have six digits after their first in fp32
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2)


@pytest.mark.parametrize("has_mask", [True, False])
def test_the_gradient_by_enumeration(has_mask):
    """Of the expected reward of a policy that is sampled by top-k: exact over the set, biased over all tokens.

    Every completion of one token is drawn as often as the server would draw it, by older weights; ρ is the trainer's
    probability over the server's, and the advantage is a reward.
    """
    prompt = [5, 6, 7]
    torch.manual_seed(2)
    older, model = (FAMILIES["plain"]().double() for _ in range(2))
    older_logits = older(torch.tensor([prompt])).logits[0, -1].detach() * 20  # far from uniform
    drawn = older_logits.topk(3).indices
    sampler_logprobs = older_logits[drawn].log_softmax(-1)
    rewards = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)

    attach(model)
    (row,) = pack([(prompt, drawn[:, None].tolist())])
    if has_mask:
        row = replace(row, sampling_mask=make_mask([drawn.tolist()] * 3))
    loss, _ = grpo_loss(
        completion_logprobs(model, row), sampler_logprobs, None, rewards * sampler_logprobs.exp(), torch.ones(3),
        row.completion, make_config(epsilon=0.99, epsilon_high=99.0, loss_type="bnpo"),
    )  # fmt: skip
    weights = list(model.parameters())
    found = torch.autograd.grad(loss, weights)

    model.config._attn_implementation = "sdpa"
    probabilities = model(torch.tensor([prompt])).logits[0, -1][drawn].softmax(-1)
    exact = torch.autograd.grad(-(probabilities @ rewards), weights)
    norm = torch.cat([gradient.flatten() for gradient in exact]).norm()
    error = torch.cat([(f - e).flatten() for f, e in zip(found, exact, strict=True)]).norm() / norm
    assert error < 1e-5 if has_mask else error > 0.1  # norms compute in fp32


# -- On their way ------------------------------------------------------------------------------------------------------


def make_completion(token_ids, sets, **fields):
    mask = make_mask(sets) if sets is not None else None
    num = len(token_ids)
    return Completion(token_ids, [-0.5] * num, "stop", [3] * num, sampling_mask=mask, **fields)


def make_group():
    """A completion of two turns, one without masks, one of two segments."""
    turn = make_completion([5, 6], [[5, 7], [6]])
    several = turn.then([9, 9], make_completion([8], [[8, 9, 10]]))
    early = make_completion([11], [[11, 12]])
    late = make_completion([13, 14], [[13], [14, 15]], prompt_ids=[1, 2], earlier=[early])
    group = Group(Prompt(0, [1, 2, 3], "p", {}), [several, make_completion([16], None), late])
    group.advantages = [1.0, -1.0, 0.5]
    return group


SETS = [
    [5, 7],
    [6],
    [],
    [],
    [8, 9, 10],
    [],
    [11, 12],
    [13],
    [14, 15],
]  # by completion, segment, token


def test_from_completions_to_rows():
    group = make_group()
    assert sets_in(group.tokens.sampling_mask) == SETS
    assert group.tokens.weight_versions.tolist()[2:4] == [ENVIRONMENT] * 2
    plain = Group(Prompt(1, [4, 4], "p", {}), [make_completion([7, 7], None)], advantages=[1.0])
    config = make_config(num_generations=3)
    for share_prefix in (True, False):
        config = make_config(num_generations=3, share_prefix=share_prefix)
        rows = micro_batches([plain, group], 9, config)
        assert len(rows) > 1
        for row in rows:
            expected = [[[], [], *SETS][place] for place in row.packed.index]
            assert sets_in(row.packed.sampling_mask) == expected
            for token, ids in zip(row.packed.targets.tolist(), expected, strict=True):
                assert not ids or token in ids
    assert micro_batches([plain], 9, config)[0].packed.sampling_mask is None


def test_saved_and_restored():
    group = restored(saved_group(make_group())["group"], 0)
    assert sets_in(group.tokens.sampling_mask) == SETS
    assert group.completions[1].sampling_mask is None


def test_another_number_of_sets_than_tokens():
    with pytest.raises(ValueError, match="needs sampling_mask for its 2 tokens, and has 1"):
        make_completion([5, 6], [[5]])


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        ([5, 9, 6], [2, 1], None),
        ([5, 9, 7], [2, 1], "token 1 of a completion is not in its sampling mask"),
        ([5, 9], [2, 0], "token 1 of a completion is not in its sampling mask"),
        ([5, 9, 6], [3], "a sampling mask of 1 tokens for 2"),
        ([5, 9, 6], [2, 2], "has sizes of other sum"),
    ],
)
def test_masks_of_a_reply(ids, sizes, message):
    as_bytes = lambda values: array("i", values).tobytes()
    reply = Sampled(
        0, "stop", as_bytes([5, 6]), array("f", [-1, -2]).tobytes(), [("3", 0, 2)],
        mask_ids=as_bytes(ids), mask_sizes=as_bytes(sizes),
    )  # fmt: skip
    if message is None:
        assert sets_in(completion_of(reply).sampling_mask) == [[5, 9], [6]]
        return
    with pytest.raises(ValueError, match=message):
        completion_of(reply)


# -- Whole runs --------------------------------------------------------------------------------------------------------


def rows_of(path, name):
    return [json.loads(line) for line in (path / "run" / name).read_text().splitlines()]


WARNING = "tokens are not drawn from the policy itself"
TOP_K = ["--top_k", "4", "--max_steps", "3", "--learning_rate", "1e-2"]
UPDATES = ["--num_minibatches", "2", "--beta", "0.1", "--share_prefix", "false"]


@pytest.mark.parametrize("more", [[], UPDATES], ids=["one", "several"])
def test_a_run_with_masks(models, recipe, tmp_path, capsys, more):
    """The stand-in's true log-probs over its sets are the trainer's, also where there are several updates."""
    with fake_server(models["untied"], answer_in(0.0), returns_sampling_mask=True) as server:
        main(parse_args([recipe(server), *TOP_K, *more]))
    assert WARNING not in capsys.readouterr().out
    steps = rows_of(tmp_path, "metrics.jsonl")
    assert len(steps) == 3
    for row in steps:  # fp32 log-probs of tokens that a random model thinks unlikely
        assert row["sampling/current_logp_difference"] < 1e-5


def test_the_references_log_probs_are_over_the_sets(models, recipe, tmp_path):
    """It is the policy itself as long as that does not move."""
    still = ["--top_k", "4", "--max_steps", "1", "--learning_rate", "1e-12", "--beta", "0.1"]
    with fake_server(models["untied"], answer_in(0.0), returns_sampling_mask=True) as server:
        main(parse_args([recipe(server), *still]))
    (step,) = rows_of(tmp_path, "metrics.jsonl")
    assert abs(step["kl"]) < 1e-9


def test_a_run_without_masks(models, recipe, tmp_path, capsys):
    with fake_server(models["untied"], answer_in(0.0)) as server:
        main(parse_args([recipe(server), *TOP_K]))
    told = f"warning: top_k: {WARNING}, and ratios are inexact, as not all servers return sampling masks"
    assert capsys.readouterr().out.count(told) == 1


def test_a_server_without_masks_among_others(models, recipe, capsys):
    with (
        fake_server(models["untied"], answer_in(0.0), returns_sampling_mask=True) as one,
        fake_server(models["untied"], answer_in(0.0)) as other,
    ):
        main(parse_args([recipe(one, other), *TOP_K]))
    assert capsys.readouterr().out.count(f"warning: top_k: {WARNING}") == 1


def test_a_server_that_comes_later_is_checked_too():
    """The pool asks each server, at the start and when it comes or comes back."""
    said: list[str] = []
    server = SimpleNamespace(url="http://a", returns_sampling_mask=False)
    check_server(server, make_config(top_k=4), said.append)
    assert len(said) == 1
    server.returns_sampling_mask = True
    check_server(server, make_config(top_k=4), said.append)
    assert len(said) == 1
    server.check_version = lambda: None
    pool: Any = ServerPool(make_config())
    with pytest.raises(UserError, match="needs top_k"):
        pool._max_model_len(server)


def test_masks_that_are_announced_and_missing(models, recipe):
    with fake_server(models["untied"], answer_in(0.0)) as server:
        about = server.control
        server.control = lambda path, body: (  # type: ignore[method-assign]
            {"version": server.vllm_version, "sampling_mask": True}
            if path == "/version"
            else about(path, body)
        )
        with pytest.raises(ServerError, match="announces sampling masks, and returns none"):
            main(parse_args([recipe(server), *TOP_K]))


@pytest.mark.parametrize(("has_mask", "is_lost"), [(True, True), (False, False)])
def test_a_server_with_masks_is_compared(has_mask, is_lost):
    """By the log-probs of tokens that trained; one without masks differs anyway."""
    lost: list[Any] = []
    server = SimpleNamespace(number=0, returns_sampling_mask=has_mask, proved_version=-1)
    pool: Any = SimpleNamespace(servers=[server], lose=lambda one, error: lost.append(one))
    nothing: Any = None
    proofs = Proofs(nothing, 4, pool, nothing, make_config(top_k=4), torch.device("cpu"))
    proofs.check({0: 5.0})
    assert bool(lost) == is_lost
    proofs.check({0: 1e-6})
    assert server.proved_version == (4 if has_mask else -1)


@pytest.mark.parametrize("has_mask", [True, False])
def test_a_replay_warns_of_what_was_truncated(models, recipe, tmp_path, capsys, has_mask):
    with fake_server(models["untied"], answer_in(0.0), returns_sampling_mask=has_mask) as server:
        path = recipe(server)
        main(parse_args([path, *TOP_K, "--save_rollouts", "true"]))
    capsys.readouterr()
    again = ["--replay", str(tmp_path / "run"), "--output_dir", str(tmp_path / "again" / "run")]
    main(parse_args([path, "--max_steps", "3", *again]))
    assert ("warning: top_k: the saved tokens" in capsys.readouterr().out) == (not has_mask)


def test_masks_that_nothing_bounds(models, recipe):
    """vLLM refuses such requests, one by one."""
    with (
        fake_server(models["untied"], answer_in(0.0), returns_sampling_mask=True) as server,
        pytest.raises(UserError, match="--return-sampling-mask, which needs top_k"),
    ):
        main(parse_args([recipe(server), "--max_steps", "1"]))


def test_a_teacher_over_all_tokens(models, recipe):
    with (
        fake_server(models["untied"], answer_in(0.0), returns_sampling_mask=True) as server,
        fake_server(models["untied"], answer_in(0.0)) as teacher,
        pytest.raises(UserError, match="reference_urls give log-probs over all tokens"),
    ):
        main(parse_args([recipe(server), *TOP_K, "--beta", "0.1", "--reference_urls", teacher.url]))


@pytest.fixture(scope="module")
def place(models, tmp_path_factory):
    """A real server that returns masks, and its address."""
    log = tmp_path_factory.mktemp("masking") / "log"
    short = ("--max-model-len", "128", "--max-num-seqs", "64")
    with local_server(models["untied"], log, *short, start=Masking) as server:
        yield server.wait()


@pytest.fixture
def vllm_recipe(models, recipe, place):
    """A run against it."""
    return recipe(Server(place, 60.0))


PROMPT = [5, 20, 33, 41, 7, 8]


def test_sets_of_vllm(models, place):
    """Each is what top-k, top-p and min-p leave of the distribution, and log-probs are over it."""
    from transformers import AutoModelForCausalLM

    server = Server(place, 60.0)
    server.check_version()
    assert server.returns_sampling_mask
    sampling = {"n": 4, "max_tokens": 12, "temperature": 1.3, "ignore_eos": True, "top_k": 12}
    model = AutoModelForCausalLM.from_pretrained(models["untied"])
    for bound in ({}, {"top_p": 0.8}, {"min_p": 0.1}, {"allowed_token_ids": list(range(9, 30))}):
        for completion in server.generate(PROMPT, sampling | bound):
            ids = completion.token_ids.tolist()
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1] / 1.3
            sets = sets_in(completion.sampling_mask)
            assert len(sets) == 12
            for token, of_token, drawn, logprob in zip(
                ids, logits, sets, completion.sampler_logprobs, strict=True
            ):
                assert torch.allclose(
                    of_token[drawn].log_softmax(-1)[drawn.index(token)], logprob, atol=1e-4
                )
                allowed = torch.tensor(bound.get("allowed_token_ids", range(len(of_token))))
                p = torch.zeros_like(of_token)
                p[allowed] = of_token[allowed].softmax(-1)
                if "min_p" in bound:
                    p[p < 0.1 * p.max()] = 0
                order = p.argsort(descending=True)[:12]
                order = order[p[order] > 0]
                share = p[order] / p[order].sum()
                if "top_p" in bound:  # the fewest that have so much together
                    order = order[share.cumsum(0) - share < 0.8]
                assert set(drawn) == set(order.tolist())


def test_greedy_with_masks(place):
    """vLLM refuses temperature 0 there; the likeliest token is asked for by top_k."""
    server = Server(place, 60.0)
    sampling = {"n": 2, "max_tokens": 12, "ignore_eos": True, "top_k": 12}
    first, second = server.generate(PROMPT, sampling | {"temperature": 0.0})
    assert torch.equal(first.token_ids, second.token_ids)
    assert first.sampling_mask.sizes.eq(1).all()


TOP_P = ["--top_k", "20", "--sampling_params", '{"top_p": 0.9}', "--max_steps", "3"]


def test_a_run_with_vllms_masks(vllm_recipe, tmp_path, capsys):
    """As exact as without top-p: probes, evaluations and all; and its saved completions train the same again."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1+1="}\n{"prompt": "2+1="}\n')
    options = [*TOP_P, "--save_rollouts", "true", "--probe_steps", "1"]
    evaluation = ["--eval_dataset_id", str(held_out), "--eval_steps", "3"]
    main(parse_args([vllm_recipe, *options, *evaluation]))
    assert WARNING not in capsys.readouterr().out
    first, *steps = rows_of(tmp_path, "metrics.jsonl")
    assert {"eval/reward"} <= set(first) & set(steps[2])
    for row in steps:
        assert row["sampling/current_logp_difference"] < 1e-5
    assert max(row["completions/mean_length"] for row in steps) > 2

    again = ["--replay", str(tmp_path / "run"), "--output_dir", str(tmp_path / "again" / "run")]
    main(parse_args([vllm_recipe, *TOP_P, *again]))
    for row, other in zip(steps, rows_of(tmp_path / "again", "metrics.jsonl"), strict=True):
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-5)
        assert other["sampling/sampling_logp_difference/mean"] < 1e-5
