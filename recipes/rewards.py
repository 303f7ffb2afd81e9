"""Verifiers: reward functions `f(prompts, completions, completion_ids, **columns) -> list[float | None]`."""

import ast
import inspect
import logging
import math
import operator
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

RewardFunc = Callable[..., Sequence[float | None]]

TEX_CHOICES = (
    r"\!",
    r"\,",
    r"\;",
    r"\left",
    r"\right",
    r"^{\circ}",
    r"^\circ",
    r"\$",
    "$",
    r"\%",
    "%",
)
WHOLE, PLAIN_FRACTION = re.compile(r"-?\d+"), re.compile(r"(-?)\\frac\{(-?)(\d+)\}\{(-?)(\d+)\}")
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
FRACTION = re.compile(r"(\{-?\d+\}|\(-?\d+\)|-?\d+)(?:/|\\over)(\{-?\d+\}|\(-?\d+\)|-?\d+)")
LIST = re.compile(r"(\\\{|[(\[]?)([^()\[\]]*?)(\\\}|[)\]]?)")
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
UNIT = re.compile(
    r"(?<=\d)(degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)(e?s)?"
    r"(\^\d|\^\{\d\})?$"
)
NO_NUMBER = re.compile(r"\d_|\^\{[^{}^]{0,9}\^|\^\d*\^|(\^|\*\*)[{(]?\d{6}|\*\*\d+\*\*")
MAX_LEN = 1000  # of an answer that is looked at as mathematics
MATH_TIMEOUT_S = 2  # to parse, and to compare: some expressions take sympy for ever
OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def exact_match(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1 where the completion is the `answer` column to the letter, surrounding white space aside, else 0."""
    return [
        float(text.strip() == str(truth)) for text, truth in zip(completions, answer, strict=True)
    ]


def math_answer(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    r"""1 where the completion's answer equals the `answer` column as mathematics (math-verify), else 0.

    Its answer is in the last `\boxed{...}`; without one, what math-verify finds, such as a last number. What takes
    longer than `MATH_TIMEOUT_S` is wrong; only the main thread, as that of a reward worker, can bound it.
    """
    return [
        float(_right(text, str(truth))) for text, truth in zip(completions, answer, strict=True)
    ]


def _right(text: str, truth: str) -> bool:
    if "\\boxed" in text or "\\fbox" in text:
        boxed = last_boxed(text)
        return boxed is not None and _equal(boxed, truth)
    return _verified(text, f"\\boxed{{{truth.strip().rstrip('.')}}}")


def _equal(given: str, wanted: str) -> bool:
    given, wanted = (
        re.sub(r"\\[,;!]|\{,\}", "", value).strip().rstrip(".") for value in (given, wanted)
    )
    if _is_text(given, wanted):
        return _plain(given) == _plain(wanted)
    return _verified(f"\\boxed{{{given}}}", f"\\boxed{{{wanted}}}")


def _is_text(given: str, wanted: str) -> bool:
    """Words and numbers of another base, which only look like mathematics, and powers that no alarm would interrupt."""
    text = _plain(wanted)
    return (text.isalpha() and len(text) > 2) or NO_NUMBER.search(f"{given} {wanted}") is not None


def _verified(text: str, truth: str) -> bool:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(
        logging.CRITICAL
    )  # it would print each completion that takes too long
    wanted, given = (parse(value, parsing_timeout=_limit()) for value in (truth, text))
    return verify(wanted, given, timeout_seconds=_limit())


def _limit() -> int | None:
    """math-verify uses SIGALRM."""
    return MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None


def boxed_exact(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    r"""1 where the last `\boxed{...}` is the `answer` column to the letter, once both are normalized, else 0.

    The normalization is that of the MATH data set (Hendrycks et al., arXiv:2103.03874), and a little more; see
    `normalized`.
    """
    rows = zip(completions, answer, strict=True)
    return [
        float(normalized(last_boxed(text) or "") == normalized(str(truth)) != "")
        for text, truth in rows
    ]


def sympy_equal(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    r"""1 where the last `\boxed{...}` equals the `answer` column, element by element of a tuple or an interval, else 0.

    By normalized text, or exactly as mathematics (Lightman et al., arXiv:2305.20050): where an integer is wanted one
    must be written (`2.0` is one), and a fraction in its lowest terms; decimals are the fractions that they are, and
    only the members of a `\{set\}` have no order. Nothing is evaluated; what takes longer than `MATH_TIMEOUT_S` is
    wrong.
    """
    rows = zip(completions, answer, strict=True)
    return [float(_same(last_boxed(text) or "", str(truth))) for text, truth in rows]


def _same(given: str, wanted: str) -> bool:
    given, wanted = _plain(given), _plain(wanted)
    if given == wanted or given.count(",") != wanted.count(","):
        return given == wanted != ""
    (first, *said), (wanted_first, *right) = _members(given), _members(wanted)
    if len(right) > 1 and first != wanted_first:
        return False
    if first == "\\{\\}":
        said, right = (
            sorted((Counter(a) - Counter(b)).elements()) for a, b in ((said, right), (right, said))
        )
    return len(said) == len(right) and all(map(_same_element, said, right))


def _plain(answer: str) -> str:
    """Normalized further, as Lightman et al. do: without units and the marks of text, words in small letters."""
    answer = re.sub(r"(\d)\s+(\d+/\d+)", r"\1+\2", answer)  # 7 1/2
    answer = TEXT.sub(r"\1", normalized(answer)).strip().removeprefix("+")
    answer = re.sub(r"^(-?\d+)\.0+$", r"\1", UNIT.sub("", answer))
    return answer.casefold() if answer.isalpha() else answer


def _members(value: str) -> list[str]:
    r"""The brackets of `(1,2)`, `[1,2)`, `\{1,2\}` or `1,2`, then its members; or no bracket and the value itself."""
    match = LIST.fullmatch(value)
    if not match or bool(match[1]) != bool(match[3]):
        return ["", value]  # (x+1)(x-1)
    return [match[1] + match[3], *map(_plain, match[2].split(","))]


def _same_element(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if WHOLE.fullmatch(wanted) or (
        PLAIN_FRACTION.fullmatch(wanted) and PLAIN_FRACTION.fullmatch(given)
    ):
        return False  # 4/2 for 2, or 2/4 for 1/2
    if (
        any(sign in given + wanted for sign in (":", "\\div"))
        or len(given) > MAX_LEN
        or _is_text(given, wanted)
    ):
        return False
    from latex2sympy2_extended import (
        latex2sympy,
    )  # math-verify's parser, which itself would look for a part that fits
    from math_verify import verify
    from math_verify.utils import timeout

    exact = (re.sub(r"\d+\.\d+", _as_fraction, value) for value in (wanted, given))
    try:
        right, said = (timeout(_limit())(latex2sympy)(value) for value in exact)
    except Exception:  # it raises no narrower one where it does not understand
        return False
    return verify(right, said, timeout_seconds=_limit())


def _as_fraction(decimal: re.Match[str]) -> str:
    value = Fraction(decimal[0])
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`, or after `\boxed `, or else in `\fbox{...}`; None where that has no end.

    Args:
        text: a completion.
    """
    start = text.rfind("\\boxed")
    start = text.rfind("\\fbox") if start < 0 else start
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
    r"""An answer of the MATH data set in one of its spellings: units in `\text{}`, spaces and TeX's choices aside.

    `\dfrac12`, `1/2` and `0.5` are `\frac{1}{2}`; `\frac{-1}{2}` is `-\frac{1}{2}`; `\sqrt3` is `\sqrt{3}`; `x = 5` is
    `5`; `1,000` is `1000`; `50\%` and `50^\circ` are `50`; `5\text{ cm}^2` is `5`; `.5` is `0.5`, and so `\frac{1}{2}`.
    """
    answer = answer.replace("{,}", ",")
    for choice in TEX_CHOICES:
        answer = answer.replace(choice, "")
    answer = answer if "\\begin" in answer else answer.replace("\\\\", "\\")
    answer = re.sub(r"\\[tdc]frac", r"\\frac", answer)
    unit = r"(?:\\(?:text|mbox)\{[^{}]*\}|\\mathrm\{[^{}]{2,}\})(\^\d|\^\{\d\})?\s*\.?\s*$"
    answer = re.sub(rf"(?<=\d)(?:\\ |[~\s])*{unit}", "", answer)
    answer = re.sub(r"(?<=\S)\s*\\(?:text|mbox)\{\s[^{}]*\}(\^\d|\^\{\d\})?\s*$", "", answer)
    answer = re.sub(r"\\text\{([^{}]*)\}", r"\1", answer)
    answer = re.sub(r"^\s*[a-zA-Z]{1,2}\s*=", "", answer)
    answer = re.sub(r"(?<![\d.])\.(?=\d)", "0.", answer)
    answer = re.sub(r"\s+", "", answer).rstrip(".")
    answer = re.sub(r"^\{([^{}]*)\}$", r"\1", answer)
    answer = answer.replace(",", "") if THOUSANDS.fullmatch(answer) else answer
    answer = re.sub(r"\{\{(\w+)\}\}", r"{\1}", answer)
    answer = re.sub(r"\\sqrt(?!\{|\[)(\w)", r"\\sqrt{\1}", answer)
    answer = re.sub(r"\\frac(?!\{)(\w)(?!\{)(\w)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\frac(?!\{)(\w)(?=\{)", r"\\frac{\1}", answer)
    answer = re.sub(r"(\\frac\{[^{}]*\})(\w)", r"\1{\2}", answer)
    if plain := FRACTION.fullmatch(answer):
        answer = "\\frac" + "".join(f"{{{part.strip('{}()')}}}" for part in plain.groups())
    if plain := PLAIN_FRACTION.fullmatch(answer):
        sign = "-" if plain.group(1, 2, 4).count("-") % 2 else ""
        return f"{sign}\\frac{{{plain[3]}}}{{{plain[5]}}}"
    return "\\frac{1}{2}" if answer == "0.5" else answer


def countdown(
    completions: list[str], nums: list[list[int]], target: list[int], **_: Any
) -> list[float]:
    """1 where the completion makes `target` of `nums`, each used once, by + - * / and brackets, else 0.

    Looks at the last `<answer>`, or at all of a completion without one; a final `= target` may stand there. Exact, on a
    parsed tree: nothing is evaluated.
    """
    rows = zip(completions, nums, target, strict=True)
    return [
        float(_makes(text, [*map(Fraction, numbers)], Fraction(goal)))
        for text, numbers, goal in rows
    ]


def _makes(text: str, numbers: list[Fraction], goal: Fraction) -> bool:
    before, tag, _ = text.rpartition("</answer>")
    answer = before.rpartition("<answer>")[2].partition("</answer>")[0] if tag else text
    expression, _, result = " ".join(answer.split()).partition("=")
    if result.strip() not in ("", str(goal)) or not re.fullmatch(
        r"[0-9+\-*/() ]{1,300}", expression
    ):
        return False
    used: list[int] = []
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, used)
    except (
        SyntaxError,
        ValueError,
        ZeroDivisionError,
        RecursionError,
        MemoryError,
    ):  # the last ones: deep nesting
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
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, used)
        return -value if isinstance(node.op, ast.USub) else value
    raise ValueError("no number, and none of + - * /")


