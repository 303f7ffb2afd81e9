"""What breaks in a run, and that the run does not: servers that go and return, gradients that are not finite."""

import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from pathlib import Path

import pytest
import torch
from fake_server import fake_server
from helpers import ENV, RECIPE, ROOT, answer_in, free_port, on_forked_ranks, read, said
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import train
import vllm_client
from config import TrainConfig, UserError, parse_args
from rollouts import servers as servers_module
from rollouts.servers import ServerPool
from train import main
from vllm_client import Server, ServerError, ServerLost
from weights.group import Meeting
from weights.publish import published_weights


def asked(server, path="/sample"):
    return [seconds for name, seconds in server.log if name == path]


def test_a_server_is_back_before_the_next_sync(models, recipe, tmp_path, capsys):
    """The rest of a long batch finds it with the current weights, zeroed and compared before it serves."""
    with (
        fake_server(models["untied"], answer_in(0.3)) as one,
        fake_server(models["untied"], answer_in(0.3)) as two,
    ):
        gone_s: list[float] = []
        taken: list[str] = []
        connect = two.connect

        def noting(request):
            taken.extend(filter(None, [request.trainer]))
            connect(request)

        setattr(two, "connect", noting)  # noqa: B010

        def ill(path):
            if "1" in two.versions and (not gone_s or time.monotonic() < gone_s[0] + 1.5):
                gone_s.append(time.monotonic())
                raise ConnectionError("out of order")

        two.fault = ill
        options = ["--max_steps", "2", "--max_concurrent_requests", "1", "--batch_size", "24"]
        main(parse_args([recipe(one, two), *options]))
        steps = asked(two, "/update")
        assert len(steps) == 4  # versions 0, 1, 1 again, 2
        assert len(taken) == 2
        assert len(asked(one, "/update")) == 3  # no version twice for the one that stayed
        served = [seconds for seconds in asked(two) if steps[2] < seconds < steps[3]]
        assert len(served) > 2
    assert capsys.readouterr().out.count(f"{two.url} is back") == 1
    assert sorted({row["group"] for row in read(tmp_path, "completions")}) == list(range(48))


@pytest.mark.slow
def test_a_slow_reward_keeps_no_rank_waiting(models, tmp_path):
    """It takes longer than a collective may."""
    with fake_server(models["untied"], answer_in(0.01)) as server:
        recipe = tmp_path / "recipe_slow.py"
        text = RECIPE.format(
            model=models["untied"], urls=[server.url], output=str(tmp_path / "run")
        )
        recipe.write_text(
            text.replace(
                "def mean_id(completion_ids, **_):",
                "def mean_id(completion_ids, **_):\n    import time; time.sleep(25)\n   ",
            )
        )
        options = ["--request_timeout", 2, "--server_timeout", 3, "--collective_timeout", 20]
        options += ["--max_steps", 1, "--reward_workers", 6]
        done = on_forked_ranks(2, ROOT / "train.py", recipe, *options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "more", [[], ["--max_staleness", "1", "--inflight_updates", "false"]], ids=["", "drained"]
)
def test_all_servers_gone_are_waited_for(models, recipe, tmp_path, capsys, more):
    with fake_server(models["untied"], answer_in(0.05)) as server:
        gone_s: list[float] = []

        def ill(path):
            if "2" in server.versions and (not gone_s or time.monotonic() < gone_s[0] + 3):
                gone_s.append(time.monotonic())
                raise ConnectionError("out of order")

        server.fault = ill
        options = ["--max_steps", "4", "--server_timeout", "60"]
        main(parse_args([recipe(server), *options, *more]))
    output = capsys.readouterr().out
    assert "no rollout server is left: waiting 60 s for one" in output
    assert f"{server.url} is back" in output
    assert sorted({row["group"] for row in read(tmp_path, "completions")}) == list(range(24))


