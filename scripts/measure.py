"""Measure how dense code is to read: nodes of the syntax tree a line, tricks, names, docstrings.

    python scripts/measure.py [--list] FILE ...

Each figure counts something at which readers stopped and read again. Annotations and docstrings
are left out.

  nodes/line      nodes of the syntax tree for each line that is not blank, a comment or a docstring
  two tricks, %   statements that combine two or more compressing constructs: a comprehension, one
                  in another or with two `for`s, a conditional expression, a walrus, a lambda, a
                  star, `a or b` as a value, a comparison times a number, unpacking,
                  `a, b = x, y`, `a = b = x`
  nested          statements with a comprehension in another, or with two `for`s in one
  walrus, ternary, tuple
                  statements with `:=`, `x if c else y` and `a, b = x, y` in 1,000 lines
  many names      functions with more than 15 names of their own, arguments included
  heavy           statements with 8 operations or more
  blank/100       blank lines inside functions for 100 lines of code
  first line      mean number of words in the first lines of docstrings
  riddles, %      of those first lines that begin with What, Where, Whether, Those, Whatever or How

`--list` names the places.
"""

import ast
import statistics
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterable, Iterator
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
OPERATIONS = (
    ast.Call, ast.IfExp, ast.BoolOp, ast.Compare, ast.BinOp, ast.UnaryOp, ast.Subscript,
    ast.NamedExpr, ast.Lambda, ast.Starred, ast.Await, *COMPREHENSIONS,
)  # fmt: skip
TRICKS = {
    **dict.fromkeys(COMPREHENSIONS, "comprehension"), ast.IfExp: "ternary",
    ast.NamedExpr: "walrus", ast.Lambda: "lambda", ast.Starred: "star",
}  # fmt: skip
COUNTED = {"nested", "walrus", "ternary", "tuple"}  # of the tricks, each by itself


class Counts:
    """Sums over files, from which the figures follow; and the places worth a look."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.sums: Counter[str] = Counter()
        self.first_lines: list[str] = []
        self.places: list[str] = []
        for path in paths:
            self._add(path)

    def _add(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")
        tree = ast.parse(text)
        of_docs = self._strip(tree)
        for number, line in enumerate(lines, 1):
            is_code = line.strip() != "" and not line.strip().startswith("#")
            self.sums["code lines"] += is_code and number not in of_docs

        node: Any
        for node in ast.walk(tree):
            if isinstance(node, ast.expr_context):
                continue
            self.sums["nodes"] += 1
            self.sums["statements"] += is_statement(node)
            if isinstance(node, FUNCTIONS):
                of_function = lines[node.lineno - 1 : node.end_lineno]
                self.sums["blank lines"] += sum(not line.strip() for line in of_function)
            for fault in faults_of(node):
                self.sums[fault] += 1
                self.places.append(f"{path}:{node.lineno}: {fault}")

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
                    lines |= set(range(child.lineno, value.end_lineno + 1))
                    self.first_lines.append(value.value.strip().split("\n")[0])
        return lines

    def figures(self) -> dict[str, float]:
        """The figures by their names."""
        sums = self.sums
        same = ("code lines", "nodes", "nested", "many names", "heavy")
        found: dict[str, float] = {name: sums[name] for name in same}
        found["nodes/line"] = sums["nodes"] / sums["code lines"]
        found["two tricks, %"] = 100 * sums["two tricks"] / sums["statements"]
        for name in ("walrus", "ternary", "tuple"):
            found[name] = 1000 * sums[name] / sums["code lines"]
        found["blank/100"] = 100 * sums["blank lines"] / sums["code lines"]
        num_words = [len(line.split()) for line in self.first_lines] or [0]
        num_riddles = sum(line.startswith(RIDDLES) for line in self.first_lines)
        found["first line"] = statistics.mean(num_words)
        found["riddles, %"] = 100 * num_riddles / len(num_words)
        return found


def is_statement(node: ast.AST) -> bool:
    """True for a statement that may combine things."""
    return isinstance(node, ast.stmt) and not isinstance(node, NO_STATEMENTS)


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without the statements below it."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.stmt, ast.expr_context)):
            yield from own_nodes(child)


def faults_of(node: Any) -> Iterator[str]:
    """What makes a node hard to read: a function as a whole, a statement without those below it."""
    if isinstance(node, FUNCTIONS):
        inside: list[Any] = list(ast.walk(node))
        names = {each.arg for each in inside if isinstance(each, ast.arg)}
        stored = [each for each in inside if isinstance(getattr(each, "ctx", None), ast.Store)]
        names |= {each.id for each in stored if isinstance(each, ast.Name)}
        if len(names) > MANY_NAMES:
            yield "many names"
    elif is_statement(node):
        nodes = list(own_nodes(node))
        tricks = tricks_of(node, nodes)
        yield from sorted(tricks & COUNTED)
        if len(tricks) > 1:
            yield "two tricks"
        num_operations = sum(isinstance(each, OPERATIONS) for each in nodes)
        if num_operations >= HEAVY and not isinstance(node, ast.Raise):
            yield "heavy"


def tricks_of(statement: ast.stmt, nodes: list[ast.AST]) -> set[str]:
    """The kinds of compressing constructs among a statement's nodes."""
    found = {TRICKS[type(node)] for node in nodes if type(node) in TRICKS}
    is_test = isinstance(statement, (ast.If, ast.While, ast.Assert))
    for node in nodes:
        if isinstance(node, COMPREHENSIONS):
            inside = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
            if len(node.generators) > 1 or len(inside) > 1:
                found.add("nested")
        elif isinstance(node, ast.BoolOp) and not is_test:
            found.add("or as a value")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            if any(isinstance(side, ast.Compare) for side in sides):
                found.add("arithmetic with a comparison")

    if isinstance(statement, ast.Assign):
        if isinstance(statement.targets[0], ast.Tuple):
            found.add("tuple" if isinstance(statement.value, ast.Tuple) else "unpacking")
        if len(statement.targets) > 1:
            found.add("a = b = x")
    return found


def broken_limits(figures: dict[str, float]) -> list[str]:
    """The names of figures that are above or below their limit."""
    over = [name for name, limit in LIMITS.items() if figures[name] > limit]
    return over + [name for name, limit in AT_LEAST.items() if figures[name] < limit]


def main() -> None:
    """Command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--list", action="store_true", help="name the places")
    args = parser.parse_args()
    counts = Counts(args.paths)
    if args.list:
        print("\n".join(counts.places))

    figures = counts.figures()
    broken = broken_limits(figures)
    for name, value in figures.items():
        print(f"{name:16s} {value:10.1f}{'   <-- beyond its limit' if name in broken else ''}")


if __name__ == "__main__":
    main()
