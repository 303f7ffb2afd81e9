"""What breaks in a run, and that the run does not: servers that go and return, gradients that are not finite."""

import math
import os
import random
import re
import signal
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
from helpers import (
    ENV,
    ROOT,
    answer_in,
    change,
    checkpoints_of,
    finished,
    flags,
    living,
    on_forked_ranks,
    read,
    read_until,
    request_times,
    start_train,
    steps_of,
    trained_groups,
    wait_until,
    write_recipe,
)
from safetensors.torch import load_file

import train
from config import TrainConfig, UserError, parse_args
from rollouts import servers as servers_module
from rollouts.servers import ServerPool, server_urls
from train import main
from vllm_client import ServerError, State


def ill_after(server, version, seconds):
    """Once it has an update, a server answers nothing but errors for so many seconds."""
    gone_s: list[float] = []

    def ill(path):
        if version not in server.versions or path.startswith("/update"):
            return
        if not gone_s or time.monotonic() < gone_s[0] + seconds:
            gone_s.append(time.monotonic())
            time.sleep(0.1)  # so that several requests fail at once
            raise ConnectionError("out of order")

    server.fault = ill


def test_a_server_is_back_before_the_next_sync(stand_in, train_on, tmp_path, capsys):
    """The rest of a long batch finds it with the current weights."""
    one, two = stand_in(0.3), stand_in(0.3)
    ill_after(two, "1", 1.5)
    train_on(one, two, max_steps=2, max_concurrent_requests=1, batch_size=24)
    steps_s = request_times(two, "/update")
    assert len(steps_s) == 4  # versions 0, 1, 1 again, 2
    assert len(request_times(one, "/update")) == 3  # no version twice for the one that stayed
    served = [seconds for seconds in request_times(two) if steps_s[2] < seconds < steps_s[3]]
    assert len(served) > 2
    assert capsys.readouterr().out.count(f"{two.url} is back") == 1
    assert trained_groups(tmp_path) == list(range(48))


@pytest.mark.slow
def test_a_slow_reward_keeps_no_rank_waiting(stand_in, recipe):
    """It takes longer than a collective may."""
    path = recipe(stand_in())
    change(path, "return [sum(", "return __import__('time').sleep(25) or [sum(")
    options = flags(request_timeout=2, server_timeout=3, collective_timeout=20, max_steps=1)
    done = on_forked_ranks(2, ROOT / "train.py", path, *options, *flags(reward_workers=6))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "more", [{}, {"max_staleness": 1, "inflight_updates": False}], ids=["", "drained"]
)
def test_all_servers_gone_are_waited_for(stand_in, train_on, tmp_path, capsys, more):
    server = stand_in(0.05)
    ill_after(server, "2", 3)
    train_on(server, max_steps=4, server_timeout=60, **more)
    output = capsys.readouterr().out
    assert "no rollout server is left: waiting 60 s for one" in output
    assert output.count(f"{server.url} is left out for now") == 1
    assert output.count(f"{server.url} is back") == 1
    assert trained_groups(tmp_path) == list(range(24))


def test_servers_join_and_leave(stand_in, train_on, tmp_path, capsys):
    """One takes the place of the other, whose groups in flight end where they began."""
    one, two = stand_in(0.3), stand_in(0.3)
    names = tmp_path / "servers.txt"
    names.write_text(f"{one.url}\n")
    left: list[int] = []  # requests to the one that has been left

    def swap(path):
        joined = two.versions.keys() - {"default"}
        if "0" in one.versions and not joined and two.url not in names.read_text():
            names.write_text("\n".join([one.url, two.url]))
        if joined and names.exists() and one.url in names.read_text():
            names.write_text(f"{two.url}/\n")
        if joined and not one.trainer:
            left.append(len(request_times(one)))
        if "3" in joined and names.exists():
            names.unlink()

    one.fault = two.fault = swap
    fields = {"max_steps": 5, "max_concurrent_requests": 2, "batch_size": 24, "max_staleness": 1}
    train_on(one, vllm_urls=f"@{names}", **fields)
    assert "5" in two.versions
    assert "5" not in one.versions
    assert len(request_times(one)) <= left[0] + 2  # of groups that it had already
    assert one.trainer == ""
    output = capsys.readouterr().out
    assert f"{one.url} is left out for now: the list does not name it any more" in output
    assert output.count("the servers stay as they are: vllm_urls=@") == 1
    assert trained_groups(tmp_path) == list(range(120))


