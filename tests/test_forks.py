"""docs/forks.md: its diffs apply to the tree as it is, and its recipes train, in a copy of it."""

import re
import shutil
from operator import attrgetter

import pytest
import torch
from documents import DOCUMENTS, blocks
from fake_server import fake_server
from helpers import RECIPE, ROOT, finished, flags, on_forked_ranks, read

from rollouts.group import ENVIRONMENT, Completion, Group, Prompt
from train import compute_advantages

FORKS = DOCUMENTS["docs/forks.md"]
RECIPES = {
    block.splitlines()[0].removeprefix("# recipes/"): block for block in blocks("python", FORKS)
}
SHOWN, MASKED = blocks("diff", FORKS)
# Of a group: where it is in the run, which it knows before it is dropped or trained.
NOT_FOR_RECIPES = {"id", "advantages", "trained_version", "server", "dropped", "why", "sequences"}
SMALL = RECIPE.replace("TrainConfig(", "__import__('dataclasses').replace(config, ")
LIKE_IT = flags(eval_dataset_id="none", eval_steps=0, drop_zero_advantage=False)
HERE = """
import os, runpy, sys
for name in ("config", "utils"):  # of the trainer beside this copy
    del sys.modules[name]
os.chdir(os.path.dirname(__file__))
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.fixture
def tree(tmp_path):
    """A copy of the trainer, without git."""
    hidden = shutil.ignore_patterns("__pycache__", "outputs")
    for name in ("rollouts", "training", "weights", "server", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=hidden)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    return tmp_path


def apply(diff, tree):
    done = finished("git", "apply", "-", input=diff, cwd=tree)
    assert done.returncode == 0, done.stderr


def says(*words):
    """Answers of a server: of a group's completions the first has `words[0]` words, the next `words[1]`, and so on."""

    def answer(prompt_ids, number):
        ids = [70 + number]
        for _ in range(words[number % len(words)] - 1):
            ids += [4, 70 + number]  # a space between two letters
        return ids, 0.01

    return answer


def train(tree, name, model, server, teacher=None):
    """Three steps of a recipe, with a tiny model; returns what was printed, metrics and completions."""
    recipe = RECIPES[name] + SMALL.format(model=model, urls=[server.url], output="run")
    if teacher:
        recipe = recipe.replace("http://127.0.0.1:8001", teacher.url)
    (tree / "recipes" / name).write_text(recipe)
    (tree / "here.py").write_text(HERE)
    done = on_forked_ranks(0, tree / "here.py", f"recipes/{name}", *LIKE_IT, status=0)
    metrics, completions = (read(tree, name) for name in ("metrics", "completions"))
    assert [row["step"] for row in metrics] == [1, 2, 3]
    return done.stdout, metrics, completions


def moved_advantages(completions):
    """How far, in each group of four, the advantages are from those of its rewards."""
    columns = [[row["reward"], row["advantage"]] for row in completions]
    rewards, given = torch.tensor(columns, dtype=torch.float64).reshape(-1, 4, 2).unbind(2)
    return (given - compute_advantages(rewards)).abs().amax(1).tolist()


@pytest.mark.server
def test_a_number_of_each_completion(tree, models):
    apply(SHOWN, tree)
    with fake_server(models["untied"], says(1, 2, 3, 4)) as server:
        printed, metrics, completions = train(tree, "count_letters.py", models["untied"], server)
    assert [row["info/letters"] for row in metrics] == [4.0] * 3
    assert printed.count("info/letters 4") == 3
    assert [row["info"]["letters"] for row in completions] == [1, 3, 5, 7] * 18


@pytest.mark.server
@pytest.mark.parametrize(("words", "share"), [((1, 2, 3, 4), 0.5), ((1, 2), 1)])
def test_what_does_not_train(tree, models, words, share):
    """Where all are masked there is no gradient; a masked one still counts in the mean of its group."""
    apply(MASKED, tree)
    with fake_server(models["untied"], says(*words)) as server:
        _, metrics, completions = train(tree, "mask_short.py", models["untied"], server)
    assert [row["info/is_masked"] for row in metrics] == [share] * 3
    assert all((row["grad_norm"] > 0) == (share < 1) for row in metrics)
    assert max(moved_advantages(completions)) < 1e-9


@pytest.mark.server
def test_kl_in_the_reward(tree, models):
    """From the second step on, as the policy is the reference before it."""
    with (
        fake_server(models["untied"], says(1, 2, 3, 4)) as server,
        fake_server(models["untied"], says(1)) as teacher,
    ):
        _, metrics, completions = train(tree, "kl_in_reward.py", models["untied"], server, teacher)
    assert all(row["grad_norm"] > 0 for row in metrics)
    moved = moved_advantages(completions)
    assert max(moved[:6]) < 1e-3
    assert min(moved[12:]) > 1e-2


def test_the_kl_by_hand():
    """Two completions of three and two tokens, of which an environment wrote one."""
    ran: dict = {}
    exec(RECIPES["kl_in_reward.py"], ran)
    one = Completion([5, 6, 7], [-1.0, -2.0, 0.0], "stop", [0, 0, ENVIRONMENT])
    two = Completion([8, 9], [-0.5, -3.0], "stop", 0)
    ref_logprobs = torch.tensor([-1.5, -1.0, -torch.inf, -0.5, -4.0])
    group = Group(Prompt(0, [3], "", {}), [one, two], ref_logprobs=ref_logprobs, reward=[1.0, 0.5])
    rewards = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    wanted = torch.tensor([[1.0 - 0.05 * (0.5 - 1.0), 0.5 - 0.05 * 1.0]], dtype=torch.float64)
    torch.testing.assert_close(ran["kl_in_reward"](rewards, [group]), compute_advantages(wanted))


@pytest.mark.house
def test_the_page_names_what_a_group_holds():
    """Each attribute of the table in docs/hooks.md is one of a filled group."""
    section = DOCUMENTS["docs/hooks.md"].partition("## Advantages")[2].partition("## Losses")[0]
    names = re.findall(r"`([\w.]+)`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)))
    assert len(names) > 15
    group = Group(Prompt(0, [3], "", {}), [Completion([5], [-1.0], "stop", 0)])
    for name in names:
        attrgetter(name)(group)
    assert vars(group).keys() - {name.partition(".")[0] for name in names} <= NOT_FOR_RECIPES