def format_reward(completions: list[str], **_: Any) -> list[float]:
    """1 where the completion is `<think>...</think>` and then `<answer>...</answer>`, each once, else 0.

    DeepSeek-R1's format (arXiv:2501.12948); white space around the parts is free.
    """
    form = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return [
        float(all(text.count(t) == 1 for t in tags) and form.fullmatch(text) is not None)
        for text in completions
    ]


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
        raise ValueError(
            "length_penalty takes either a cushion (soft overlong) or a verifier (cosine)"
        )
    return Cosine(max_tokens, verifier) if verifier else SoftOverlong(max_tokens, cushion or 0)


@dataclass
class SoftOverlong:
    """0 up to `max_tokens - cushion`, then down to -1 at `max_tokens`, and beyond (DAPO, arXiv:2503.14476, eq. 13)."""

    max_tokens: int
    cushion: int

    def __post_init__(self) -> None:
        if not 0 < self.cushion <= self.max_tokens:
            raise ValueError(
                f"cushion={self.cushion} must be above 0 and at most max_tokens={self.max_tokens}"
            )
        self.__name__, self.__qualname__ = (
            "length_penalty",
            f"length_penalty({self.max_tokens}, {self.cushion})",
        )

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """As any reward function."""
        over = [len(ids) - (self.max_tokens - self.cushion) for ids in completion_ids]
        return [-min(max(tokens / self.cushion, 0.0), 1.0) for tokens in over]


