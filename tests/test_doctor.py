"""What doctor.py tells before a run: the prediction and the memory by hand, the rest on a real tiny server."""

import re

import pytest
from doctor import Parts, fitting_tokens, line, other_staleness, predict
from helpers import ROOT, on_forked_ranks, write_recipe

DOCTOR = ROOT / "scripts" / "doctor.py"
# One server takes 1 + 0.5 * 8 = 5 s for a batch, two take 3 s; the last second is a reward's.
PARTS = Parts((1.0, 0.5), 8, reward_s=1.0, rows=[0.4, 1.0], train_s=3.0, sync_s=1.0, slowdown=1.5)
CONSTANT = "\ndef always_one(completions, **_): return [1.0] * len(completions)\n"


def test_what_fits():
    """2 GB whatever the rows, 1 MB a token: of 10 GB, 9 are usable, 7 by rows."""
    memory = line((1000, 3e9), (2000, 4e9))
    assert fitting_tokens(memory, 10e9) == 7000
    assert fitting_tokens(memory, 1e9) == 0
    assert fitting_tokens((2e9, 0.0), 10e9) == 0  # the peak does not tell


# Rows at 1.2, 2.4 and 6 s of 2 s each; ten groups are sampled, as two are dropped.
QUEUED = PARTS._replace(rows=[0.2, 0.4, 1.0], num_groups=10, train_s=6)
# A batch that is one request: sampled in 16 s, all of it latency, and trained in 8.
LATENT = Parts((16.0, 0.0), 8, reward_s=0.0, rows=[1.0], train_s=8.0, sync_s=0.0, slowdown=1.0)


@pytest.mark.parametrize(
    ("parts", "num_servers", "staleness", "expected"),
    [
        # Rows come at 2 and 5 s and end at 3.5 and 6.5.
        (PARTS, 1, 0, (7.5, 3.5 / 7.5, 3.5 / 7.5)),
        # At 1.2 and 3 s, and end at 2.7 and 4.5.
        (PARTS, 2, 0, (5.5, 1.5 / 5.5, 3.5 / 5.5)),
        # 1.5 * (4 + 1): the 1 s that does not grow is hidden.
        (PARTS, 1, 1, (7.5, 1.5 / 7.5, 1.5 / 7.5)),
        # 1.5 * (3 + 1): the trainer never waits.
        (PARTS, 2, 1, (6, 0, 0.5)),
        # Alone 1.75 s (rows at 0.6 and 1.5), half of it here.
        (PARTS._replace(train_s=0.5), 8, 1, (2.8125, 0.5625 / 2.8125, 2.0625 / 2.8125)),
        # Alone 1.55 s, a third of it here.
        (PARTS._replace(train_s=0.1), 8, 2, (2.275, 0.625 / 2.275, 1.525 / 2.275)),
        # They end at 3.2, 5.2 and 8.
        (QUEUED, 1, 0, (9, 2 / 9, 4 / 9)),
        (LATENT, 1, 0, (24, 16 / 24, 8 / 24)),
        # Two batches take turns, 12 s each.
        (LATENT, 1, 1, (12, 1 / 3, 0)),
    ],
)
def test_prediction(parts, num_servers, staleness, expected):
    assert predict(parts, num_servers, staleness) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("slowdown", "hidden_s"),
    [(1.5, 7.5), (2.0, 10.0)],  # (4 + 1) s times the slowdown, as one side is hidden
)
def test_which_staleness_is_faster(slowdown, hidden_s):
    """By hand: in turns 1 + 4 + 3 + 1 s."""
    parts = PARTS._replace(rows=[1.0], slowdown=slowdown)
    assert other_staleness(parts, 1, 0) == (1, pytest.approx(1 - hidden_s / 9))
    assert other_staleness(parts, 1, 1) == (0, pytest.approx(1 - 9 / hidden_s))


def test_a_run_without_servers(tmp_path):
    done = on_forked_ranks(0, DOCTOR, write_recipe(tmp_path, "m"), status=1)
    assert re.fullmatch("error: vllm_urls names no server.*\n", done.stderr)


@pytest.fixture
def place(models, servers, tmp_path):
    """A recipe for a real server, whose output_dir has a run."""
    path = write_recipe(tmp_path, models["tied"], [servers["tied"]])
    text = path.read_text().replace("rows,", "rows, eval_dataset_id=rows,")
    path.write_text(text + CONSTANT)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    return path


NUMBER = r"[\d.,e+-]+"
LINES = [
    rf"server http://[\d.:]+ +mismatch {NUMBER} mean, {NUMBER} max nats",
    rf"shared prompts +gradients equal to {NUMBER}, {NUMBER} times as fast as plain rows",
    rf"memory +peak {NUMBER} GB with rows of {NUMBER} tokens; (up to {NUMBER} fit into|free:) {NUMBER} GB",
    rf"speed of either side alone +{NUMBER} tokens/s sampled, {NUMBER} tokens/s trained",
    rf"one step +{NUMBER} s: sampling {NUMBER} s, rewards {NUMBER} s, training {NUMBER} s, sync {NUMBER} s",
    r" +trainer waits \d+%, servers \d+%",
    rf"one step, by number of servers +1: {NUMBER} s, 2: {NUMBER} s, 4: {NUMBER} s, 8: {NUMBER} s; enough: \d",
    rf"the run +{NUMBER} h: 3 steps, 2 evaluations of {NUMBER} s",
    rf"one batch +reward {NUMBER}, all equal in \d+% of groups; \d+ tokens a completion, \d+% cut off",
]


def files(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_each_figure_and_the_next_run(place, tmp_path):
    """The run in output_dir stays as it is, and the server takes the next trainer."""
    before = files(tmp_path / "run")
    done = on_forked_ranks(0, DOCTOR, place, status=0)
    assert files(tmp_path / "run") == before
    table, _, advice = done.stdout.partition("over gloo\n")[2].partition("\n\n")
    for pattern, text in zip(LINES, table.splitlines(), strict=True):
        assert re.fullmatch(pattern, text)
    mean, most = map(float, re.findall(f"mismatch ({NUMBER}) mean, ({NUMBER}) max", table)[0])
    assert 0 < mean < most < 1e-3
    assert 0 < float(re.findall(f"equal to ({NUMBER}),", table)[0]) < 1e-4
    assert "max_tokens_per_gpu" not in advice
    words = ["--max_steps", "1", "--output_dir", tmp_path / "next"]
    on_forked_ranks(0, "train.py", place, *words, status=0)


def test_wrong_settings_on_two_ranks(place):
    """Each is named once, by rank 0."""
    wrong = "--reward_funcs always_one --use_peft true --max_tokens_per_gpu 64"
    wrong += " --max_completion_len 2 --temperature 0.5"
    done = on_forked_ranks(2, DOCTOR, place, *wrong.split(), status=0)
    advice = done.stdout.partition("\n\n")[2]
    for text in ("rewards are all equal in 100% of groups: nothing to learn", "cuts"):
        assert advice.count(text) == 1
