"""What people look at: the terminal, wandb, plots, completions."""

import base64
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import plot
import pytest
import show
from helpers import ENV, ROOT, table
from PIL import Image

from config import TrainConfig
from rollouts.group import Batch, Completion, Group, Prompt
from rollouts.images import Images
from training.logs import RunLog, Terminal
from utils import process_group

LOGGED = """
import sys
sys.path[:0] = [{root!r}]
from config import TrainConfig
from training.logs import RunLog
from utils import process_group
config = TrainConfig(model_id="m", dataset_id="d.jsonl", reward_funcs=[len], output_dir={folder!r})
with process_group(60):
    log = RunLog(config, 4)
    log.step(0, {{"eval/reward": 0.25}})
    pace = {{"time/step_s": 2.0, "tokens_per_s/trained": 12345.0, "idle/trainer": 0.03, "idle/servers": 0.4}}
    for step in (1, 2):
        log.step(step, {{"reward": 0.5, "loss": -0.125, **pace}})
    log.close()
"""
LINE = "00:04 left · 12.3k tok/s · idle: trainer 3%, servers 40%"


@pytest.mark.slow
def test_the_live_line(tmp_path):
    """On a terminal it stands under the others; in a file every step's line says the same."""
    code = LOGGED.format(root=str(ROOT), folder=str(tmp_path))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 160, 0, 0))  # rows and columns
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=ENV)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    assert process.wait(60) == 0
    assert re.search(
        rf"\r *step 2/4 · reward 0\.5 · eval 0\.25 · {re.escape(LINE)}", shown.decode()
    ), shown
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENV
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "step 0/4 · eval/reward 0.25"
    # At the first step servers may have sampled all that they may, before its clocks started.
    assert (
        lines[1] == "step 1/4 · reward 0.5 · loss -0.125 · time/step_s 2 · 00:06 left · 12.3k tok/s"
    )
    assert lines[2] == f"step 2/4 · reward 0.5 · loss -0.125 · time/step_s 2 · {LINE}"


def written(capsys, folder):
    """The lines of a run, but for its last, which names the page once."""
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"curves and completions on a page: `python scripts/show.py {folder} --html`"
    return lines


def test_how_long_yet(tmp_path, capsys):
    """By hand, from steps and their evaluations: the last 50, and nothing of what comes before the first step."""
    config = TrainConfig(
        model_id="m", dataset_id="d.jsonl", reward_funcs=[len], output_dir=str(tmp_path)
    )
    pace = {"tokens_per_s/trained": 1.0, "idle/trainer": 0.0, "idle/servers": 0.0}
    with process_group(60):
        log = RunLog(config, 100, {"step": 2, "run_id": "a"})
        log.step(2, {"time/eval_s": 1000.0})
        log.step(3, {"time/step_s": 9.0, "time/eval_s": 3.0, **pace})
        for step in range(4, 54):
            log.step(step, {"time/step_s": 2.0, **pace})
        log.close()
    lines = written(capsys, tmp_path)
    assert lines[0] == "step 2/100"
    assert "step 3/100 · time/step_s 9 · 19:24 left" in lines[1]  # 97 steps of 12 s
    assert "step 4/100 · time/step_s 2 · 11:12 left" in lines[2]  # 96 of 7 s
    assert "step 53/100 · time/step_s 2 · 01:34 left" in lines[-1]  # 47 of 2 s


def scored(rewards, cut=0):
    """A group whose completions have these rewards, and of which the first `cut` were cut off."""
    ends = ["length"] * cut + ["stop"] * (len(rewards) - cut)
    completions = [Completion([6], [-1.0], end, 0) for end in ends]
    return Group(
        Prompt(0, [5], "a", {}), completions, ["b"] * len(ends), table([r] for r in rewards), rewards,
        [0.0] * len(ends),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "fields", "warned"),
    [
        ([[0.0, 0.0], [0.0, 0.0]], {}, ["0"]),
        ([[0.25, 0.25], [0.75, 0.75]], {}, ["0.5"]),
        ([[0.25, 0.25], [0.5, 0.75]], {}, []),
        ([[0.25, 0.25], [0.75, 0.75]], {"advantage_fn": lambda rewards, _: rewards}, []),
        (
            [[0.0, 0.0], [0.0, 0.0]],
            {"loss_fn": "os.path.exists"},
            [],
        ),  # as in distillation, which asks no reward
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]], {}, []),
    ],
)
def test_a_first_batch_without_advantages(tmp_path, capsys, groups, fields, warned):
    """It is told of once, before its step's line; a later one is not."""
    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=[len], output_dir=str(tmp_path), **fields
    )
    times = {"time/step_s": 1.0, "time/train_s": 1.0, "time/wait_s": 0.0}
    times |= {"tokens_per_s/trained": 1.0, "idle/trainer": 0.0, "idle/servers": 0.0}
    with process_group(60):
        log = RunLog(config, 4)
        for step in (1, 2):
            log.step(step, times, Batch([scored(rewards) for rewards in groups]))
        log.close()
    start = "warning: no advantages, as every prompt's completions have the same reward"
    read = f"read them with `python scripts/show.py {tmp_path}`"
    expected = [f"{start} (mean {value}): {read}" for value in warned]
    lines = written(capsys, tmp_path)
    assert [line for line in lines if not line.startswith("step ")] == expected


