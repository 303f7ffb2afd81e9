"""Verifiers: reward functions `f(prompts, completions, completion_ids, **columns) -> list[float | None]`."""

import ast
import logging
import math
import operator
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

RewardFunc = Callable[..., Sequence[float | None]]

BRACKETS = ("()", "[]", "(]", "[)", "{}")
TEX_CHOICES = ("\n", r"\!", r"\,", r"\;", r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$", "$", r"\%", "%")
MATH_TIMEOUT_S = 2  # to parse, and to compare: some expressions take sympy for ever
OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion is the `answer` column to the letter, surrounding white space aside, else 0."""
    return [float(text.strip() == truth) for text, truth in zip(completions, answer, strict=True)]


def math_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the completion's last answer equals the `answer` column as mathematics (math-verify), else 0.

    What takes longer than `MATH_TIMEOUT_S` is wrong; only the main thread, as that of a reward worker, can bound it.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would print each completion that takes too long
    limit = MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None  # it uses SIGALRM
    wanted = [parse(f"\\boxed{{{truth}}}", parsing_timeout=limit) for truth in answer]
    given = [parse(text, parsing_timeout=limit) for text in completions]
    return [float(verify(w, g, timeout_seconds=limit)) for w, g in zip(wanted, given, strict=True)]


def boxed_exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    r"""1 where the last `\boxed{...}` is the `answer` column to the letter, once both are normalized, else 0.

    The normalization is that of the MATH data set (Hendrycks et al., arXiv:2103.03874).
    """
    rows = zip(completions, answer, strict=True)
    return [float((given := last_boxed(text)) is not None and normalized(given) == normalized(t)) for text, t in rows]


def sympy_equal(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    r"""1 where the last `\boxed{...}` equals the `answer` column, element by element of a tuple or an interval, else 0.

    By normalized text, or as mathematics (Lightman et al., arXiv:2305.20050): an integer must be written as one, and a
    fraction in its lowest terms. Nothing is evaluated; what takes longer than `MATH_TIMEOUT_S` is wrong.
    """
    return [float(_same(text, truth)) for text, truth in zip(completions, answer, strict=True)]


def _same(text: str, truth: str) -> bool:
    boxed = last_boxed(text)
    if boxed is None:
        return False
    given, wanted = normalized(boxed), normalized(truth)
    if given == wanted:
        return True
    ends = given[:1] + given[-1:], wanted[:1] + wanted[-1:]
    if any(pair in BRACKETS for pair in ends) and ends[0] != ends[1]:
        return False
    elements = [_elements(value) for value in (given, wanted)]
    return len(elements[0]) == len(elements[1]) and all(map(_same_element, *elements))


def _elements(value: str) -> list[str]:
    """The members of `(1,2)` and the like, or the value itself; thousands have no commas any more."""
    inner = value[1:-1] if value[:1] + value[-1:] in BRACKETS else value
    depth, parts = 0, [""]
    for character in inner:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _same_element(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    is_integer, is_fraction = re.compile(r"-?\d+"), re.compile(r"-?\\frac\{-?\d+\}\{-?\d+\}")
    if is_integer.fullmatch(wanted) or (is_fraction.fullmatch(wanted) and is_fraction.fullmatch(given)):
        return False  # 4/2 for 2, or 2/4 for 1/2
    return math_answer([f"\\boxed{{{given}}}"], [wanted]) == [1.0]


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` or `\fbox{...}`, or after `\boxed `; None without one that ends."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].partition("box")[2].removeprefix("ed")
    if rest.startswith(" ") and not rest.lstrip().startswith("{"):
        return rest.lstrip().partition("$")[0].strip()
    rest = rest.lstrip()
    depth = 0
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:place] if rest.startswith("{") else None
    return None


def normalized(answer: str) -> str:
    r"""An answer of the MATH data set in one of its spellings: units, spaces and TeX's choices aside.

    `\dfrac12`, `1/2` and `0.5` are `\frac{1}{2}`; `\sqrt3` is `\sqrt{3}`; `x = 5` is `5`; `1,000` is `1000`; `50\%` and
    `50^\circ` are `50`; `.5` is `0.5`, and so `\frac{1}{2}`.
    """
    for choice in TEX_CHOICES:
        answer = answer.replace(choice, "")
    answer = answer.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    answer = re.sub(r"\\(?:text|mbox)\{\s.*?\}$", "", answer)  # a unit, after a space
    answer = re.sub(r"\\text\{(.*?)\}", r"\1", answer)
    answer = re.sub(r"^[a-zA-Z]{1,2}\s*=", "", answer)
    answer = re.sub(r"(?<![\d.])\.(?=\d)", "0.", answer)
    answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer) if "(" not in answer and "[" not in answer else answer
    answer = re.sub(r"\s+", "", answer).rstrip(".")
    answer = re.sub(r"\\sqrt(?!\{|\[)(\w)", r"\\sqrt{\1}", answer)
    answer = re.sub(r"\\frac(?!\{)(\w)(?!\{)(\w)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\frac(?!\{)(\w)(?=\{)", r"\\frac{\1}", answer)
    answer = re.sub(r"(\\frac\{[^{}]*\})(\w)", r"\1{\2}", answer)
    answer = re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", answer)
    return "\\frac{1}{2}" if answer == "0.5" else answer


def countdown(completions: list[str], nums: list[list[int]], target: list[int], **_: Any) -> list[float]:
    """1 where the completion makes `target` of `nums`, each used once, by + - * / and brackets, else 0.

    Looks at the last `<answer>`, or at all of a completion without one; a final `= target` may stand there. Exact, on a
    parsed tree: nothing is evaluated.
    """
    rows = zip(completions, nums, target, strict=True)
    return [float(_makes(text, list(numbers), goal)) for text, numbers, goal in rows]


def _makes(text: str, numbers: list[int], goal: int) -> bool:
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    expression, _, result = (answers[-1] if answers else text).strip().partition("=")
    if result.strip() not in ("", str(goal)) or not re.fullmatch(r"[0-9+\-*/() ]{1,300}", expression):
        return False
    used: list[int] = []
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # the last ones: deep nesting
        return False
    return value == goal and sorted(used) == sorted(numbers)


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """The value of a tree of numbers, noted in `used`, under the four operations.

    Raises:
        ValueError: anything else is in the tree.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError("no number, and none of + - * /")


def format_reward(completions: list[str], **_: Any) -> list[float]:
    """1 where the completion is `<think>...</think>` and then `<answer>...</answer>`, each once, else 0.

    DeepSeek-R1's format (arXiv:2501.12948); white space around the parts is free.
    """
    form = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return [float(all(text.count(t) == 1 for t in tags) and form.fullmatch(text) is not None) for text in completions]


def length_penalty(
    max_tokens: int, cushion: int | None = None, verifier: RewardFunc | None = None
) -> "SoftOverlong | Cosine":
    """A reward that depends on the length: DAPO's soft overlong punishment, or a verifier's verdict along a cosine.

    Args:
        max_tokens: length from which a completion is not punished further; `max_completion_len`, as a rule.
        cushion: tokens before it over which the punishment grows; see `SoftOverlong`.
        verifier: in place of `cushion`: a reward function that gives 1 or 0; see `Cosine`.

    Raises:
        ValueError: not one of `cushion` and `verifier`, or a cushion that does not fit.
    """
    if (cushion is None) == (verifier is None):
        raise ValueError("length_penalty takes either a cushion (soft overlong) or a verifier (cosine)")
    if cushion is not None:
        if not 0 < cushion <= max_tokens:
            raise ValueError(f"length_penalty: cushion={cushion} must be above 0 and at most max_tokens={max_tokens}")
        return SoftOverlong(max_tokens, cushion)
    assert verifier is not None
    return Cosine(max_tokens, verifier)


@dataclass
class SoftOverlong:
    """0 up to `max_tokens - cushion`, then down to -1 at `max_tokens`, and beyond (DAPO, arXiv:2503.14476, eq. 13)."""

    max_tokens: int
    cushion: int

    def __post_init__(self) -> None:
        self.__name__, self.__qualname__ = "length_penalty", f"length_penalty({self.max_tokens}, {self.cushion})"

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """As any reward function."""
        over = [len(ids) - (self.max_tokens - self.cushion) for ids in completion_ids]
        return [-min(max(tokens / self.cushion, 0.0), 1.0) for tokens in over]


@dataclass
class Cosine:
    """A verdict of 1 or 0, scaled by the length L along a cosine: end + (start - end)·(1 + cos(πL/max_tokens))/2.

    A short right answer earns more than a long one, and a short wrong one less (Yeo et al., arXiv:2502.03373).

    Args:
        max_tokens: from there on a completion earns the end of its scale.
        verifier: a reward function that gives 1 or 0.
        right: (start, end) of the scale of right ones.
        wrong: (start, end) of that of wrong ones.
    """

    max_tokens: int
    verifier: RewardFunc
    right: tuple[float, float] = (1.0, 0.5)
    wrong: tuple[float, float] = (-1.0, -0.5)

    def __post_init__(self) -> None:
        self.__name__ = f"cosine_{self.verifier.__name__}"
        self.__qualname__ = f"{self.__name__}({self.max_tokens}, {self.right}, {self.wrong})"

    def __call__(self, completion_ids: list[list[int]], **arguments: Any) -> list[float | None]:
        """As any reward function; None where the verifier gives none."""
        verdicts = self.verifier(completion_ids=completion_ids, **arguments)
        return [self._scaled(verdict, len(ids)) for verdict, ids in zip(verdicts, completion_ids, strict=True)]

    def _scaled(self, verdict: float | None, length: int) -> float | None:
        if verdict is None:
            return None
        start, end = self.right if verdict == 1 else self.wrong
        return end + (start - end) * (1 + math.cos(math.pi * min(length / self.max_tokens, 1.0))) / 2


def best_of(*functions: RewardFunc) -> "BestOf":
    """A reward that gives each completion the best of what several functions give it, None where none applies."""
    return BestOf(*functions)


class BestOf:
    """What `best_of` returns: an object, which a worker process can be sent, unlike a function within a function."""

    def __init__(self, *functions: RewardFunc):
        self.functions = functions
        self.__name__ = self.__qualname__ = "best_of_" + "_".join(f.__name__ for f in functions)

    def __call__(self, **arguments: Any) -> list[float | None]:
        """As any reward function."""
        columns = [function(**arguments) for function in self.functions]
        rows = zip(*columns, strict=True)
        return [max((value for value in row if value is not None), default=None) for row in rows]
