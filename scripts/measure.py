"""Measure how dense code is to read: nodes of the syntax tree a line, tricks, names, docstrings.

    python scripts/measure.py [--list] FILE_OR_FOLDER ...

Each figure counts something at which readers stopped and read again. Annotations and docstrings
are left out.

  nodes/line      nodes of the syntax tree for each line that is not blank, a comment or a docstring
  two tricks, %   statements that combine two or more compressing constructs: a comprehension, two
                  `for`s in one, a conditional expression, a walrus, a lambda, a star, `a or b` as a
                  value, a comparison times a number, unpacking, `a, b = x, y`, `a = b = x`
  nested          comprehensions in comprehensions, and those with two `for`s
  walrus, ternary, tuple
                  `:=`, `x if c else y` and `a, b = x, y` (a swap is none) in 1,000 lines
  many names      functions with more than 15 names of their own, arguments included
  heavy           statements with 8 operations or more
  blank/100       blank lines inside functions for 100 lines of code
  first line      mean number of words in the first lines of docstrings
  riddles, %      of those first lines that begin with What, Where, Whether, Those, Whatever or How

`--list` names the places.
"""

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LIMITS = {
    "nodes/line": 6.7, "two tricks, %": 1.0, "nested": 2, "walrus": 2.0, "ternary": 18.0,
    "tuple": 3.0, "many names": 8, "heavy": 8, "first line": 12.0, "riddles, %": 2.0,
}  # fmt: skip
AT_LEAST = {"blank/100": 5.0}

MANY_NAMES = 15
HEAVY = 8
RIDDLES = ("What", "Where", "Whether", "Those", "Whatever", "How")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_STATEMENTS = (
    *FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass, ast.Try, ast.Global,
    ast.Nonlocal,
)  # fmt: skip
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
OPERATIONS = (
    ast.Call, ast.IfExp, ast.BoolOp, ast.Compare, ast.BinOp, ast.UnaryOp, ast.Subscript,
    ast.NamedExpr, ast.Lambda, ast.Starred, ast.Await, *COMPREHENSIONS,
)  # fmt: skip
TRICKS = {
    **dict.fromkeys(COMPREHENSIONS, "comprehension"), ast.IfExp: "ternary",
    ast.NamedExpr: "walrus", ast.Lambda: "lambda", ast.Starred: "star",
}  # fmt: skip
PAIRS = "a, b = x, y"
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