def test_images_of_logged_prompts(tmp_path):
    """Each is written once, small and by its content, and named in the samples of its prompt."""
    urls = []
    for colour in ("red", "blue"):
        data = io.BytesIO()
        Image.new("RGB", (1024, 256), colour).save(data, "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}")
    group = scored([0.0, 1.0])
    group.prompt = replace(group.prompt, images=Images([5], 1, [*urls, urls[0]], {}))
    config = TrainConfig(model_id="m", dataset_id="d", reward_funcs=[len], output_dir=str(tmp_path))
    times = {"time/train_s": 1.0, "time/wait_s": 0.0}
    with process_group(60):
        log = RunLog(config, 4)
        log.step(1, times, Batch([group]))
        log.step(2, times, Batch([scored([0.0, 1.0])]))
        log.close()
    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    with_images, *_, without = map(json.loads, lines)
    names = with_images["images"]
    assert names == [names[0], names[1], names[0]]
    assert "images" not in without
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted(set(names))
    for name, pixel in zip(names, [(254, 0, 0), (0, 0, 254)], strict=False):  # of JPEG
        image = Image.open(tmp_path / "images" / name)
        assert image.size == (512, 128)
        assert image.getpixel((9, 9)) == pixel


@pytest.mark.parametrize(("num_cut", "warned"), [(20, ["100%"]), (19, ["95%"]), (18, [])])
def test_a_batch_that_is_cut(tmp_path, capsys, num_cut, warned):
    config = TrainConfig(model_id="m", dataset_id="d", reward_funcs=[len], output_dir=str(tmp_path))
    with process_group(60):
        log = RunLog(config, 4)
        for step, cut in enumerate([0, num_cut, num_cut], 1):  # it is told of once
            times = {"time/train_s": 1.0, "time/wait_s": 0.0}
            log.step(step, times, Batch([scored([0.0, 1.0] * 10, cut)]))
        log.close()
    cure = "raise it, or see why the model does not end its answers (EOS, chat template)"
    expected = [
        f"warning: max_completion_len=512 cuts {share} of completions: {cure}" for share in warned
    ]
    lines = written(capsys, tmp_path)
    assert [line for line in lines if not line.startswith("step ")] == expected


def test_held_out_sets_in_a_line(tmp_path, capsys):
    """All sets together first, then the accuracy and the reward of each."""
    sets: Any = {"easy": "x.jsonl", "hard": "y.jsonl"}
    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=[len], output_dir=str(tmp_path), eval_dataset_id=sets,
        eval_generations=4, eval_temperature=1.0,
    )  # fmt: skip
    metrics: dict[str, float] = {}
    for head, reward in {"eval": 0.5, "eval/easy": 0.75, "eval/hard": 0.125}.items():
        metrics |= {f"{head}/reward": reward, f"{head}/rewards/len": reward}
        metrics |= {f"{head}/accuracy": reward / 2, f"{head}/pass@2": 0.9, f"{head}/pass@4": 1.0}
    with process_group(60):
        log = RunLog(config, 4)
        log.step(0, metrics)
        log.close()
    assert written(capsys, tmp_path) == [
        "step 0/4 · eval/accuracy 0.25 · eval/reward 0.5 · eval/pass@2 0.9 · eval/pass@4 1"
        " · eval/easy/accuracy 0.375 · eval/hard/accuracy 0.0625"
        " · eval/easy/reward 0.75 · eval/hard/reward 0.125"
    ]


