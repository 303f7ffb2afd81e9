"""What people look at: the terminal, wandb, plots, completions."""

import base64
import io
import json
import math
import re
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import plot
import pytest
import show
from helpers import table
from PIL import Image
from test_config import make as make_config

from rollouts.group import Batch, Completion, Group, Prompt
from rollouts.images import Images
from training.logs import RunLog
from utils import process_group

PACE = {"tokens_per_s/trained": 12345.0, "idle/trainer": 0.03, "idle/servers": 0.4}
TIMES = {"time/step_s": 1.0, "time/train_s": 1.0, "time/wait_s": 0.0, **PACE}


@contextmanager
def logging(folder, num_steps=4, start=None, **fields):
    with process_group(60):
        fields = {"reward_funcs": [len], "output_dir": str(folder), **fields}
        run = SimpleNamespace(on_step=[], processor=None)
        rollouts = SimpleNamespace(num_steps=num_steps, noting_failure=nullcontext, run=run)
        log = RunLog(make_config(**fields), start or {}, rollouts)
        yield log
        log.close()


def jsonl(path):
    """The objects of a file of lines, which have no constants that JSON has not."""
    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def write(path, rows, more=""):
    """A file of lines, the last one not yet whole."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines) + more)


LINE = "12.3k tok/s · idle: trainer 3%, servers 40%"


def written(capsys, folder):
    """The lines of a run, but for its last, which names the page once."""
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"curves and completions on a page: `python scripts/show.py {folder} --html`"
    return lines


def test_how_long_yet(tmp_path, capsys):
    """By hand, from steps and their evaluations: the last 50, and nothing of what comes before the first step."""
    with logging(tmp_path, 100, {"step": 2, "run_id": "a"}) as log:
        log.step(2, {"time/eval_s": 1000.0}, Batch())
        log.step(3, {"time/step_s": 9.0, "time/eval_s": 3.0, **PACE}, Batch())
        for step in range(4, 54):
            log.step(step, {"time/step_s": 2.0, **PACE}, Batch())
    lines = written(capsys, tmp_path)
    assert lines[0] == "step 2/100"
    assert lines[1] == f"step 3/100 · time/step_s 9 · 19:24 left · {LINE}"  # 97 of 12 s
    assert lines[2] == f"step 4/100 · time/step_s 2 · 11:12 left · {LINE}"  # 96 of 7 s
    assert lines[-1] == f"step 53/100 · time/step_s 2 · 01:34 left · {LINE}"  # 47 of 2 s


def scored(rewards, cut=0):
    """A group whose completions have these rewards, and of which the first `cut` were cut off."""
    ends = ["length"] * cut + ["stop"] * (len(rewards) - cut)
    completions = [Completion([6], [-1.0], end, 0) for end in ends]
    return Group(
        Prompt(0, [5], "a", {}), completions, ["b"] * len(ends), table([r] for r in rewards), rewards,
        [0.0] * len(ends),
    )  # fmt: skip


EQUAL = [[0.25, 0.25], [0.75, 0.75]]
TWENTY = [[0.0, 1.0] * 10]


@pytest.mark.parametrize(
    ("groups", "num_cut", "fields", "warning"),
    [
        (EQUAL, 0, {}, "no advantages, as every prompt's completions have the same reward: read"),
        (EQUAL, 0, {"advantage_fn": lambda rewards, _: rewards}, None),
        (EQUAL, 0, {"loss_fn": "os.path.exists"}, None),  # which asks no reward
        ([*EQUAL, [0.0, 1.0]], 0, {}, None),
        (TWENTY, 19, {}, "nearly all completions are cut: raise max_completion_len, or see"),
        (TWENTY, 18, {}, None),
    ],
)
def test_batches_that_teach_little(tmp_path, capsys, groups, num_cut, fields, warning):
    """It is told of at the first step: no advantages, or nearly all cut."""
    with logging(tmp_path, **fields) as log:
        for step in (1, 2):
            log.step(step, TIMES, Batch([scored(rewards, num_cut) for rewards in groups]))
    told = re.findall("warning: (.*)", capsys.readouterr().out)
    assert len(told) == (warning is not None)
    assert all(line.startswith(warning) for line in told)


def test_images_of_logged_prompts(tmp_path):
    """Each is written once, small and by its content, and named in the samples of its prompt."""
    urls = []
    for colour in ("red", "blue"):
        data = io.BytesIO()
        Image.new("RGB", (1024, 256), colour).save(data, "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}")
    group = scored([0.0, 1.0])
    group.prompt = replace(group.prompt, images=Images([5], 1, [*urls, urls[0]], {}))
    with logging(tmp_path) as log:
        log.step(1, TIMES, Batch([group]))
        log.step(2, TIMES, Batch([scored([0.0, 1.0])]))
    with_images, *_, without = jsonl(tmp_path / "completions.jsonl")
    red, blue, again = with_images["images"]
    assert again == red
    assert "images" not in without
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted([red, blue])
    for name, pixel in ((red, (254, 0, 0)), (blue, (0, 0, 254))):  # of JPEG
        image = Image.open(tmp_path / "images" / name)
        assert image.size == (512, 128)
        assert image.getpixel((9, 9)) == pixel


def test_what_a_line_says(tmp_path, capsys):
    """All held-out sets together before each of them; calls that failed once there are some."""
    sets: dict[str, float] = {}
    for head, reward in {"eval": 0.5, "eval/easy": 0.75, "eval/hard": 0.125}.items():
        sets |= {f"{head}/reward": reward, f"{head}/rewards/len": reward}
        sets |= {f"{head}/accuracy": reward / 2, f"{head}/pass@2": 0.9, f"{head}/pass@4": 1.0}
    failed = {
        "loss/mine": 2.0, "loss": 0.5, "groups/dropped_failed": 3.0, "rollouts_failed": 0.0,
        "rewards_failed": 2.0, "rewards/len": 0.75, "rewards/abs": 0.0, "reward": 0.375,
    }  # fmt: skip
    with logging(tmp_path) as log:
        log.step(1, sets, Batch())
        log.step(2, failed, Batch())
    assert written(capsys, tmp_path) == [
        "step 1/4 · eval/accuracy 0.25 · eval/reward 0.5 · eval/pass@2 0.9 · eval/pass@4 1"
        " · eval/easy/accuracy 0.375 · eval/hard/accuracy 0.0625 · eval/easy/reward 0.75"
        " · eval/hard/reward 0.125",
        "step 2/4 · reward 0.375 · rewards/len 0.75 · rewards/abs 0 · rewards_failed 2"
        " · loss 0.5 · loss/mine 2",
    ]


def run(folder, name, shift=0.0):
    """Ten steps of metrics, evaluated at every fifth, the last line not yet whole."""
    (folder / name).mkdir()
    rows: list[dict[str, Any]] = [{"step": 0, "eval/reward": 0.1, "eval/accuracy": 0.1}]
    for step in range(1, 11):
        row = {"step": step, "reward": step / 10 + shift, "num_tokens": 100 * step}
        row |= {"entropy": None, "kl": math.inf}
        if step % 5 == 0:
            row |= {"eval/reward": step / 10, "eval/accuracy": step / 20}
        rows.append(row)
    write(folder / name / "metrics.jsonl", rows, '{"step": 11, "rew')
    return folder / name


def test_what_is_kept_draws_the_same(tmp_path):
    """Numbers have five digits."""
    whole, small = run(tmp_path, "a", 0.0012), tmp_path / "small"
    before = (whole / "metrics.jsonl").read_bytes()
    show.main([str(whole), "--keep", str(small)])
    drawn = []
    for folder in (whole, small):
        out = tmp_path / f"{folder.name}.svg"
        plot.main([str(folder), "-v", "reward", "-v", "eval/reward", "-o", str(out)])
        drawn.append(out.read_text())
    assert drawn[0] == drawn[1]
    rows = jsonl(small / "metrics.jsonl")
    assert rows[0] == {"step": 0, "eval/reward": 0.1, "eval/accuracy": 0.1}
    assert rows[1]["reward"] == 0.1012
    for wrong in ([str(small), "--keep", "more"], ["--keep", str(whole)]):
        with pytest.raises(SystemExit):
            show.main([str(whole), *wrong])
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_what_is_drawn(tmp_path, monkeypatch, capsys):
    """The numbers of the curves: where the metric is, smoothed by hand."""
    figures = []
    monkeypatch.setattr(plot.plt.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    a, b = str(run(tmp_path, "a")), str(run(tmp_path, "b", 1.0))
    plot.main([a, b, *["-v", "reward", "-v", "eval/reward", "-x", "num_tokens", "--smooth", "2"]])
    plot.main([a])
    rewards, evals, *_ = figures[0].axes
    curves = {line.get_label(): line.get_xydata() for line in rewards.lines}
    smooth = [0.1, *(step / 10 - 0.05 for step in range(2, 11))]
    assert curves["a"][:, 0].tolist() == [100.0 * step for step in range(1, 11)]
    assert curves["a"][:, 1].tolist() == pytest.approx(smooth)
    assert curves["b"][3, 1] == pytest.approx(1.35)
    assert evals.lines[0].get_xydata().tolist() == [[0.0, 0.1], [500.0, 0.5], [1000.0, 1.0]]
    out = capsys.readouterr().out
    assert f"reward of {a}: 0.1 ▁▂▃▃▄▅▆▆▇█ 1\n" in out
    # Rewards that are an accuracy at the start need not be one later.
    assert "held-out reward after:  1\nheld-out accuracy before: 10.0%\n" in out
    rewards, lengths, entropy, agreement = figures[1].axes
    assert (entropy.get_title("left"), entropy.get_ylabel()) == ("entropy", "nats")
    assert agreement.get_title("left") == "trainer's and server's log-probs differ by"
    assert (lengths.get_ylabel(), lengths.get_ylim()[0]) == ("tokens", 0)
    assert [line.get_label() for line in rewards.lines] == ["reward", "eval/reward"]


def test_info_and_refusals(tmp_path, capsys):
    folder = run(tmp_path, "a b")
    plot.main(["info", str(folder)])
    listed = "  eval/accuracy\n  eval/reward\n  num_tokens\n  reward\n  step"
    assert listed in capsys.readouterr().out
    empty = tmp_path / "empty"
    empty.mkdir()
    write(empty / "metrics.jsonl", [])
    for arguments, reason in (
        ([str(tmp_path)], "metrics.jsonl is not there"),
        ([str(folder), "-v", "rewart"], "no run has rewart: there are eval/accuracy, eval/reward"),
        ([str(folder), "-o", "x"], None),
        (["info"], None),
        ([str(empty)], "has no step yet"),
    ):
        with pytest.raises(SystemExit, match=reason):
            plot.main(arguments)


PROMPT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi?"}]}]
SAMPLE: dict[str, Any] = {
    "step": 1, "group": 0, "row": 3, "prompt": PROMPT, "columns": {"answer": "42"}, "completion": "2", "reward": 1.0,
    "rewards": {"right": 1.0}, "advantage": 0.5, "finish_reason": "stop", "weight_versions": [], "info": {},
}  # fmt: skip


def completions(folder):
    """Two steps of two groups, of which the second has an answer twice; the last line is not yet whole."""
    rows = [
        SAMPLE | {
            "step": step, "group": number // 2 + 10 * step, "row": number,
            "completion": f"c{step}.{number}\u2028\x1b[2J", "reward": None if number == 3 else number / 4,
        }
        for step in (1, 2)
        for number in (0, 1, 2, 2, 3)
    ]  # fmt: skip
    write(folder / "completions.jsonl", rows, '{"step": 3, "gro')
    return str(folder)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], ["c2.0", "c2.1", "c2.2", "c2.2", "c2.3"]),
        (["--step", "1", "--worst", "2"], ["c1.0", "c1.1"]),
        (["--best", "2"], ["c2.2", "c2.1"]),
        (["--step", "1", "--group", "11"], ["c1.2", "c1.2", "c1.3"]),
    ],
)
def test_show(tmp_path, capsys, options, wanted):
    show.main([completions(tmp_path), *options])
    out = capsys.readouterr().out
    assert re.findall(r"▸ (c\d\.\d)", out) == wanted
    assert "[user] <image>Hi?" in out
    assert r"\u2028\x1b[2J" in out
    assert "answer: 42" in out
    assert ("· x2" in out) == ("--best" in options)  # of which each is shown once


def test_show_of_held_out_completions(tmp_path, capsys):
    sample = {name: value for name, value in SAMPLE.items() if name != "advantage"}
    sets = [sample | {"set": name, "info": {"turns": 3}} for name in ("aime", "math500")]
    write(tmp_path / "held_out.jsonl", sets)
    for options, shown in (([], ["aime", "math500"]), (["--set", "math500"], ["math500"])):
        show.main([str(tmp_path), "--held-out", *options])
        printed = capsys.readouterr().out
        assert re.findall(r"── (\w+) · step 1", printed) == shown
        assert "turns: 3" in printed
        assert "advantage" not in printed


def test_show_refuses(tmp_path):
    def refused(message, *options):
        with pytest.raises(SystemExit, match=message):
            show.main([str(tmp_path), *options])

    refused("is not there")
    completions(tmp_path)
    refused("has no completions of step 7; its last is 2", "--step", "7")
    refused("2", "--worst", "0")
    write(tmp_path / "completions.jsonl", [])
    refused("has no completions yet")


def test_numbers_that_json_has_not(tmp_path):
    """A step without a finite gradient or a reward, and a data set with a gap."""
    nan = float("nan")
    group = scored([nan])
    group.prompt = replace(group.prompt, columns={"x": [nan]})
    with logging(tmp_path) as log:
        log.step(2, {"grad_norm": 1e400, "time/train_s": 3.0, "time/wait_s": 1.0}, Batch([group]))
    (row,) = jsonl(tmp_path / "metrics.jsonl")
    assert [row[name] for name in ("grad_norm", "reward", "rewards/len")] == [None] * 3
    assert row["time/train_s"] == 2.0  # without the wait
    assert jsonl(tmp_path / "completions.jsonl") == [{
        "step": 2, "group": 0, "row": 0, "prompt": "a", "columns": {"x": [None]}, "completion": "b", "reward": None,
        "rewards": {"len": None}, "advantage": 0.0, "finish_reason": "stop", "weight_versions": [[0, 0, 1]],
        "info": {},
    }]  # fmt: skip


def test_the_first_groups_that_were_begun_are_logged_before_a_checkpoint_is(tmp_path, monkeypatch):
    """And what `state` promises is on the disk, however slow that is."""
    groups = [replace(scored([1.0]), id=number) for number in (1, 2, 3)]
    write = RunLog._write

    def slow(*arguments):
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(RunLog, "_write", slow)
    with logging(tmp_path, logged_groups=1) as log:
        log.step(1, TIMES, Batch(groups))
        log.state()
        (sample,) = jsonl(tmp_path / "completions.jsonl")
    assert sample["group"] == 1


def test_a_collapse_is_said_in_plain_words(tmp_path, capsys):
    """Once; and not of a policy that is sure because it has learned."""
    learns = [0.1] * 5 + [0.5, 0.9] * 5
    falls = [0.1] * 5 + [0.05, 0.009] + [0.001] * 8
    sparse = [0.1, 0.0, 0.2, 0.1, 0.1] + [0.0, 0.0, 0.0, 0.0, 0.2] * 3
    unscored = [0.1] * 5 + [float("nan")] * 10
    for rewards, warned in ((learns, 0), (falls, 1), (sparse, 0), (unscored, 0)):
        with logging(tmp_path) as log:
            for step, reward in enumerate(rewards, 1):
                entropy = 1.0 / 2**step if rewards is learns else 1.0
                log.step(step, {"reward": reward, "entropy": entropy}, Batch())
        assert capsys.readouterr().out.count("has the policy collapsed?") == warned
