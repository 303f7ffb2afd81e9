"""The README's commands as a person runs them: from another directory, interrupted, failing."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import ENV, ROOT, living, read_until, start_as_a_user


def demo(*options):
    """The demo in a session of its own."""
    return start_as_a_user("bash", ROOT / "scripts" / "demo.sh", *options, start_new_session=True)


def accuracies(output):
    """Those of the held-out problems, before and after, in percent."""
    return [float(value) for value in re.findall(r"held-out accuracy \w+: +(\d+\.\d)%", output)]


def benchmark(name, path, *options):
    """The rows of a benchmark in its short form."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options]
    command += ["--json", str(path)]
    subprocess.run(command, check=True, timeout=3600, env=ENV, capture_output=True)
    result = json.loads(path.read_text())
    assert {"machine", "versions", "commit", "command", "rows"} == set(result)
    return result["rows"]


def left_behind(process):
    """Command lines of what lives in its session."""
    return [command for _, _, session, command in living() if session == process.pid]


def test_a_short_demo_leaves_a_curve_and_a_page_and_no_process():
    process = demo(str(ROOT / "recipes" / "own_loss.py"), "--max_steps", "2")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert len(accuracies(output)) == 2
    (curve,) = [ROOT / name for name in re.findall(r"reward curve: (.*)", output)]
    assert curve.read_bytes().startswith(b"\x89PNG")
    page = curve.with_name("run.html").read_text()
    first = curve.with_name("completions.jsonl").read_text().splitlines()[0]
    tokens = json.dumps(json.loads(first)["tokens"], separators=(",", ":"))
    assert tokens.replace("<", "\\u003c") in page
    assert left_behind(process) == []


def test_ctrl_c_leaves_no_process():
    """SIGINT to the foreground process group, as a terminal sends it, while the server loads."""
    process = demo()
    read_until(process, "starting the rollout server")
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert left_behind(process) == []


def test_the_model_that_is_there_is_found(tmp_path):
    """Without a word to the hub; the model itself is made by hand, as the package has 98 MB."""
    command = [sys.executable, ROOT / "scripts" / "get_smollm.py", "--output", tmp_path]
    assert subprocess.check_output(command, text=True) == f"{tmp_path}\n"


def test_a_wrong_option_is_told_at_once():
    process = demo("--reward_funcs", "no_such_module.f")
    output, _ = process.communicate(timeout=60)
    assert "starting" not in output
    assert process.returncode == 1
    assert "error: reward_funcs=['no_such_module.f']: " in output
    assert left_behind(process) == []


@pytest.mark.slow
def test_the_demo_learns():
    """About four minutes: from at most 60 % of held-out problems to at least 90 %."""
    process = demo()
    output, _ = process.communicate(timeout=2400)
    assert process.returncode == 0, output
    before, after = accuracies(output)
    assert 20 <= before <= 60
    assert after >= 90


def test_training_and_held_out_problems_do_not_overlap():
    from build_tiny import NUM_HELD_OUT, NUM_TRAIN, problems

    train, held_out = problems(NUM_TRAIN, False, 0), problems(NUM_HELD_OUT, True, 0)
    assert len({row["prompt"] for row in train}) == NUM_TRAIN
    for column in ("prompt", "answer"):
        assert not {row[column] for row in train} & {row[column] for row in held_out}
    for row in train + held_out:
        assert row["answer"] == "".join(sorted(row["prompt"].rstrip("=")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("step_time", ["sync_s"]),
        ("prefix_attention", ["ours_s"]),
        ("async_overlap", ["steps_per_s"]),
        ("end_to_end", ["times_as_fast"]),
        ("scale", ["rank_0_us", "sync_cpu_ms_each"]),  # of its two parts
    ],
)
def test_benchmarks_run_quickly(name, figures, tmp_path):
    rows = benchmark(name, tmp_path / "out.json", "--quick")
    assert all(max(row.get(figure, 0) for figure in figures) > 0 for row in rows)
    assert all(any(figure in row for row in rows) for figure in figures)


@pytest.mark.slow
def test_a_run_grows_nowhere(tmp_path):
    """In 40 steps, as counted from outside; memory is for `soak.py` in full."""
    *roles, run = benchmark("soak", tmp_path / "out.json", "--quick")
    assert [row["role"] for row in roles] == ["trainer", "reward workers", "server"]
    for row in roles[:2]:  # the stand-in has a thread for each request
        for kind in ("threads", "files", "sockets"):
            assert row[f"{kind}_late"] <= row[f"{kind}_early"] + 2, row
    assert run["steps"] == 40


@pytest.mark.slow
def test_a_run_survives_its_server_and_its_trainer(tmp_path):
    """About seven minutes: five kills of the real server and three of the trainer, in forty steps."""
    quiet, chaos = benchmark("chaos", tmp_path / "out.json")
    assert (chaos["servers_killed"], chaos["trainers_killed"]) == (5, 3)
    assert chaos["groups_trained"] == 40 * 64
    assert chaos["groups_lost"] == chaos["groups_twice"] == 0
    # Three standard deviations, of two times 512 problems.
    assert abs(chaos["accuracy"] - quiet["accuracy"]) <= 0.08
    assert quiet["bad_inputs_refused"] == quiet["bad_inputs_tried"] > 30