def test_servers_join_and_leave(models, recipe, tmp_path, capsys):
    """One takes the place of the other, whose groups in flight end where they began."""
    with (
        fake_server(models["untied"], answer_in(0.3)) as one,
        fake_server(models["untied"], answer_in(0.3)) as two,
    ):
        names = tmp_path / "servers.txt"
        names.write_text(f"{one.url}\n")
        left_s: list[float] = []

        def swap(path):
            joined = {name for name in two.versions if name.isdigit()}
            if "0" in one.versions and not joined and two.url not in names.read_text():
                names.write_text("\n".join([one.url, two.url]))
            if joined and not left_s:
                left_s.append(time.monotonic())
                names.write_text(f"{two.url}/\n")
            if "3" in joined and names.exists():
                names.unlink()

        one.fault = two.fault = swap
        options = [
            "--max_steps",
            "5",
            "--max_concurrent_requests",
            "2",
            "--batch_size",
            "24",
            "--max_staleness",
            "1",
        ]
        main(parse_args([recipe(one), *options, "--vllm_urls", f"@{names}"]))
        assert max(two.versions, key=lambda name: int(name) if name.isdigit() else -1) == "5"
        assert "5" not in one.versions
        assert max(asked(one)) < left_s[0] + 2.5  # the list is read each second
        assert one.trainer == ""
    output = capsys.readouterr().out
    assert f"{one.url} is left out for now: the list does not name it any more" in output
    assert output.count("the servers stay as they are: vllm_urls=@") == 1
    assert sorted({row["group"] for row in read(tmp_path, "completions")}) == list(range(120))


@pytest.mark.parametrize("text", [None, "", "localhost:8000"])
def test_a_list_without_addresses(recipe, models, tmp_path, text):
    names = tmp_path / "servers.txt"
    if text is not None:
        names.write_text(text)
    with (
        fake_server(models["untied"], answer_in(0)) as server,
        pytest.raises(UserError, match="vllm_urls=@"),
    ):
        main(parse_args([recipe(server), "--vllm_urls", f"@{names}"]))


def test_when_none_comes_back_the_run_ends_with_a_checkpoint(models, recipe, tmp_path):
    with fake_server(models["untied"], answer_in(0.05)) as server:

        def ill(_):
            if "2" in server.versions:
                raise ConnectionError("out of order")

        server.fault = ill
        options = ["--max_steps", "4", "--server_timeout", "2"]
        with pytest.raises(ServerError, match="no rollout server is left: .*out of order"):
            main(parse_args([recipe(server), *options]))
        assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
        server.fault = lambda path: None
        main(parse_args([recipe(server), "--max_steps", "4", "--resume_from_checkpoint", "auto"]))
    assert [row["step"] for row in read(tmp_path, "metrics")] == [1, 2, 3, 4]
    assert sorted({row["group"] for row in read(tmp_path, "completions")}) == list(range(24))


def broken(server):
    """One weight is lost on the way."""
    server.versions[server.version]["model.norm.weight"] *= -3


def mislabelled(server):
    """The weights are right, and it says that they are those before."""
    server.versions["0"] = server.versions[server.version]
    server.version = "0"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (broken, "its log-probs differ from the trainer's by"),
        (mislabelled, "answers with other weights than it was sent"),
    ],
)
def test_a_server_that_is_not_the_policy_stays_out(
    models, recipe, tmp_path, capsys, monkeypatch, spoil, reason
):
    """Compared after the sync, on a probe."""
    monkeypatch.setattr(servers_module, "PROBE_S", 0.1)
    with (
        fake_server(models["untied"], answer_in(0.05)) as one,
        fake_server(models["untied"], answer_in(0.05)) as two,
    ):
        gone: list[str] = []

        def ill(path):
            if "1" in two.versions and path == "/sample" and not gone:
                gone.append(path)
                two.version = "default"
            if gone and path == "/update/placed":
                spoil(two)

        two.fault = ill
        main(parse_args([recipe(one, two), "--max_steps", "8"]))
    output = capsys.readouterr().out
    assert f"{two.url} is left out for now: {reason}" in output
    assert f"{two.url} is back" not in output
    assert sorted({row["group"] for row in read(tmp_path, "completions")}) == list(range(48))