def test_rewards_and_failures_in_a_line(tmp_path, capsys):
    """Of a single function the reward says it all; calls that failed are there once there are some."""
    metrics = {"loss/mine": 2.0, "loss": 0.5, "groups/dropped_failed": 3.0, "rollouts_failed": 0.0}
    metrics |= {"rewards_failed": 2.0, "rewards/len": 0.75, "rewards/abs": 0.0, "reward": 0.375}
    expected = {
        "step 1/4 · reward 0.375 · rewards_failed 2 · loss 0.5 · loss/mine 2": [len],
        "step 1/4 · reward 0.375 · rewards/len 0.75 · rewards/abs 0 · rewards_failed 2 · loss 0.5"
        " · loss/mine 2": [len, abs],
    }
    for line, functions in expected.items():
        fields: Any = {"reward_funcs": functions, "output_dir": str(tmp_path)}
        terminal = Terminal(4, TrainConfig(model_id="m", dataset_id="d", **fields))
        terminal.show(1, metrics)
        terminal.close()
        assert written(capsys, tmp_path) == [line]


def run(folder, name, shift=0.0):
    """Ten steps of metrics, evaluated at every fifth, the last line not yet whole."""
    (folder / name).mkdir()
    rows: list[dict[str, Any]] = [{"step": 0, "eval/reward": 0.1, "eval/accuracy": 0.1}]
    for step in range(1, 11):
        rows.append(
            {"step": step, "reward": step / 10 + shift, "num_tokens": 100 * step, "entropy": None}
        )
        rows[-1] |= {"eval/reward": step / 10, "eval/accuracy": step / 10} if step % 5 == 0 else {}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name / "metrics.jsonl").write_text(text + '{"step": 11, "rew')
    return folder / name


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_plot_of_two_runs(tmp_path, suffix, start):
    out = tmp_path / f"curve.{suffix}"
    options = [
        "-v",
        "reward",
        "-v",
        "eval/reward",
        "-x",
        "num_tokens",
        "--smooth",
        "3",
        "-o",
        str(out),
    ]
    plot.main([str(run(tmp_path, "a")), str(run(tmp_path, "b", 1.0)), *options])
    assert out.read_bytes().startswith(start)


def test_what_is_kept_draws_the_same(tmp_path):
    """Text and the numbers of an axis stay as they are; numbers have five digits."""
    svgs = [str(tmp_path / name) for name in ("a.svg", "b.svg")]
    options = ["-v", "reward", "-v", "eval/reward"]
    whole, small = run(tmp_path, "a", 0.0012), tmp_path / "small"
    written = (whole / "metrics.jsonl").read_bytes()
    plot.main([str(whole), *options, "-o", svgs[0]])
    show.main([str(whole), "--keep", str(small)])
    plot.main([str(small), *options, "-o", svgs[1]])
    drawn, again = (Path(svg).read_text() for svg in svgs)
    assert drawn == again
    assert ">held-out reward</text>" in drawn
    assert ">0.2</text>" in drawn
    rows = [json.loads(line) for line in (small / "metrics.jsonl").read_text().splitlines()]
    assert rows[0] == {"step": 0, "eval/reward": 0.1, "eval/accuracy": 0.1}
    assert rows[1]["reward"] == 0.1012
    for arguments in (
        [str(whole), str(small), "--keep", "more"],
        [str(whole), "--keep", str(whole)],
    ):
        with pytest.raises(SystemExit):
            show.main(arguments)
    assert (whole / "metrics.jsonl").read_bytes() == written


def test_what_is_drawn(tmp_path, monkeypatch, capsys):
    """The numbers of the curves: where the metric is, smoothed by hand."""
    figures = []
    monkeypatch.setattr(plot.plt.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    a, b = run(tmp_path, "a"), run(tmp_path, "b", 1.0)
    plot.main(
        [str(a), str(b), "-v", "reward", "-v", "eval/reward", "-x", "num_tokens", "--smooth", "2"]
    )
    rewards, evals, *_ = figures[0].axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in rewards.lines}
    assert [x for x, _ in curves["a"]] == [100.0 * step for step in range(1, 11)]
    assert [y for _, y in curves["a"]] == pytest.approx(
        [0.1, *(step / 10 - 0.05 for step in range(2, 11))]
    )
    assert curves["b"][3][1] == pytest.approx(1.35)
    assert [tuple(point) for point in evals.lines[0].get_xydata()] == [
        (0.0, 0.1),
        (500.0, 0.5),
        (1000.0, 1.0),
    ]
    plot.main([str(a)])
    assert f"reward of {a}: 0.1 ▁▂▃▃▄▅▆▆▇█ 1\n" in capsys.readouterr().out
    assert [axes.get_ylabel() for axes in figures[1].axes] == ["", "tokens", "nats", "nats"]
    titles = [axes.get_title("left") for axes in figures[1].axes]
    assert titles == [
        "reward, and held-out reward", "mean length of completions", "entropy",
        "trainer's and server's log-probs differ by",
    ]  # fmt: skip
    rewards, lengths, *_ = figures[1].axes
    assert lengths.get_ylim()[0] == 0  # a change of a token is not the whole height
    assert [line.get_label() for line in rewards.lines] == ["reward", "eval/reward"]


