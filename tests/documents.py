"""README and docs/ as the tests read them: code blocks, commands, inline code, links."""

import re

from helpers import ROOT

README = (ROOT / "README.md").read_text()
TRANSLATION = (ROOT / "README.zh.md").read_text()
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.glob("docs/*.md"))
}
DOCUMENTS = {"README.md": README, **DOCUMENTS}


def blocks(language, text=README):
    """The contents of the code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text=README):
    """The lines of the shell blocks, joined where they go on, without comments: a list for each block."""
    cleaned = (
        re.sub(r"\s+# .*", "", block.replace("\\\n", " "), flags=re.MULTILINE)
        for block in blocks("bash", text)
    )
    return [
        [re.sub(r"\s+", " ", line).strip(" &") for line in block.splitlines()] for block in cleaned
    ]


def inline(text=README):
    """The inline code, in order."""
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [re.sub(r"\s+", " ", span) for span in spans]


def cells(row):
    """The cells of a table's row; an escaped bar is no border."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def metrics():
    """The metrics that docs/metrics.md explains: the first column of its tables with the head `name`."""
    named, is_table_of_metrics = set(), False
    for line in DOCUMENTS["docs/metrics.md"].splitlines():
        if not line.startswith("|"):
            is_table_of_metrics = False
        elif cells(line)[0] == "name":
            is_table_of_metrics = True
        elif is_table_of_metrics:
            named.update(inline(cells(line)[0]))
    return named