def test_a_server_that_refuses_in_a_sync_is_left_out(models, recipe, tmp_path, capsys):
    """A 4xx in the middle of a run is that server's trouble, not the run's."""
    with (
        fake_server(models["untied"], answer_in(0.05)) as one,
        fake_server(models["untied"], answer_in(0.05)) as two,
    ):
        two.refused = lambda path: path == "/update" and "1" in two.versions
        main(parse_args([recipe(one, two), "--max_steps", "4"]))
    assert f"{two.url} is left out for now: {two.url}/update answered 403" in (
        capsys.readouterr().out
    )
    assert sorted({row["group"] for row in read(tmp_path, "completions")}) == list(range(24))


def test_an_error_in_a_reward_keeps_what_was_trained(models, recipe, tmp_path):
    with fake_server(models["untied"], answer_in(0.05)) as server:
        path, flag = Path(recipe(server)), tmp_path / "broken"
        path.write_text(
            path.read_text().replace(
                "/ 50 for", f"/ (not __import__('os').path.exists({str(flag)!r})) for"
            )
        )
        server.fault = lambda _: flag.touch() if "3" in server.versions else None
        with pytest.raises(ValueError, match="reward mean_id .*ZeroDivisionError"):
            main(parse_args([str(path), "--max_steps", "40"]))
    assert [row["step"] for row in read(tmp_path, "metrics")] == [1, 2, 3]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]


def test_rewards_that_are_all_none_end_the_run(models, recipe, tmp_path):
    """After the batch, which is a whole step: the weights are saved as what they are."""
    with fake_server(models["untied"], answer_in(0.01)) as server:
        path = Path(recipe(server))
        path.write_text(
            path.read_text().replace("return [sum(ids) / len(ids) / 50 for", "return [None for")
        )
        with pytest.raises(
            ValueError, match="no reward function gave any completion of this batch a number"
        ):
            main(parse_args([str(path), "--max_steps", "5"]))
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
    assert [row["reward"] for row in read(tmp_path, "metrics")] == [None]


def test_a_gradient_that_is_not_finite_is_skipped(models, recipe, tmp_path, monkeypatch):
    """Steps 2 and 3 give NaN: the weights stay, the steps count; from the fourth on all is well, and also the count."""
    real, calls = train.grpo_loss, []

    def broken(*arguments):
        loss, sums = real(*arguments)
        calls.append(0)
        return (loss * float("nan") if len(calls) in (2, 3, 5) else loss), sums

    monkeypatch.setattr(train, "grpo_loss", broken)
    with fake_server(models["untied"], answer_in(0.01)) as server:
        options = ["--max_steps", "5", "--lr_scheduler", "linear"]
        main(parse_args([recipe(server), *options]))
        for name, weight in server.versions["1"].items():
            assert torch.equal(weight, server.versions["2"][name])
            assert torch.equal(weight, server.versions["3"][name])
        assert any(
            not torch.equal(w, server.versions["4"][n]) for n, w in server.versions["3"].items()
        )
    metrics = read(tmp_path, "metrics")
    assert [row["skipped_steps"] for row in metrics] == [0, 1, 1, 0, 1]
    assert [row["grad_norm"] is None for row in metrics] == [False, True, True, False, True]
    assert [row["learning_rate"] for row in metrics] == pytest.approx(
        [1e-2 * left / 5 for left in (5, 4, 3, 2, 1)]
    )


def test_too_many_skipped_steps_end_the_run(models, recipe, monkeypatch):
    real = train.grpo_loss
    monkeypatch.setattr(train, "MAX_SKIPPED_STEPS", 3)
    monkeypatch.setattr(train, "grpo_loss", lambda *a: (real(*a)[0] * float("inf"), real(*a)[1]))
    with (
        fake_server(models["untied"], answer_in(0.01)) as server,
        pytest.raises(
            ValueError, match="3 steps in a row had no finite gradient: lower learning_rate"
        ),
    ):
        main(parse_args([recipe(server), "--max_steps", "9"]))
    assert "4" not in server.versions