class Counts:
    """Sums over files, from which the figures follow; and the places worth a look."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.first_lines: list[str] = []
        self.places: list[str] = []

    def add(self, path: Path) -> None:
        """Count a file."""
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")
        tree = ast.parse(text)
        of_docs = self._strip(tree)
        self.sums["code lines"] += len(code_lines(text) - of_docs)

        found: list[tuple[int, str]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.expr_context):
                continue
            self.sums["nodes"] += 1
            self.sums["walrus"] += isinstance(node, ast.NamedExpr)
            self.sums["ternary"] += isinstance(node, ast.IfExp)
            if isinstance(node, ast.stmt) and not isinstance(node, NO_STATEMENTS):
                found += [(node.lineno, words) for words in self._add_statement(node)]
            if isinstance(node, FUNCTIONS):
                found += [(node.lineno, words) for words in self._add_function(node, lines)]
        self.places += [f"{path}:{line}: {words}" for line, words in sorted(found)]

    def _strip(self, tree: ast.AST) -> set[int]:
        """Take annotations and docstrings out; returns the lines of the latter."""
        lines: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign):
                node.annotation = ast.Constant(None)  # as there must be one
            elif isinstance(node, ast.arg):
                node.annotation = None
            elif isinstance(node, FUNCTIONS):
                node.returns = None
            body: Any = getattr(node, "body", None)
            for place, child in enumerate(body if isinstance(body, list) else []):
                value: Any = getattr(child, "value", None)
                is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
                if isinstance(child, ast.Expr) and is_text:
                    body[place] = ast.copy_location(ast.Pass(), child)
                    lines |= lines_of(child)
                    if value.value.strip():
                        self.first_lines.append(value.value.strip().split("\n")[0])
        return lines

    def _add_statement(self, statement: ast.stmt) -> list[str]:
        """Count a statement without the blocks below it; returns its faults."""
        faults = []
        nodes = header(statement)
        tricks = tricks_of(statement, nodes)
        self.sums["statements"] += 1

        if len(tricks) > 1:
            self.sums["two tricks"] += 1
            faults.append("two tricks: " + ", ".join(sorted(tricks)))
        if any(is_nested(node) for node in nodes):
            self.sums["nested"] += 1
            faults.append("a comprehension in another, or with two fors")
        if PAIRS in tricks and not is_swap(statement):
            self.sums["tuple"] += 1

        num_operations = sum(isinstance(node, OPERATIONS) for node in nodes)
        if num_operations >= HEAVY and not isinstance(statement, ast.Raise):
            self.sums["heavy"] += 1
            faults.append(f"{HEAVY} operations or more")
        return faults

    def _add_function(self, function: Any, lines: list[str]) -> list[str]:
        """Count a function as a whole; returns its faults."""
        of_function = lines_of(function)
        self.sums["blank lines"] += sum(not lines[number - 1].strip() for number in of_function)

        names = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
        if len(names) <= MANY_NAMES:
            return []
        self.sums["many names"] += 1
        return [f"{function.name} has {len(names)} names"]

    def figures(self) -> dict[str, float]:
        """The figures by their names."""
        sums = self.sums
        found: dict[str, float] = {name: sums[name] for name in ("code lines", "nodes")}
        found["nodes/line"] = sums["nodes"] / sums["code lines"]
        found["two tricks, %"] = 100 * sums["two tricks"] / sums["statements"]
        found["nested"] = sums["nested"]
        for name in ("walrus", "ternary", "tuple"):
            found[name] = 1000 * sums[name] / sums["code lines"]
        for name in ("many names", "heavy"):
            found[name] = sums[name]
        found["blank/100"] = 100 * sums["blank lines"] / sums["code lines"]
        num_words = [len(line.split()) for line in self.first_lines] or [0]
        num_riddles = sum(line.startswith(RIDDLES) for line in self.first_lines)
        found["first line"] = statistics.mean(num_words)
        found["riddles, %"] = 100 * num_riddles / len(num_words)
        return found


def lines_of(node: Any) -> set[int]:
    """The numbers of a node's lines."""
    return set(range(node.lineno, node.end_lineno + 1))


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that are neither blank nor a comment."""
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found |= set(range(token.start[0], token.end[0] + 1))
    return found


def header(statement: ast.stmt) -> list[ast.AST]:
    """The nodes of a statement without the blocks below it."""
    found = []
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr_context):
            continue
        found.append(node)

        has_blocks = isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case))
        for name, value in ast.iter_fields(node):
            if has_blocks and name in BLOCKS:
                continue
            children = value if isinstance(value, list) else [value]
            waiting += [child for child in children if isinstance(child, ast.AST)]
    return found


def tricks_of(statement: ast.stmt, nodes: list[ast.AST]) -> set[str]:
    """The kinds of compressing constructs among a statement's nodes."""
    found = {TRICKS[type(node)] for node in nodes if type(node) in TRICKS}
    is_test = isinstance(statement, (ast.If, ast.While, ast.Assert))
    for node in nodes:
        if isinstance(node, COMPREHENSIONS) and len(node.generators) > 1:
            found.add("two fors")
        elif isinstance(node, ast.BoolOp) and not is_test:
            found.add("or as a value")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            if any(isinstance(side, ast.Compare) for side in sides):
                found.add("arithmetic with a comparison")

    if isinstance(statement, ast.Assign):
        if isinstance(statement.targets[0], ast.Tuple):
            found.add(PAIRS if isinstance(statement.value, ast.Tuple) else "unpacking")
        if len(statement.targets) > 1:
            found.add("a = b = x")
    return found


def is_nested(node: ast.AST) -> bool:
    """True for a comprehension with two `for`s, or with another one inside."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    inside = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
    return len(node.generators) > 1 or len(inside) > 1


def is_swap(statement: Any) -> bool:
    """True for `a, b = b, a`."""
    targets = {ast.dump(target).replace("Store", "Load") for target in statement.targets[0].elts}
    return targets == {ast.dump(value) for value in statement.value.elts}


def counts_of(paths: Iterable[Path]) -> Counts:
    """The counts of files, and of the Python files in folders, without those further below."""
    files: set[Path] = set()
    for path in paths:
        files.update(path.glob("*.py") if path.is_dir() else [path])
    counts = Counts()
    for path in sorted(files):
        counts.add(path)
    return counts


def figures_of(paths: Iterable[Path]) -> dict[str, float]:
    """The figures of files and folders, all of them taken together."""
    return counts_of(paths).figures()


def broken_limits(figures: dict[str, float]) -> list[str]:
    """The names of figures that are above or below their limit."""
    over = [name for name, limit in LIMITS.items() if figures[name] > limit]
    return over + [name for name, limit in AT_LEAST.items() if figures[name] < limit]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--list", action="store_true", help="name the places")
    args = parser.parse_args()
    counts = counts_of(args.paths)
    if args.list:
        print("\n".join(counts.places))

    figures = counts.figures()
    broken = broken_limits(figures)
    for name, value in figures.items():
        bound = f"at most {LIMITS[name]}" if name in LIMITS else ""
        if name in AT_LEAST:
            bound = f"at least {AT_LEAST[name]}"
        print(f"{name:16s} {value:10.1f}   {bound}{'   <-- over' if name in broken else ''}")


if __name__ == "__main__":
    main()
