"""Measure how dense code is to read: nodes of the syntax tree a line, tricks, names, docstrings.

    python scripts/measure.py [--limits] [--list] [--each] FILE_OR_FOLDER ...

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

`--limits` compares with LIMITS and AT_LEAST, and exits with 1 where one is broken. `--list` names
the places.
"""

import argparse
import ast
import io
import statistics
import sys
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMITS = {
    "nodes/line": 6.7, "two tricks, %": 1.0, "nested": 2, "walrus": 2.0, "ternary": 18.0,
    "tuple": 3.0, "many names": 8, "heavy": 8, "longest line": 100, "first line": 12.0,
    "riddles, %": 2.0,
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


class Strip(ast.NodeTransformer):
    """Takes docstrings and annotations out, and keeps the docstrings with their lines."""

    def __init__(self) -> None:
        self.lines: set[int] = set()
        self.docs: list[str] = []

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Put `pass` in the place of a docstring."""
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            self.lines |= lines_of(node)
            self.docs.append(node.value.value)
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Leave an annotation of one node, as there must be one."""
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Drop the annotation of an argument."""
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        """Drop the annotation of a result."""
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef


@dataclass
class Counts:
    """Sums over files, from which the figures follow; and the places worth a look."""

    code_lines: int = 0
    nodes: int = 0
    statements: int = 0
    tricky: int = 0
    nested: int = 0
    walrus: int = 0
    ternary: int = 0
    tuples: int = 0
    many_names: int = 0
    heavy: int = 0
    blank_lines: int = 0
    longest_line: int = 0
    first_lines: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Count a file."""
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")
        strip = Strip()
        tree = strip.visit(ast.parse(text))

        self.code_lines += len(code_lines(text) - strip.lines)
        self.longest_line = max(self.longest_line, *map(len, lines))
        for doc in strip.docs:
            if doc.strip():
                self.first_lines.append(doc.strip().split("\n")[0])

        found: list[tuple[int, str]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.expr_context):
                continue
            self.nodes += 1

            self.walrus += isinstance(node, ast.NamedExpr)
            self.ternary += isinstance(node, ast.IfExp)
            if isinstance(node, ast.stmt) and not isinstance(node, NO_STATEMENTS):
                found += [(node.lineno, words) for words in self._add_statement(node)]
            if isinstance(node, FUNCTIONS):
                found += [(node.lineno, words) for words in self._add_function(node, lines)]

        self.places += [f"{path}:{line}: {words}" for line, words in sorted(found)]

    def _add_statement(self, statement: ast.stmt) -> list[str]:
        """Count a statement without the blocks below it; returns its faults."""
        faults = []
        nodes = header(statement)
        tricks = tricks_of(statement, nodes)
        self.statements += 1

        if len(tricks) > 1:
            self.tricky += 1
            faults.append("two tricks: " + ", ".join(sorted(tricks)))
        if any(is_nested(node) for node in nodes):
            self.nested += 1
            faults.append("a comprehension in another, or with two fors")
        if PAIRS in tricks and not is_swap(statement):
            self.tuples += 1

        num_operations = sum(isinstance(node, OPERATIONS) for node in nodes)
        if num_operations >= HEAVY and not isinstance(statement, ast.Raise):
            self.heavy += 1
            faults.append(f"{HEAVY} operations or more")
        return faults

    def _add_function(self, function: Any, lines: list[str]) -> list[str]:
        """Count a function as a whole; returns its faults."""
        self.blank_lines += sum(not lines[number - 1].strip() for number in lines_of(function))

        names = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)

        if len(names) <= MANY_NAMES:
            return []
        self.many_names += 1
        return [f"{function.name} has {len(names)} names"]

    def figures(self) -> dict[str, float]:
        """The figures by their names."""
        thousands = self.code_lines / 1000
        num_words = [len(line.split()) for line in self.first_lines]
        num_riddles = sum(line.startswith(RIDDLES) for line in self.first_lines)
        return {
            "code lines": self.code_lines,
            "nodes": self.nodes,
            "nodes/line": self.nodes / self.code_lines,
            "two tricks, %": 100 * self.tricky / self.statements,
            "nested": self.nested,
            "walrus": self.walrus / thousands,
            "ternary": self.ternary / thousands,
            "tuple": self.tuples / thousands,
            "many names": self.many_names,
            "heavy": self.heavy,
            "blank/100": 100 * self.blank_lines / self.code_lines,
            "longest line": self.longest_line,
            "first line": statistics.mean(num_words) if num_words else 0.0,
            "riddles, %": 100 * num_riddles / max(len(num_words), 1),
        }


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


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Files as they are, and the Python files in folders, without those further below."""
    found: set[Path] = set()
    for path in paths:
        found.update(path.glob("*.py") if path.is_dir() else [path])
    return sorted(found)


def figures_of(paths: Iterable[Path]) -> dict[str, float]:
    """The figures of files and folders, all of them taken together."""
    counts = Counts()
    for path in files_of(paths):
        counts.add(path)
    return counts.figures()


def broken_limits(figures: dict[str, float]) -> list[str]:
    """The names of figures that are above or below their limit."""
    over = [name for name, limit in LIMITS.items() if figures[name] > limit]
    return over + [name for name, limit in AT_LEAST.items() if figures[name] < limit]


def bound(name: str) -> str:
    """A figure's limit in words."""
    if name in LIMITS:
        return f"at most {LIMITS[name]}"
    if name in AT_LEAST:
        return f"at least {AT_LEAST[name]}"
    return ""


def print_each(files: list[Path]) -> None:
    """Print a line for each file."""
    for file in files:
        figures = figures_of([file])
        words = []
        for name in ("nodes", "nodes/line", "two tricks, %", "nested"):
            words.append(f"{name} {figures[name]:.1f}")
        print(f"{file!s:44s} " + "  ".join(words))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--limits", action="store_true", help="exit with 1 where one is broken")
    parser.add_argument("--list", action="store_true", help="name the places")
    parser.add_argument("--each", action="store_true", help="a line for each file, too")
    args = parser.parse_args()

    counts = Counts()
    files = files_of(args.paths)
    for path in files:
        counts.add(path)

    if args.each:
        print_each(files)
    if args.list:
        print("\n".join(counts.places))

    figures = counts.figures()
    broken = broken_limits(figures)
    for name, value in figures.items():
        line = f"{name:16s} {value:10.1f}   {bound(name)}"
        if name in broken:
            line += "   <-- over"
        print(line)

    if args.limits and broken:
        sys.exit(1)


if __name__ == "__main__":
    main()