def test_out_of_memory_names_the_cure(models, recipe, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("tried to allocate 7 GiB")

    monkeypatch.setattr(train, "grpo_loss", full)
    with (
        fake_server(models["untied"], lambda ids, number: (said(ids, number), 0.0)) as server,
        pytest.raises(torch.OutOfMemoryError),
    ):
        main(parse_args([recipe(server)]))
    code = "import torch; from utils import exits\nwith exits({ValueError: '', torch.OutOfMemoryError: '; lower'}):\n"
    code += "    raise torch.OutOfMemoryError('tried to allocate 7 GiB\\nmore')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "error: tried to allocate 7 GiB; lower\n")


def test_an_error_without_a_message_is_said_by_its_name():
    code = "from utils import exits\nwith exits({ValueError: ''}):\n    raise ValueError"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "error: ValueError()\n")


MORTAL = """
import os, signal, sys, torch
def due(): return os.path.exists({flag!r})
def dying(function):
    def call(*arguments, **more):
        if due(): os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **more)
    return call
trainer = sys.modules["__main__"]
if hasattr(trainer, "grpo_loss"): open({flag!r} + ".pid", "w").write(str(os.getpid()))
if {phase!r} == "forward" and hasattr(trainer, "grpo_loss"): trainer.grpo_loss = dying(trainer.grpo_loss)
if {phase!r} == "checkpoint": torch.save = dying(torch.save)
def mean_id(completion_ids, **_):
    if {phase!r} == "reward" and due(): os.kill(os.getppid(), signal.SIGKILL)
    return [sum(ids) / len(ids) / 50 for ids in completion_ids]
config = __import__("dataclasses").replace(config, reward_funcs=[mean_id])
"""


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    """The weights after five steps that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    path = folder / "recipe_undisturbed.py"
    with fake_server(models["untied"], answer_in(0.01)) as server:
        path.write_text(
            RECIPE.format(model=models["untied"], urls=[server.url], output=str(folder / "run"))
        )
        main(parse_args([str(path), "--max_steps", "5"]))
    return load_file(folder / "run" / "checkpoint-5" / "model.safetensors")


@pytest.mark.parametrize("phase", ["generate", "reward", "forward", "sync", "checkpoint"])
def test_killed_in_any_phase_it_goes_on(models, recipe, tmp_path, undisturbed, phase):
    """kill -9 in the third step; resumed, the weights are those of a run that was not killed, every group once."""
    flag = tmp_path / "due"
    with fake_server(models["untied"], answer_in(0.01)) as server:
        path = Path(recipe(server))
        plain = path.read_text()
        path.write_text(plain + MORTAL.format(flag=str(flag), phase=phase))

        def ill(asked):
            if "2" in server.versions:
                flag.touch()
                if asked == {"generate": "/sample", "sync": "/update"}.get(phase):
                    os.kill(int(Path(f"{flag}.pid").read_text()), signal.SIGKILL)

        server.fault = ill
        options = [
            str(path),
            "--max_steps",
            "5",
            "--save_steps",
            "1",
            "--resume_from_checkpoint",
            "auto",
        ]
        done = on_forked_ranks(0, ROOT / "train.py", *options)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        server.fault = lambda _: None
        path.write_text(plain)
        main(parse_args(options))
        weights = load_file(tmp_path / "run" / "checkpoint-5" / "model.safetensors")
    assert all(torch.equal(weight, weights[name]) for name, weight in undisturbed.items())
    assert sorted({(row["step"], row["group"]) for row in read(tmp_path, "completions")}) == [
        (1 + group // 6, group) for group in range(30)
    ]


@pytest.mark.slow
def test_killed_at_random_every_group_ends_once(models, recipe, tmp_path):
    """A trainer killed three times and servers that die five times, return empty, and break off what they had."""
    rng = random.Random(0)
    with (
        fake_server(models["untied"], answer_in(0.05)) as one,
        fake_server(models["untied"], answer_in(0.05)) as two,
    ):
        options = [
            recipe(one, two),
            "--max_steps",
            "40",
            "--save_steps",
            "3",
            "--max_staleness",
            "1",
        ]
        command = [
            sys.executable,
            str(ROOT / "train.py"),
            *options,
            "--resume_from_checkpoint",
            "auto",
        ]

        def die(server):
            back_s = time.monotonic() + rng.uniform(0.5, 1.5)
            server.version = (
                "default"  # what is under way ends with other weights, as what comes next would
            )

            def ill(_):
                if time.monotonic() < back_s:
                    raise ConnectionError("out of order")

            server.fault = ill

        victims = [one, two, None, one, None, two, None, one]
        run = subprocess.Popen(command, cwd=ROOT, env=ENV)
        for step, victim in zip(
            sorted(rng.sample(range(1, 39), len(victims))), victims, strict=True
        ):
            while (
                not (tmp_path / "run" / "metrics.jsonl").exists()
                or len(read(tmp_path, "metrics")) < step
            ):
                assert run.poll() is None
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 0.2))
            if victim:
                die(victim)
            else:
                run.kill()
                assert run.wait(20) == -signal.SIGKILL
                run = subprocess.Popen(command, cwd=ROOT, env=ENV)
        assert run.wait(120) == 0
    trained = Counter(
        group for _, group in {(r["step"], r["group"]) for r in read(tmp_path, "completions")}
    )
    ended = trained + Counter(row["group"] for row in read(tmp_path, "dropped"))
    assert trained.total() == 40 * 6
    assert set(ended.values()) == {1}
    assert sorted(ended) == list(range(len(ended)))


def torchrun_of(path, *options):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--master_port",
        str(free_port()),
    ]
    command += [str(ROOT / "train.py"), path, *options]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def rank_of(parent, rank):
    """The process of a rank below torchrun."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (found,) = [
        c
        for c in children
        if f"RANK={rank}".encode() in Path(f"/proc/{c}/environ").read_bytes().split(b"\0")
    ]
    return int(found)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_all(models, recipe, rank):
    """Within 30 s; and the server then serves the next run."""
    with fake_server(models["untied"], answer_in(0.05)) as server:
        path = recipe(server)
        run = torchrun_of(path, "--max_steps", "500")
        assert run.stdout
        for line in run.stdout:
            if line.startswith("step 2/"):
                break
        os.kill(rank_of(run.pid, rank), signal.SIGKILL)
        killed_s = time.monotonic()
        output, _ = run.communicate(timeout=60)
        assert time.monotonic() - killed_s < 30
        assert run.returncode != 0
        assert "Signal 9 (SIGKILL)" in output[output.index("Root Cause") :]
        main(parse_args([path, "--max_steps", "1"]))
    assert "1" in server.versions


