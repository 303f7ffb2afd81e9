"""docs/evidence.md against what it cites: tests, results of benchmarks, curves; and the picture of the house."""

import json
import re
import statistics
import sys

import pytest
from documents import DOCUMENTS
from helpers import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import picture
import plot

PAGE = DOCUMENTS["docs/evidence.md"]
RESULT = ROOT / "benchmarks" / "results" / "amd-epyc-2-cores" / "parity.json"
RUNS = sorted(path.name for path in (ROOT / "docs" / "runs").iterdir())


def test_the_tests_that_it_names_are_there():
    named = re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/\w+\.py)\)", PAGE)
    assert len(named) > 20
    assert len(named) == len(re.findall(r"`test_\w+`", PAGE))
    for name, file in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), (name, file)


def short(value):
    """As the page writes it: 2e-7, 0."""
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def parity_lines():
    """The page's tables of parity.json: settings, layouts, runs, and what differs."""
    rows = json.loads(RESULT.read_text())["rows"]
    losses = [row for row in rows if row["part"] == "loss" and "why" not in row]
    by_setting = {
        name: [row for row in losses if row["setting"] == name]
        for name in {r["setting"] for r in losses}
    }
    layouts = [row for name in ("clips and TIS", "TIS") for row in by_setting.pop(name)]
    lines = [
        f"| {name} | {short(max(row['loss'] for row in of_it))} | {short(max(row['gradient'] for row in of_it))} |"
        for name, of_it in by_setting.items()
    ]
    loss, gradient = (short(max(row[name] for row in layouts)) for name in ("loss", "gradient"))
    num = len({row["layout"] for row in layouts})
    lines.append(f"| {num} layouts of ranks, micro-batches and updates | {loss} | {gradient} |")
    for row in rows:
        if row["part"] == "run":
            figures = (short(row[name]) for name in ("grad_norm", "weights", "update"))
            lines.append(f"| {row['setting']} | {row['updates']} | {' | '.join(figures)} |")
    return lines


def test_figures_of_parity():
    lines = parity_lines()
    assert len(lines) == 14 + 1 + 4
    assert [line for line in lines if line not in PAGE] == []


def curves(svg):
    """The y of every line of a picture, downwards."""
    paths = re.findall(r'<path d="M ([^"z]*)"', svg.read_text(encoding="utf-8"))
    return [[float(point.split()[1]) for point in path.split("L")] for path in paths]


@pytest.mark.parametrize("run", RUNS)
def test_curves(run):
    """`docs/runs/<name>` or `<name>-<seed>` is what the picture shows; the page has its first and last evaluation."""
    name = run.partition("-")[0]
    picture_of_it = ROOT / "docs" / f"curves-{name}.svg"
    assert picture_of_it.stat().st_size < 50_000
    assert f"](curves-{name}.svg)" in PAGE
    rows = plot.read_metrics(ROOT / "docs" / "runs" / run)
    kept = (ROOT / "docs" / "runs" / run).rglob("*.*")
    assert sum(path.stat().st_size for path in kept) < 600_000
    held_out = [row for row in rows if "eval/reward" in row]
    is_share = all(row.get("eval/accuracy") == row["eval/reward"] for row in held_out)
    ends = [
        f"{100 * v:.1f} %" if is_share else f"{v:.3f}"
        for v in (held_out[i]["eval/reward"] for i in (0, -1))
    ]
    assert " to ".join(ends) in PAGE.replace("\n", " ")
    for metric in ("reward", "eval/reward"):
        values = [row[metric] for row in rows if metric in row]
        found = [curve for curve in curves(picture_of_it) if len(curve) == len(values)]
        assert any(
            statistics.correlation(curve, values) < -0.9999 for curve in found if len({*curve}) > 1
        ), metric


def test_the_commands_draw_the_pictures(tmp_path, monkeypatch, capsys):
    """Those of the page, again: all words are the same, and all points to a tenth of one."""
    commands = re.findall(r"^python scripts/plot.py (docs/runs/.*) -o docs/(.*)$", PAGE, re.M)
    assert sorted(name for _, name in commands) == sorted(
        {f"curves-{run.partition('-')[0]}.svg" for run in RUNS}
    )
    monkeypatch.chdir(ROOT)
    for words, name in commands:
        plot.main([*words.split(), "-o", str(tmp_path / name)])
        texts = [
            re.findall(r">([^<>]*)</text>", (folder / name).read_text(encoding="utf-8"))
            for folder in (tmp_path, ROOT / "docs")
        ]
        assert texts[0] == texts[1]
        drawn, kept = curves(tmp_path / name), curves(ROOT / "docs" / name)
        assert len(drawn) == len(kept)
        for ours, theirs in zip(drawn, kept, strict=True):
            assert ours == pytest.approx(theirs, abs=0.1)


def test_the_house_is_what_the_script_draws():
    drawn = picture.draw()
    assert (ROOT / "docs" / "house.svg").read_text(encoding="utf-8") == drawn
    assert len(drawn) < 18_000
    for x, y, _, height, gap, _, files in picture.COLUMNS:
        for left, top, width, depth in picture.FLOORS.values():
            if left <= x < left + width and top <= y < top + depth:
                assert y + len(files) * (height + gap) - gap < top + depth, files
    names = re.findall(r">([\w]+\.py)<", drawn)
    rooms = ("", "rollouts", "training", "weights", "server")
    core = {path.name for room in rooms for path in (ROOT / room).glob("*.py")} - {"__init__.py"}
    assert set(names) == core
