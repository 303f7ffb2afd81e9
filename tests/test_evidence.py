"""docs/evidence.md, results.md and scale.md against what they cite: results and curves."""

import json
import re

import plot
import pytest
from documents import DOCUMENTS
from helpers import ROOT

PAGE = DOCUMENTS["docs/evidence.md"]
RESULTS = ROOT / "benchmarks" / "results"
RUNS = sorted(path.name for path in (ROOT / "docs" / "runs").iterdir())


def rows_of(name, machine="amd-epyc-2-cores"):
    """The rows of a benchmark's results, which say their commit."""
    result = json.loads((RESULTS / machine / f"{name}.json").read_text())
    assert result["commit"]
    return result["rows"]


def short(value):
    """As the page writes it: 2e-7, 0."""
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def largest(rows, *names):
    """The largest of each figure, as the page writes it."""
    return " | ".join(short(max(row[name] for row in rows)) for name in names)


def test_figures_of_parity():
    rows = [row for row in rows_of("parity") if "why" not in row]
    losses = [row for row in rows if row["part"] == "loss"]
    layouts = [row for row in losses if row["setting"] in ("clips and TIS", "TIS")]
    settings = [row for row in losses if row not in layouts]
    runs = [row for row in rows if row["part"] == "run"]
    assert len({row["setting"] for row in settings}) == 14
    assert len({row["layout"] for row in layouts}) == 8
    assert sorted(row["updates"] for row in runs) == [4, 4, 8, 8]
    for said, figures in (
        ("| 14 settings, in float64", largest(settings, "loss", "gradient")),
        ("| 8 layouts of ranks, micro-batches and updates, in float64", largest(layouts, "loss", "gradient")),
        ("train.py)", largest(runs, "grad_norm", "weights")),
    ):  # fmt: skip
        assert f"{said} | {figures} |" in PAGE


AMD, H200 = "amd-epyc-2-cores", "nvidia-h200"
TABLES = [  # of docs/results.md: the file, the columns that it shows, and how many of the rows
    (AMD, "step_time", "generate_s train_s sync_s step_s", 2),
    (AMD, "end_to_end", "trl_s ours_0_s ours_1_s trl_mb ours_0_mb", 2),
    (AMD, "adapters", "mb sync_s pause_s tokens_per_s", 2),
    (AMD, "prefix_attention", "packed_s grouper_s ours_s speedup bound grouper_mb ours_mb", 4),
    (AMD, "branching", "dense_s tree_s speedup bound", 3),
    (AMD, "async_overlap", "steps_per_s of_bound", 3),
    (AMD, "async_overlap", "steps_per_s accuracy", 3),
    (H200, "prefix-1.5B", "packed_s ours_s speedup bound packed_mb ours_mb", 4),
    (H200, "prefix-8B", "packed_s ours_s speedup bound packed_mb ours_mb", 1),
    (H200, "steps", "seconds mfu_their_way reserved_gib", 3),
    (H200, "steps", "published_seconds published_mfu published_gib", 4),
    (H200, "run", "time/step_s time/train_s time/sync_s sampled_tokens_per_s", 3),
    (H200, "run", "step_s generate_s train_s sync_s sampled_tokens_per_s", 1),
]


def says(line, column, value):
    """Whether a number of the line is the value, rounded; accuracies in percent, memory in MB or GB."""
    factors = {"accuracy": (100,)}.get(column, (1, 0.001) if column.endswith("mb") else (1,))
    for text in re.findall(r"\d[\d,]*(?:\.\d+)?", line):
        unit = 100 if re.search(r",\d00$", text) else 10.0 ** -len(text.partition(".")[2])
        number = float(text.replace(",", ""))
        if number and any(abs(number - factor * value) < 0.501 * unit for factor in factors):
            return True
    return False


@pytest.mark.parametrize(("machine", "name", "columns", "num_rows"), TABLES)
def test_tables_of_results(machine, name, columns, num_rows):
    """The figures of a row of the file stand in one line of a table."""
    lines = [line for line in DOCUMENTS["docs/results.md"].splitlines() if line.startswith("| ")]
    num_found = 0
    for row in rows_of(name, machine):
        figures = [(column, row.get(column)) for column in columns.split()]
        has_all = all(value is not None for _, value in figures)
        num_found += has_all and any(all(says(line, *each) for each in figures) for line in lines)
    assert num_found == num_rows


def test_figures_of_faults():
    """And those in sentences: what was lost in kills, and the work of rank 0 on a token."""
    page = " ".join(DOCUMENTS["docs/results.md"].split())
    undisturbed, disturbed = rows_of("chaos")
    lost, twice = disturbed["groups_lost"], disturbed["groups_twice"]
    said = f"Of {disturbed['groups_trained']} groups {lost} are lost and {twice} trained twice"
    assert said in page
    assert all(f"{100 * row['accuracy']:.1f} %" in page for row in (disturbed, undisturbed))
    rows = [row for row in rows_of("scale") if row["part"] == "tokens"]
    (row,) = [row for row in rows if (row["prompt"], row["completion"]) == (512, 2048)]
    said = f"| rank 0, a completion token | {row['rank_0_us']:.2f} us |"
    assert said in DOCUMENTS["docs/scale.md"]


def curves(svg):
    """The y of every line of a picture, downwards."""
    paths = re.findall(r'<path d="M ([^"z]*)"', svg.read_text(encoding="utf-8"))
    return [[float(point.split()[1]) for point in path.split("L")] for path in paths]


@pytest.mark.parametrize("run", RUNS)
def test_curves(run):
    """The page has a run's picture, and its first and last evaluation."""
    picture = ROOT / "docs" / f"curves-{run.partition('-')[0]}.svg"
    assert f"]({picture.name})" in PAGE
    rows = plot.read_metrics(ROOT / "docs" / "runs" / run)
    held_out = [row for row in rows if "eval/reward" in row]
    is_share = all(row.get("eval/accuracy") == row["eval/reward"] for row in held_out)
    ends = [held_out[place]["eval/reward"] for place in (0, -1)]
    said = " to ".join(f"{100 * end:.1f} %" if is_share else f"{end:.3f}" for end in ends)
    assert said in PAGE.replace("\n", " ")


def test_the_commands_draw_the_pictures(tmp_path, monkeypatch, capsys):
    """Those of the page, again: all words are the same, and all points to a tenth of one."""
    words_of = lambda svg: re.findall(r">([^<>]*)</text>", svg.read_text("utf-8"))
    commands = re.findall(r"^python scripts/plot.py (docs/runs/.*) -o docs/(.*)$", PAGE, re.M)
    drawn_in = [
        (run, name) for words, name in commands for run in re.findall(r"docs/runs/(\S+)", words)
    ]
    assert sorted(drawn_in) == [(run, f"curves-{run.partition('-')[0]}.svg") for run in RUNS]
    monkeypatch.chdir(ROOT)
    for words, name in commands:
        plot.main([*words.split(), "-o", str(tmp_path / name)])
        ours, theirs = tmp_path / name, ROOT / "docs" / name
        assert words_of(ours) == words_of(theirs)
        for drawn, kept in zip(curves(ours), curves(theirs), strict=True):
            assert drawn == pytest.approx(kept, abs=0.1)