@pytest.mark.parametrize(
    ("rank", "cause"),
    [
        (0, "error on rank 1: another rank has not answered"),
        (1, "error on rank 0: another rank has not answered"),
    ],
)
def test_a_rank_that_is_stopped_ends_all(models, recipe, rank, cause):
    """Nothing is closed: the other rank ends by `collective_timeout`, and torchrun then ends this one."""
    with fake_server(models["untied"], answer_in(0.05)) as server:
        options = ["--max_steps", "500", "--collective_timeout", "6"]
        run = torchrun_of(recipe(server), *options)
        assert run.stdout
        for line in run.stdout:
            if line.startswith("step 2/"):
                break
        stopped, other = rank_of(run.pid, rank), rank_of(run.pid, 1 - rank)
        os.kill(stopped, signal.SIGSTOP)
        stopped_s = time.monotonic()
        while Path(f"/proc/{other}").exists():  # torchrun reaps it
            assert time.monotonic() < stopped_s + 40
            time.sleep(0.1)
        os.kill(stopped, signal.SIGKILL)  # torchrun does so, 30 s after its SIGTERM
        output, _ = run.communicate(timeout=60)
        assert run.returncode != 0
        assert cause in output


def test_a_rank_that_refuses_a_model_alone_ends_all(models, recipe):
    """The other one waits for it in a collective of the comparison, up to `collective_timeout`."""
    with fake_server(models["untied"], answer_in(0.05)) as server:
        path = Path(recipe(server))
        alone = (
            "import torch, torch.distributed as dist, training.model\n"
            "training.model.ALONE_S = 3.0\n"
            "def attach(model, **_):\n"
            "    group = dist.new_group()\n"
            "    if dist.get_rank() == 1: raise ValueError('the culprit')\n"
            "    dist.all_reduce(torch.ones(1), group=group)\n"
            "training.model.attach = attach\n"
        )
        path.write_text(alone + path.read_text())
        started_s = time.monotonic()
        done = on_forked_ranks(2, ROOT / "train.py", path, "--collective_timeout", 120)
    assert done.returncode == 1
    assert time.monotonic() - started_s < 100
    assert "ValueError: the culprit" in done.stderr