WRONG = ["localhost:8000", "http://[1", "http://a:port", "http://user:token@a:1", "http://a:1/v1"]


@pytest.mark.parametrize("text", ["", *WRONG, "http://a:1\nhttp://h:80a", "\xff\xfehttp://a:1"])
def test_no_addresses(tmp_path, text):
    """Given by themselves, in a file, and in one that is not there; and no part needs none."""
    names = tmp_path / "servers.txt"
    names.write_text(text, "latin-1")
    for urls in (text.split(), [f"@{names}"], ["@nowhere"]):
        config = TrainConfig(model_id="m", dataset_id="d", reward_funcs=[len], vllm_urls=urls)
        with pytest.raises(UserError, match="^vllm_urls="):
            server_urls(config)


def test_who_is_listed_and_does_not_come_is_left_alone(stand_in, train_on, tmp_path, monkeypatch):
    """While the model loads: nobody, and a server of another trainer, which refuses and is not paused."""
    one, others = stand_in(0.3), stand_in(0.3)
    others.trainer = "another"
    names = tmp_path / "servers.txt"
    names.write_text(f"{one.url}\n")
    build = train.build_policy

    def slow(*arguments):
        names.write_text(f"{one.url}\nhttp://127.0.0.1:9\n{others.url}\n")
        time.sleep(2.5)
        return build(*arguments)

    monkeypatch.setattr(train, "build_policy", slow)
    train_on(one, vllm_urls=f"@{names}", batch_size=24, max_concurrent_requests=2)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert {path for path, _ in others.log} == {"/connect"}
    assert others.trainer == "another"
    assert list(others.versions) == ["default"]


def test_when_none_comes_back_the_run_ends_with_a_checkpoint(stand_in, train_on, tmp_path):
    server = stand_in(0.05)
    ill_after(server, "2", math.inf)
    with pytest.raises(ServerError, match="no rollout server is left: .*out of order"):
        train_on(server, max_steps=4, server_timeout=2)
    assert checkpoints_of(tmp_path / "run") == ["checkpoint-2"]
    server.fault = lambda path: None
    train_on(server, max_steps=4, resume_from_checkpoint="auto")
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert trained_groups(tmp_path) == list(range(24))


def broken(server):
    """One weight is lost on the way."""
    server.versions[server.version]["model.norm.weight"] *= -3


def mislabelled(server):
    """The weights are right, and it says that they are those before."""
    server.versions["0"] = server.versions[server.version]
    server.version = "0"


SPOILT = [(broken, "log-probs differ from the trainer's by"), (mislabelled, "with other weights")]


@pytest.mark.parametrize(("spoil", "reason"), SPOILT)
def test_a_server_that_is_not_the_policy_stays_out(
    stand_in, train_on, tmp_path, capsys, monkeypatch, spoil, reason
):
    """Compared after the sync, on a probe."""
    monkeypatch.setattr(servers_module, "PROBE_S", 0.1)
    one, two = stand_in(0.05), stand_in(0.05)
    gone: set[str] = set()

    def ill(path):
        if "1" in two.versions and path == "/sample" and not gone:
            gone.add(path)
            two.version = "default"
        if gone and path == "/update/placed":
            spoil(two)
            gone.add(path)

    two.fault = ill
    # Else the run might be over before it is back.
    one.fault = lambda path: path == "/sample" and wait_until(lambda: gone != {"/sample"})
    train_on(one, two, max_steps=8)
    output = capsys.readouterr().out
    assert re.search(f"{two.url} is left out for now: .*{reason}", output)
    assert f"{two.url} is back" not in output
    assert trained_groups(tmp_path) == list(range(48))