@dataclass
class Cosine:
    """A verdict of 1 or 0, scaled by the length L along a cosine: end + (start - end)·(1 + cos(πL/max_tokens))/2.

    A short right answer earns more than a long one, and a short wrong one less (Yeo et al., arXiv:2502.03373).

    Args:
        max_tokens: L at which a completion, cut off as a rule, earns `exceeded` in place of the cosine's end.
        verifier: a reward function that gives 1 or 0.
        right: (start, end) of right ones.
        wrong: (start, end) of wrong ones.
        exceeded: reward at `max_tokens` and beyond.
    """

    max_tokens: int
    verifier: RewardFunc
    right: tuple[float, float] = (1.0, 0.5)
    wrong: tuple[float, float] = (-1.0, -0.5)
    exceeded: float = -1.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        self.functions = [_synchronous(self.verifier)]
        self.__name__ = f"cosine_{self.verifier.__name__}"
        self.__qualname__ = (
            f"{self.__name__}({self.max_tokens}, {self.right}, {self.wrong}, {self.exceeded})"
        )

    def __call__(self, completion_ids: list[list[int]], **arguments: Any) -> list[float | None]:
        """As any reward function; None where the verifier gives none."""
        verdicts = self.verifier(completion_ids=completion_ids, **arguments)
        return [
            self._scaled(verdict, len(ids))
            for verdict, ids in zip(verdicts, completion_ids, strict=True)
        ]

    def _scaled(self, verdict: float | None, length: int) -> float | None:
        if verdict is None:
            return None
        if length >= self.max_tokens:
            return self.exceeded
        start, end = self.right if verdict == 1 else self.wrong
        return end + (start - end) * (1 + math.cos(math.pi * length / self.max_tokens)) / 2


class best_of:  # called like a function; a class, as a worker process can be sent its objects
    """A reward that gives each completion the best of what several functions give it, None where none applies.

    Args:
        functions: reward functions, at least one.

    Raises:
        ValueError: there is none, or an `async def` among them.
    """

    def __init__(self, *functions: RewardFunc):
        if not functions:
            raise ValueError("best_of needs at least one reward function")
        self.functions = [_synchronous(function) for function in functions]
        self.__name__ = self.__qualname__ = "best_of_" + "_".join(f.__name__ for f in functions)

    def __call__(self, **arguments: Any) -> list[float | None]:
        """As any reward function."""
        columns = [function(**arguments) for function in self.functions]
        rows = zip(*columns, strict=True)
        return [max((value for value in row if value is not None), default=None) for row in rows]


def _synchronous(function: RewardFunc) -> RewardFunc:
    if not callable(function) or not hasattr(function, "__name__"):
        raise ValueError(
            f"{function!r} is no function with a __name__, which names a metric: use def"
        )
    if inspect.iscoroutinefunction(function):
        raise ValueError(
            f"{function.__name__} is an async def, which only reward_funcs itself may have"
        )
    return function