def test_the_first_cause_is_printed_last(models, recipe):
    """Rank 1 fails: torchrun's report, the last thing on the terminal, has its error."""
    with fake_server(models["untied"], answer_in(0.05)) as server:
        path = Path(recipe(server))
        broken = (
            "import os, sys\nif os.environ.get('RANK') == '1':\n"
            "    sys.modules['__main__'].grpo_loss = lambda *_: (_ for _ in ()).throw(KeyError('the culprit'))\n"
        )
        path.write_text(broken + path.read_text())
        run = torchrun_of(str(path), "--max_tokens_per_gpu", "60")
        output, _ = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "the culprit" in output[output.index("Root Cause") :]


def test_an_address_that_is_listed_while_the_model_loads_waits(
    models, recipe, tmp_path, monkeypatch
):
    """Nobody is there: the run begins with the servers of its start."""
    with fake_server(models["untied"], answer_in(0.05)) as one:
        names = tmp_path / "servers.txt"
        names.write_text(f"{one.url}\n")
        build = train.build_policy

        def slow(*arguments):
            names.write_text(f"{one.url}\nhttp://127.0.0.1:9\n")
            time.sleep(2.5)
            return build(*arguments)

        monkeypatch.setattr(train, "build_policy", slow)
        main(parse_args([recipe(one), "--vllm_urls", f"@{names}"]))
    assert len(read(tmp_path, "metrics")) == 3


def test_a_listed_server_of_another_trainer_is_left_alone(models, recipe, tmp_path):
    """It refuses this one, and is not paused."""
    with (
        fake_server(models["untied"], answer_in(0.3)) as one,
        fake_server(models["untied"], answer_in(0.3)) as others,
    ):
        others.trainer = "another"
        names = tmp_path / "servers.txt"
        names.write_text(f"{one.url}\n")

        def add(_):
            if "0" in one.versions:
                names.write_text(f"{one.url}\n{others.url}\n")

        one.fault = add
        options = ["--batch_size", "24", "--max_concurrent_requests", "2"]
        main(parse_args([recipe(one), "--vllm_urls", f"@{names}", *options]))
    asked = {path for path, _ in others.log}
    assert asked == {"/connect"}
    assert others.trainer == "another"
    assert list(others.versions) == ["default"]


@pytest.mark.parametrize(
    "text", [b"\xff\xfehttp://127.0.0.1:9\n", b"http://127.0.0.1:9\nhttp://h:80a\n"]
)
def test_a_list_that_cannot_be_read_changes_nothing(tmp_path, text, capsys):
    names = tmp_path / "servers.txt"
    names.write_text("http://127.0.0.1:9\n")
    client = ServerPool(
        parse_args(
            [
                "--model_id=m",
                "--dataset_id=d",
                "--reward_funcs=os.path.exists",
                f"--vllm_urls=@{names}",
            ]
        )
    )
    names.write_bytes(text)
    client._read_list()
    assert [server.url for server in client.servers] == ["http://127.0.0.1:9"]
    assert "the servers stay as they are: vllm_urls=@" in capsys.readouterr().out