def test_a_server_that_is_lost_again_and_again_costs_ever_less(
    stand_in, train_on, tmp_path, monkeypatch
):
    """It agrees on the probe, and its long completions differ, as by another rope: no sync a step."""
    monkeypatch.setattr(servers_module, "PROBE_S", 0.2)
    one, two = stand_in(0.1), stand_in(0.1)
    sample = two.sample

    def otherwise(request):
        messages = sample(request)
        if request.priority == 0:
            for message in messages:
                message.logprobs = array("f", [-9.0] * (len(message.logprobs) // 4)).tobytes()
        return messages

    two.sample = otherwise
    started_s = time.monotonic()
    train_on(one, two, max_steps=24, max_concurrent_requests=3)
    elapsed_s = time.monotonic() - started_s
    num_times = len(request_times(two, "/connect")) // 2
    # Waits of 0.2, 0.4, 0.8, ... s
    assert 2 <= num_times <= 2 + math.log2(1 + elapsed_s / 0.2)
    assert trained_groups(tmp_path) == list(range(144))


def test_a_server_that_is_lost_in_an_update_does_not_come_back_in_its_middle(monkeypatch):
    """The rest of the update would go to the new connection, which has not had its beginning."""
    monkeypatch.setattr(servers_module, "PROBE_S", 0.01)
    pool = ServerPool(TrainConfig(model_id="m", dataset_id="d", reward_funcs=[print]))
    (server,) = pool.servers
    server.state = State.SERVING
    tried = threading.Event()
    monkeypatch.setattr(server, "ask", tried.set)
    with pool._updating:
        pool.lose(server, "it does not answer")
        assert not tried.wait(0.5)
    assert tried.wait(20)
    pool.close()


def test_slow_to_sleep_after_a_slow_update(stand_in, train_on, capsys):
    """What one update took does not count in what comes after it."""
    one, two = stand_in(0.0, can_sleep=True), stand_in(0.0, can_sleep=True)
    slow = lambda path: path == "/sleep" or (path == "/update/arrived" and "0" not in two.versions)
    two.fault = lambda path: time.sleep(4.5) if slow(path) else None
    train_on(one, two, max_steps=1, sync_timeout=8.5)
    assert two.naps
    assert "left out" not in capsys.readouterr().out


# -- rewards and gradients ---------------------------------------------------------------------------


def test_an_error_in_a_reward_keeps_what_was_trained(stand_in, recipe, tmp_path):
    server = stand_in(0.05)
    path, flag = recipe(server), tmp_path / "broken"
    change(path, "/ 50 for", f"/ (not __import__('os').path.exists({str(flag)!r})) for")
    server.fault = lambda _: flag.touch() if "3" in server.versions else None
    with pytest.raises(ValueError, match="reward mean_id .*ZeroDivisionError"):
        main(parse_args([path, *flags(max_steps=40)]))
    assert steps_of(tmp_path) == [1, 2, 3]
    assert checkpoints_of(tmp_path / "run") == ["checkpoint-3"]


def test_rewards_that_are_all_none_end_the_run(stand_in, recipe, tmp_path):
    """After the batch, which is a whole step: the weights are saved as what they are."""
    path = recipe(stand_in())
    change(path, "return [sum(ids) / len(ids) / 50 for", "return [None for")
    message = "no reward function gave any completion of this batch a number"
    with pytest.raises(ValueError, match=message):
        main(parse_args([path, *flags(max_steps=5)]))
    assert checkpoints_of(tmp_path / "run") == ["checkpoint-1"]
    assert [row["reward"] for row in read(tmp_path, "metrics")] == [None]


def test_a_gradient_that_is_not_finite_is_skipped(stand_in, train_on, tmp_path, monkeypatch):
    """Steps 2 and 3 give NaN: the weights stay, the steps count; from the fourth on all is well, and also the count."""
    real, calls = train.grpo_loss, []

    def broken(*arguments):
        loss, sums = real(*arguments)
        calls.append(0)
        return (loss * float("nan") if len(calls) in (2, 3, 5) else loss), sums

    monkeypatch.setattr(train, "grpo_loss", broken)
    server = stand_in()
    train_on(server, max_steps=5, lr_scheduler="linear")
    first, second, third, fourth = (server.versions[step] for step in "1234")
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert torch.equal(weight, third[name])
    assert any(not torch.equal(weight, fourth[name]) for name, weight in third.items())
    metrics = read(tmp_path, "metrics")
    assert [row["skipped_steps"] for row in metrics] == [0, 1, 1, 0, 1]
    assert [row["grad_norm"] is None for row in metrics] == [False, True, True, False, True]
    rates = [1e-2 * left / 5 for left in (5, 4, 3, 2, 1)]
    assert [row["learning_rate"] for row in metrics] == pytest.approx(rates)


def test_too_many_skipped_steps_end_the_run(stand_in, train_on, monkeypatch):
    real = train.grpo_loss
    monkeypatch.setattr(train, "MAX_SKIPPED_STEPS", 3)
    monkeypatch.setattr(train, "grpo_loss", lambda *a: (real(*a)[0] * float("inf"), real(*a)[1]))
    server = stand_in()
    with pytest.raises(ValueError, match="3 steps in a row had no finite gradient: lower learning"):
        train_on(server, max_steps=9)
    assert "4" not in server.versions


FULL = """
import sys
def full(*_):
    import torch
    raise torch.OutOfMemoryError('7 GiB\\nmore')
sys.modules['__main__'].grpo_loss = full
"""


def test_out_of_memory_names_the_cure(stand_in, recipe):
    path = recipe(stand_in())
    change(path, "from config", f"{FULL}from config")
    done = on_forked_ranks(0, ROOT / "train.py", path)
    assert done.returncode == 1
    cure = "lower max_tokens_per_gpu, or set gradient_checkpoint or use_fsdp"
    assert done.stderr.endswith(f"error: 7 GiB; {cure}\n")


def test_an_error_without_a_message_is_said_by_its_name():
    code = "from utils import exits\nwith exits(ValueError):\n    raise ValueError"
    done = finished(sys.executable, "-c", code, cwd=ROOT)
    assert (done.returncode, done.stderr) == (1, "error: ValueError()\n")


# -- trainers that are killed ------------------------------------------------------------------------

MORTAL = """
import os, signal, sys
def due(): return os.path.exists({flag!r})
def dying(function):
    def call(*arguments, **more):
        if due(): os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **more)
    return call
trainer = sys.modules["__main__"]
if hasattr(trainer, "grpo_loss"):  # no worker for rewards
    import torch
    open({flag!r} + ".pid", "w").write(str(os.getpid()))
    if {phase!r} == "forward": trainer.grpo_loss = dying(trainer.grpo_loss)
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
    with fake_server(models["untied"], answer_in(0.0)) as server:
        path = write_recipe(folder, models["untied"], [server.url])
        main(parse_args([str(path), *flags(max_steps=5)]))
    return load_file(folder / "run" / "checkpoint-5" / "model.safetensors")


@pytest.mark.parametrize("phase", ["generate", "reward", "forward", "sync", "checkpoint"])
def test_killed_in_any_phase_it_goes_on(stand_in, recipe, tmp_path, undisturbed, phase):
    """kill -9 in the third step; resumed, the weights are those of a run that was not killed, every group once."""
    flag, server = tmp_path / "due", stand_in()
    path = Path(recipe(server))
    plain = path.read_text()
    path.write_text(plain + MORTAL.format(flag=str(flag), phase=phase))

    def ill(asked):
        if "2" in server.versions:
            flag.touch()
            if asked == {"generate": "/sample", "sync": "/update"}.get(phase):
                os.kill(int(Path(f"{flag}.pid").read_text()), signal.SIGKILL)

    server.fault = ill
    command = [str(path), *flags(max_steps=5, save_steps=1, resume_from_checkpoint="auto")]
    done = on_forked_ranks(0, ROOT / "train.py", *command)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    server.fault = lambda _: None
    path.write_text(plain)
    main(parse_args(command))
    weights = load_file(tmp_path / "run" / "checkpoint-5" / "model.safetensors")
    assert all(torch.equal(weight, weights[name]) for name, weight in undisturbed.items())
    trained = sorted({(row["step"], row["group"]) for row in read(tmp_path, "completions")})
    assert trained == [(1 + group // 6, group) for group in range(30)]


@pytest.mark.slow
def test_killed_at_random_every_group_ends_once(stand_in, recipe, tmp_path):
    """A trainer killed three times and servers that die five times, return empty, and break off what they had."""
    rng = random.Random(0)
    one, two = stand_in(0.05), stand_in(0.05)
    fields = {"max_steps": 40, "save_steps": 3, "max_staleness": 1}
    command = [sys.executable, str(ROOT / "train.py"), recipe(one, two), *flags(**fields)]
    command += flags(resume_from_checkpoint="auto")

    def die(server):
        # What is under way ends with other weights, as what comes next would.
        server.version = "default"
        ill_after(server, "default", rng.uniform(0.5, 1.5))

    victims = [one, two, None, one, None, two, None, one]
    steps = sorted(rng.sample(range(1, 39), len(victims)))
    metrics = tmp_path / "run" / "metrics.jsonl"
    run = subprocess.Popen(command, cwd=ROOT, env=ENV)
    for step, victim in zip(steps, victims, strict=True):
        wait_until(lambda step=step: metrics.exists() and len(steps_of(tmp_path)) >= step, 60)
        time.sleep(rng.uniform(0, 0.2))
        if victim:
            die(victim)
        else:
            run.kill()
            assert run.wait(20) == -signal.SIGKILL
            run = subprocess.Popen(command, cwd=ROOT, env=ENV)
    assert run.wait(120) == 0
    completions = {(row["step"], row["group"]) for row in read(tmp_path, "completions")}
    trained = Counter(group for _, group in completions)
    ended = trained + Counter(row["group"] for row in read(tmp_path, "dropped"))
    assert trained.total() == 40 * 6
    assert set(ended.values()) == {1}
    assert sorted(ended) == list(range(len(ended)))


def rank_of(parent, rank):
    """The process of a rank below torchrun."""
    children = [child for child, its_parent, *_ in living() if its_parent == parent]
    is_it = lambda child: f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text()
    (found,) = filter(is_it, children)
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_all(stand_in, recipe, train_on, rank):
    """Within 30 s; and the server then serves the next run."""
    server = stand_in(0.05)
    run = start_train(2, recipe(server), *flags(max_steps=500))
    read_until(run, "step 2/")
    os.kill(rank_of(run.pid, rank), signal.SIGKILL)
    output, _ = run.communicate(timeout=30)
    assert run.returncode != 0
    assert "Signal 9 (SIGKILL)" in output[output.index("Root Cause") :]
    train_on(server, max_steps=1)
    assert "1" in server.versions


@pytest.mark.parametrize(("rank", "told"), [(0, "error on rank 1"), (1, "error")])
def test_a_rank_that_is_stopped_ends_all(stand_in, recipe, rank, told):
    """Nothing is closed: the other rank ends by `collective_timeout`, and torchrun then ends this one."""
    run = start_train(2, recipe(stand_in(0.05)), *flags(max_steps=500, collective_timeout=6))
    read_until(run, "step 2/")
    stopped, other = rank_of(run.pid, rank), rank_of(run.pid, 1 - rank)
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: not Path(f"/proc/{other}").exists(), 40)  # torchrun reaps it
    os.kill(stopped, signal.SIGKILL)  # torchrun does so, 30 s after its SIGTERM
    output, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    assert f"{told}: another rank has not answered" in output


FAILING = """
import os, sys
def fail(*_): raise KeyError('the culprit')
if os.environ.get('RANK') == '1': sys.modules['__main__'].grpo_loss = fail
"""


def test_the_first_cause_is_printed_last(stand_in, recipe):
    """Rank 1 fails: torchrun's report, the last thing on the terminal, has its error."""
    path = Path(recipe(stand_in(0.05)))
    path.write_text(FAILING + path.read_text())
    run = start_train(2, str(path), *flags(max_tokens_per_gpu=60))
    output, _ = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "the culprit" in output[output.index("Root Cause") :]