def test_axes_are_those_of_the_data(tmp_path, monkeypatch):
    """README's two panels: from the first value to the last, on a background that no page shines through."""
    figures = []
    monkeypatch.setattr(plot.plt.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    plot.main([str(run(tmp_path, "a")), "--rewards", "-v", "num_tokens"])
    plot.main([str(tmp_path / "a"), "--rewards", "-x", "num_tokens"])
    by_step, by_tokens = figures
    limits = [(axes.get_xlim(), axes.get_ylim()) for axes in by_step.axes[:3]]
    assert limits == [((0, 10), (0.1, 1)), ((0, 10), (0.1, 1)), ((0, 10), (100, 1000))]
    titles = [axes.get_title("left") for axes in by_step.axes[:3]]
    assert titles == ["reward", "held-out reward", "num_tokens"]
    assert [axes.get_ylabel() for axes in by_step.axes[:3]] == ["", "", "tokens"]
    assert {axes.get_xlabel() for axes in by_step.axes[:3]} == {"step"}
    assert [(axes.get_xlim(), axes.get_xlabel()) for axes in by_tokens.axes] == [
        ((0, 1000), "num_tokens (tokens)")
    ] * 2
    assert not any(axes.get_legend() for axes in by_step.axes)  # the title names the only curve
    for axes in by_step.axes:
        assert axes.get_facecolor() == axes.figure.get_facecolor() == (1, 1, 1, 1)
        assert not any(line.get_clip_on() for line in axes.lines)  # whole at the edges, too


@pytest.mark.house
def test_units_are_those_of_the_documents():
    """A metric in whose meaning docs/metrics.md names a unit has it."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    found = re.findall(r"^\| `([\w/@<>]+)` \| (.*) \|$", page.partition("## Advantages")[0], re.M)
    assert len(found) > 40
    units = {name: plot.unit_of(name) for name, _ in found}
    for name, meaning in found:
        if "nats" in meaning:
            assert units[name] == "nats", name
        if meaning.startswith("share "):
            assert units[name] == "share", name
        if name.startswith("time/"):
            assert units[name] == "seconds", name
        if meaning.startswith("groups "):
            assert units[name] == "groups", name
    unnamed = {name for name, unit in units.items() if not unit}
    assert unnamed == {
        "reward", "rewards/<f>", "reward_std", "eval/reward", "eval/rewards/<f>",
        "step", "policy_version", "loss", "loss/<name>", "info/<name>", "grad_norm", "learning_rate",
    }  # fmt: skip
    assert plot.unit_of("eval/aime/accuracy") == plot.unit_of("eval/pass@8") == "share"


def test_what_a_legend_says(tmp_path):
    """The one setting that differs, or the folder, or where that is the same its path."""
    assert plot.labels_of(["docs/runs/a", "docs/runs/b"]) == ["a", "b"]
    paths = ["outputs/a/run", "outputs/b/run"]
    assert plot.labels_of(paths) == paths
    runs = [tmp_path / name for name in ("a", "b")]
    for settings, expected in (
        ([{"seed": 1, "output_dir": "a"}, {"seed": 2, "output_dir": "b"}], ["seed 1", "seed 2"]),
        ([{"seed": 1, "beta": 0.0}, {"seed": 2, "beta": 0.1}], ["a", "b"]),
        ([{"seed": 1}, {"seed": 1}], ["a", "b"]),
    ):
        for run, known in zip(runs, settings, strict=True):
            run.mkdir(exist_ok=True)
            (run / "config.json").write_text(json.dumps(known))
        assert plot.labels_of([*map(str, runs)]) == expected


def test_sparkline():
    assert plot.sparkline([0, 1, 2, 3, 0, 0], width=3) == "▂█▁"  # means 0.5, 2.5 and 0
    assert plot.sparkline([5.0]) == plot.sparkline([5.0, 5.0])[0] == "▁"


def test_info_and_refusals(tmp_path, capsys):
    folder = run(tmp_path, "a b")
    plot.main(["info", str(folder)])
    assert (
        "  eval/accuracy\n  eval/reward\n  num_tokens\n  reward\n  step" in capsys.readouterr().out
    )
    for arguments, reason in (
        ([str(tmp_path)], "metrics.jsonl is not there"),
        ([str(folder), "-v", "rewart"], "no run has rewart: did you mean reward?"),
        ([str(folder), "-o", "x"], None),
        (["info"], None),
    ):
        with pytest.raises(SystemExit, match=reason):
            plot.main(arguments)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="has no step yet"):
        plot.main([str(folder)])


def test_accuracy_is_that_of_every_evaluation(tmp_path, capsys):
    """Rewards that are all 0 at the start look like an accuracy there."""
    rows: list[dict[str, float]] = [{"step": 0, "eval/reward": 0, "eval/accuracy": 0}]
    rows += [{"step": 5, "reward": 0.5, "eval/reward": 0.6, "eval/accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot.main([str(tmp_path), "-o", str(tmp_path / "new" / "curve.svg")])
    told = (
        "held-out reward before: 0\nheld-out reward after:  0.6\nheld-out accuracy before: 0.0%\n"
    )
    assert told + "held-out accuracy after:  50.0%\n" in capsys.readouterr().out
    assert (tmp_path / "new" / "curve.svg").is_file()


PROMPT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi?"}]}]


def completions(folder):
    rows = [
        {
            "step": step, "group": number // 2 + 10 * step, "row": number, "prompt": PROMPT,
            "columns": {"answer": "42"},
            "completion": f"c{step}.{number}\u2028\x1b[2J", "reward": None if number == 3 else number / 4,
            "rewards": {"f": number / 4}, "advantage": 0.5, "finish_reason": "stop", "weight_versions": [],
        }
        for step in (1, 2)
        for number in range(4)
    ]  # fmt: skip
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "completions.jsonl").write_text(text + '{"step": 3, "gro')
    return str(folder)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], ["c2.0", "c2.1", "c2.2", "c2.3"]),
        (["--step", "1", "--worst", "2"], ["c1.0", "c1.1"]),
        (["--best", "2"], ["c2.2", "c2.1"]),
        (["--step", "1", "--group", "11"], ["c1.2", "c1.3"]),
    ],
)
def test_show(tmp_path, capsys, options, wanted):
    show.main([completions(tmp_path), *options])
    out = capsys.readouterr().out
    assert re.findall(r"▸ (c\d\.\d)", out) == wanted
    assert "[user] <image>Hi?" in out
    assert r"\u2028\x1b[2J" in out
    assert "answer: 42" in out


def test_show_of_held_out_completions(tmp_path, capsys):
    row = json.loads(Path(completions(tmp_path), "completions.jsonl").read_text().split("\n")[1])
    del row["advantage"]
    held_out = [
        {**row, "set": name, "completion": name, "info": {"turns": 3}}
        for name in ("aime", "math500")
    ]
    (tmp_path / "held_out.jsonl").write_text(
        "".join(json.dumps(sample) + "\n" for sample in held_out)
    )
    show.main([str(tmp_path), "--held-out"])
    out = capsys.readouterr().out
    assert re.findall(r"── (\w+) · step 1", out) == ["aime", "math500"]
    assert "turns: 3" in out
    assert "advantage" not in out
    show.main([str(tmp_path), "--held-out", "--set", "math500"])
    assert re.findall(r"── (\w+) · step 1", capsys.readouterr().out) == ["math500"]


def test_show_refuses(tmp_path):
    with pytest.raises(SystemExit, match="is not there"):
        show.main([str(tmp_path)])
    with pytest.raises(SystemExit, match="has no completions of step 7; its last is 2"):
        show.main([completions(tmp_path), "--step", "7"])
    with pytest.raises(SystemExit):
        show.main([completions(tmp_path), "--worst", "0"])
    (tmp_path / "completions.jsonl").write_text("")
    with pytest.raises(SystemExit, match="has no completions yet"):
        show.main([str(tmp_path)])


ODD = """
    from rollouts.group import Batch, Group, Prompt
    from rollouts.group import Completion
    import torch
    nan, completion = float("nan"), Completion([6], [-1.0], "stop", 1)
    group = Group(Prompt(0, [5], "a", {"x": [nan]}), [completion], ["b"], torch.tensor([[nan]]), [nan], [0.0])
    log.step(2, {"grad_norm": 1e400, "time/train_s": 3.0, "time/wait_s": 1.0}, Batch([group]))
"""


def test_numbers_that_json_has_not(tmp_path):
    """A step without a finite gradient or a reward, and a data set with a gap."""
    code = LOGGED.format(root=str(ROOT), folder=str(tmp_path)).replace(
        "\n    log.close()", f"{ODD}    log.close()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=ENV)
    row = json.loads(
        (tmp_path / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail
    )
    assert [row[name] for name in ("step", "grad_norm", "reward", "rewards/len")] == [
        2,
        None,
        None,
        None,
    ]
    assert row["time/train_s"] == 2.0  # without the wait
    assert json.loads((tmp_path / "completions.jsonl").read_text(), parse_constant=pytest.fail) == {
        "step": 2, "group": 0, "row": 0, "prompt": "a", "columns": {"x": [None]}, "completion": "b", "reward": None,
        "rewards": {"len": None}, "advantage": 0.0, "finish_reason": "stop", "weight_versions": [[1, 0, 1]],
        "info": {},
    }  # fmt: skip


def test_the_first_groups_that_were_begun_are_logged_before_a_checkpoint_is(tmp_path, monkeypatch):
    """Whatever order they were trained in; and what `state` promises is on the disk, however slow that is."""
    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=[len], output_dir=str(tmp_path), logged_groups=1
    )
    completion = Completion([6], [-1.0], "stop", 1)
    groups = [
        Group(Prompt(0, [5], "a", {}), [completion], ["b"], table([[1.0]]), [1.0], [0.0], id=number)
        for number in (3, 1, 2)
    ]
    write = RunLog._write

    def slow(*arguments):
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(RunLog, "_write", slow)
    with process_group(60):
        log = RunLog(config, 4)
        log.step(1, {"time/train_s": 1.0, "time/wait_s": 0.0}, Batch(groups))
        log.state()
        (line,) = (tmp_path / "completions.jsonl").read_text().splitlines()
        log.close()
    assert json.loads(line)["group"] == 1


def test_a_collapse_is_said_in_plain_words(tmp_path, capsys):
    """Once; and not of a policy that is sure because it has learned."""
    config = TrainConfig(
        model_id="m", dataset_id="d", reward_funcs=["os.path.exists"], output_dir=str(tmp_path)
    )
    pace = {
        "time/step_s": 1.0,
        "tokens_per_s/trained": 1.0,
        "idle/trainer": 0.0,
        "idle/servers": 0.0,
    }
    learns = [0.1] * 5 + [0.5, 0.9] * 5
    falls = [0.1] * 5 + [0.05, 0.009] + [0.001] * 8
    sparse = [0.1, 0.0, 0.2, 0.1, 0.1] + [0.0, 0.0, 0.0, 0.0, 0.2] * 3
    unscored = [0.1] * 5 + [float("nan")] * 10
    for rewards, warnings in ((learns, 0), (falls, 1), (sparse, 0), (unscored, 0)):
        terminal = Terminal(10, config)
        for step, reward in enumerate(rewards, 1):
            entropy = 1.0 / 2**step if rewards is learns else 1.0
            terminal.show(step, {"reward": reward, "entropy": entropy, **pace})
        terminal.close()
        assert capsys.readouterr().out.count("has the policy collapsed?") == warnings


def test_an_answer_is_shown_once(tmp_path, capsys):
    sample = {
        "step": 1, "group": 0, "row": 3, "prompt": "1+1=", "columns": {}, "completion": "2", "reward": 1.0,
        "rewards": {"right": 1.0}, "advantage": 0.5, "finish_reason": "stop", "weight_versions": [], "info": {},
    }  # fmt: skip
    lines = [sample] * 3 + [sample | {"completion": "3", "reward": 0.0}]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    show.main([str(tmp_path), "--best", "4"])
    output = capsys.readouterr().out
    assert output.count("▸") == 2
    assert output.count("· x3") == 1