def test_a_server_that_is_lost_in_an_update_does_not_come_back_in_its_middle(monkeypatch):
    """The rest of the update would go to the new connection, which has not had its beginning."""
    monkeypatch.setattr(servers_module, "PROBE_S", 0.01)
    pool = ServerPool(
        parse_args(["--model_id=m", "--dataset_id=d", "--reward_funcs=os.path.exists"])
    )
    pool.version = 0
    tried = threading.Event()
    monkeypatch.setattr(pool, "_take_back", lambda _: tried.set())
    with pool._updating:
        threading.Thread(target=pool._watch, daemon=True).start()
        assert not tried.wait(0.5)
    assert tried.wait(20)
    pool.close()


def test_a_server_that_vanishes_in_an_update_holds_no_thread():
    """Its host is gone, or the way to it: there is no answer, and nothing that tells so."""
    meeting = Meeting("127.0.0.1", 9, "secret", "gloo", 2, 1, timeout_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_client, "ANSWER_TIMEOUT_S", 0.5)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started_s = time.monotonic()
        with pytest.raises(ServerLost, match="timed out"):
            Server(url, 600.0).update(1, meeting)
        assert time.monotonic() - started_s < 20


def test_an_update_that_is_answered_with_a_page_ends_no_run(models, recipe, tmp_path, capsys):
    """As of a proxy, with status 200."""
    with (
        fake_server(models["untied"], answer_in(0.05)) as one,
        fake_server(models["untied"], answer_in(0.05)) as two,
    ):
        update = two.update
        setattr(two, "update", lambda r: "<html>" if r.weight_version == "2" else update(r))  # noqa: B010
        main(parse_args([recipe(one, two), "--max_steps", "4"]))
    assert f"{two.url} is left out for now" in capsys.readouterr().out
    assert sorted({row["group"] for row in read(tmp_path, "completions")}) == list(range(24))


def test_a_server_that_is_lost_again_and_again_costs_ever_less(
    models, recipe, tmp_path, monkeypatch
):
    """It agrees on the probe, and its long completions differ, as by another rope: no sync a step."""
    monkeypatch.setattr(servers_module, "PROBE_S", 0.2)
    with (
        fake_server(models["untied"], answer_in(0.1)) as one,
        fake_server(models["untied"], answer_in(0.1)) as two,
    ):
        sample = two.sample

        def otherwise(request):
            messages = sample(request)
            if request.priority == 0:
                for message in messages:
                    message.logprobs = array("f", [-9.0] * (len(message.logprobs) // 4)).tobytes()
            return messages

        setattr(two, "sample", otherwise)  # noqa: B010
        started_s = time.monotonic()
        main(parse_args([recipe(one, two), "--max_steps", "24", "--max_concurrent_requests", "3"]))
        elapsed_s = time.monotonic() - started_s
    num_times = len(asked(two, "/connect")) // 2
    # Waits of 0.2, 0.4, 0.8, ... s
    assert 2 <= num_times <= 2 + math.log2(1 + elapsed_s / 0.2)
    assert sorted({row["group"] for row in read(tmp_path, "completions")}) == list(range(144))


def test_slow_to_sleep_after_a_slow_update(models, capsys):
    """What one update took does not count in what comes after it."""
    with (
        fake_server(models["untied"], answer_in(0.0), can_sleep=True) as one,
        fake_server(models["untied"], answer_in(0.0), can_sleep=True) as two,
    ):
        config = TrainConfig(
            model_id=models["untied"], dataset_id="d", reward_funcs=[print], max_staleness=0,
            vllm_urls=[one.url, two.url], sync_timeout=4.0,
        )  # fmt: skip
        pool = ServerPool(config)
        pool.wait_until_ready()
        pool.connect(torch.device("cpu"))
        two.fault = lambda path: time.sleep(2.5) if path in ("/update/arrived", "/sleep") else None
        policy = AutoModelForCausalLM.from_pretrained(models["untied"])
        for server in pool.update_weights(published_weights(policy), 0):
            pool.admit(server)
        pool.fall_asleep()
        assert len(pool.serving) == 2
        pool.close()
    assert "left out" not in capsys.readouterr().out
