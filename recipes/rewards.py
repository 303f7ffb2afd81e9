"""Verifiers: reward functions for a config's `reward_funcs`.

Each is `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.
"""

import ast
import inspect
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

TEX_CHOICES = (
    r"\!", r"\,", r"\;", r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$", "$", r"\%", "%",
)  # fmt: skip
PLAIN_FRACTION = re.compile(r"(-?)\\frac\{(-?)(\d+)\}\{(-?)(\d+)\}")
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
FRACTION = re.compile(r"(\{-?\d+\}|\(-?\d+\)|-?\d+)(?:/|\\over)(\{-?\d+\}|\(-?\d+\)|-?\d+)")
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
NO_NUMBER = re.compile(r"\d_|\^\{[^{}^]{0,9}\^|\^\d*\^|(\^|\*\*)[{(]?\d{6}|\*\*\d+\*\*")
FORMAT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
MATH_TIMEOUT_S = 2  # to parse, and to compare: some expressions take sympy for ever
OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def exact_match(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    """1 where completion and `answer` column agree to the letter, else 0.

    White space around the completion is free.
    """
    rows = zip(completions, answer, strict=True)
    return [float(text.strip() == str(truth)) for text, truth in rows]


def math_answer(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    r"""1 where the answer equals the `answer` column as mathematics, else 0.

    By math-verify. The answer is in the last `\boxed{...}`; without one, math-verify looks for one,
    such as a last number. An answer that takes longer than `MATH_TIMEOUT_S` is wrong; only the main
    thread, as that of a reward worker, can bound it.
    """
    rows = zip(completions, answer, strict=True)
    return [float(_is_right(text, str(truth))) for text, truth in rows]


def _is_right(text: str, truth: str) -> bool:
    if "\\boxed" not in text and "\\fbox" not in text:
        return _verified(text, f"\\boxed{{{truth.strip().rstrip('.')}}}")
    boxed = last_boxed(text)
    if boxed is None:
        return False

    given = _without_spaces(boxed)
    wanted = _without_spaces(truth)
    if _is_text(given, wanted):
        return _as_words(given) == _as_words(wanted)
    return _verified(f"\\boxed{{{given}}}", f"\\boxed{{{wanted}}}")


def _without_spaces(answer: str) -> str:
    """An answer without TeX's small spaces and a last full stop."""
    return re.sub(r"\\[,;!]|\{,\}", "", answer).strip().rstrip(".")


def _is_text(given: str, wanted: str) -> bool:
    """True of words, and of other answers not to read as mathematics.

    Numbers of another base only look like mathematics, and some powers no alarm would interrupt.
    """
    text = _as_words(wanted)
    if text.isalpha() and len(text) > 2:
        return True
    return NO_NUMBER.search(f"{given} {wanted}") is not None


def _as_words(answer: str) -> str:
    """A normalized answer in small letters, without TeX's commands for text."""
    return TEXT.sub(r"\1", normalized(answer)).strip().casefold()


def _verified(text: str, truth: str) -> bool:
    from math_verify import parse, verify

    # It would print each completion that takes too long.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    wanted = parse(truth, parsing_timeout=_limit())
    given = parse(text, parsing_timeout=_limit())
    return verify(wanted, given, timeout_seconds=_limit())


def _limit() -> int | None:
    """The seconds for math-verify; None where its SIGALRM is of no use."""
    is_main = threading.current_thread() is threading.main_thread()
    return MATH_TIMEOUT_S if is_main else None


def boxed_exact(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
    r"""1 where the last `\boxed{...}` is the normalized `answer` column, else 0.

    To the letter, once both are normalized. The normalization is that of the MATH data set
    (Hendrycks et al., arXiv:2103.03874), and a little more; see `normalized`.
    """
    rewards = []
    for text, truth in zip(completions, answer, strict=True):
        given = normalized(last_boxed(text) or "")
        rewards.append(float(given != "" and given == normalized(str(truth))))
    return rewards


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, or else of `\fbox{...}`.

    After `\boxed `, without braces, the content goes up to a `$` or the end.

    Args:
        text: a completion.

    Returns:
        None where there is no box, or it has no end.
    """
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return None

    rest = text[start:].partition("box")[2].removeprefix("ed")
    if rest.startswith(" ") and not rest.lstrip().startswith("{"):
        return rest.lstrip().partition("$")[0].strip()

    rest = rest.lstrip()
    if not rest.startswith("{"):
        return None
    depth = 0
    for place, character in enumerate(rest):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth == 0:
            return rest[1:place]
    return None


def normalized(answer: str) -> str:
    r"""An answer of the MATH data set in one of its spellings.

    Without units in `\text{}`, spaces and TeX's choices. `\dfrac12`, `1/2` and `0.5` are
    `\frac{1}{2}`; `\frac{-1}{2}` is `-\frac{1}{2}`; `\sqrt3` is `\sqrt{3}`; `x = 5` is `5`; `1,000`
    is `1000`; `50\%` and `50^\circ` are `50`; `5\text{ cm}^2` is `5`; `.5` is `0.5`, and so
    `\frac{1}{2}`.
    """
    answer = answer.replace("{,}", ",")
    for choice in TEX_CHOICES:
        answer = answer.replace(choice, "")
    if "\\begin" not in answer:
        answer = answer.replace("\\\\", "\\")
    answer = re.sub(r"\\[tdc]frac", r"\\frac", answer)

    unit = r"(?:\\(?:text|mbox)\{[^{}]*\}|\\mathrm\{[^{}]{2,}\})(\^\d|\^\{\d\})?\s*\.?\s*$"
    answer = re.sub(rf"(?<=\d)(?:\\ |[~\s])*{unit}", "", answer)
    answer = re.sub(r"(?<=\S)\s*\\(?:text|mbox)\{\s[^{}]*\}(\^\d|\^\{\d\})?\s*$", "", answer)
    answer = re.sub(r"\\text\{([^{}]*)\}", r"\1", answer)

    answer = re.sub(r"^\s*[a-zA-Z]{1,2}\s*=", "", answer)
    answer = re.sub(r"(?<![\d.])\.(?=\d)", "0.", answer)
    answer = re.sub(r"\s+", "", answer).rstrip(".")
    answer = re.sub(r"^\{([^{}]*)\}$", r"\1", answer)
    if THOUSANDS.fullmatch(answer):
        answer = answer.replace(",", "")

    answer = re.sub(r"\{\{(\w+)\}\}", r"{\1}", answer)
    answer = re.sub(r"\\sqrt(?!\{|\[)(\w)", r"\\sqrt{\1}", answer)
    answer = re.sub(r"\\frac(?!\{)(\w)(?!\{)(\w)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\frac(?!\{)(\w)(?=\{)", r"\\frac{\1}", answer)
    answer = re.sub(r"(\\frac\{[^{}]*\})(\w)", r"\1{\2}", answer)

    fraction = FRACTION.fullmatch(answer)
    if fraction:
        parts = [part.strip("{}()") for part in fraction.groups()]
        answer = f"\\frac{{{parts[0]}}}{{{parts[1]}}}"
    fraction = PLAIN_FRACTION.fullmatch(answer)
    if fraction:
        is_negative = fraction.group(1, 2, 4).count("-") % 2 == 1
        sign = "-" if is_negative else ""
        return f"{sign}\\frac{{{fraction[3]}}}{{{fraction[5]}}}"
    return "\\frac{1}{2}" if answer == "0.5" else answer


def countdown(
    completions: list[str], nums: list[list[int]], target: list[int], **_: Any
) -> list[float]:
    """1 where the completion makes `target` of `nums`, each once, else 0.

    By + - * / and brackets. Looks at the last `<answer>`, or at all of a completion without one; a
    final `= target` may stand there. Exact, on a parsed tree: nothing is evaluated.
    """
    rows = zip(completions, nums, target, strict=True)
    return [float(_makes(text, numbers, goal)) for text, numbers, goal in rows]


def _makes(text: str, nums: list[int], target: int) -> bool:
    numbers = sorted(Fraction(number) for number in nums)
    goal = Fraction(target)

    answer = text
    before, tag, _ = text.rpartition("</answer>")
    if tag:
        answer = before.rpartition("<answer>")[2].partition("</answer>")[0]
    expression, _, result = " ".join(answer.split()).partition("=")
    if result.strip() not in ("", str(goal)):
        return False
    if not re.fullmatch(r"[0-9+\-*/() ]{1,300}", expression):
        return False

    used: list[int] = []
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False
    except (RecursionError, MemoryError):  # deep nesting
        return False
    return value == goal and sorted(used) == numbers


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """The value of a tree of numbers under the four operations.

    The numbers are appended to `used`.

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
    """1 where the completion is `<think>...</think>` and then `<answer>...</answer>`, else 0.

    Each once. DeepSeek-R1's format (arXiv:2501.12948); white space around the parts is free. The
    first `<think>` may be missing: many chat templates, and prefills, end the prompt with it.
    """
    return [float(_has_format(text)) for text in completions]


def _has_format(text: str) -> bool:
    if text.count("<think>") > 1:
        return False
    for tag in ("</think>", "<answer>", "</answer>"):
        if text.count(tag) != 1:
            return False
    return FORMAT.fullmatch(text) is not None


def length_penalty(
    max_tokens: int, cushion: int | None = None, verifier: RewardFunc | None = None
) -> "SoftOverlong | Cosine":
    """A reward that depends on the length.

    DAPO's soft overlong punishment, or a verifier's verdict along a cosine.

    Args:
        max_tokens: length from which a completion is not punished further; `max_completion_len`, as
            a rule.
        cushion: tokens before it over which the punishment grows; see `SoftOverlong`.
        verifier: in place of `cushion`: a reward function that gives 1 or 0; see `Cosine`.

    Raises:
        ValueError: not one of `cushion` and `verifier`, or a cushion that does not fit.
    """
    if cushion is not None and verifier is None:
        return SoftOverlong(max_tokens, cushion)
    if verifier is not None and cushion is None:
        return Cosine(max_tokens, verifier)
    raise ValueError("length_penalty takes either a cushion (soft overlong) or a verifier (cosine)")


@dataclass
class SoftOverlong:
    """A punishment of length, which grows from 0 to -1.

    0 up to `max_tokens - cushion`, then down to -1 at `max_tokens`, and beyond. DAPO
    (arXiv:2503.14476, eq. 13).
    """

    max_tokens: int
    cushion: int

    def __post_init__(self) -> None:
        if not 0 < self.cushion <= self.max_tokens:
            raise ValueError(
                f"cushion={self.cushion} must be above 0 and at most max_tokens={self.max_tokens}"
            )
        self.__name__ = "length_penalty"
        self.__qualname__ = f"length_penalty({self.max_tokens}, {self.cushion})"

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """The rewards, as of any reward function."""
        free = self.max_tokens - self.cushion
        over = [(len(ids) - free) / self.cushion for ids in completion_ids]
        return [-min(max(share, 0.0), 1.0) for share in over]


@dataclass
class Cosine:
    """A verdict of 1 or 0, scaled by length along a cosine.

    end + (start - end)·(1 + cos(πL/max_tokens))/2, where L is the length in tokens. A short right
    answer earns more than a long one, and a short wrong one less (Yeo et al., arXiv:2502.03373).

    Args:
        max_tokens: L at which a completion, cut off as a rule, earns `exceeded` in place of the
            cosine's end.
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
        """The rewards, as of any function; None where the verifier gives none."""
        verdicts = self.verifier(completion_ids=completion_ids, **arguments)
        rows = zip(verdicts, completion_ids, strict=True)
        return [self._scaled(verdict, len(ids)) for verdict, ids in rows]

    def _scaled(self, verdict: float | None, length: int) -> float | None:
        if verdict is None:
            return None
        if length >= self.max_tokens:
            return self.exceeded
        start, end = self.wrong
        if verdict == 1:
            start, end = self.right
        cosine = math.cos(math.pi * length / self.max_tokens)
        return end + (start - end) * (1 + cosine) / 2


class best_of:  # called like a function; a class, as a worker process can be sent its objects
    """A reward that gives each completion the best that several functions give.

    None where all give None.

    Args:
        functions: reward functions, at least one.

    Raises:
        ValueError: there is none, or an `async def` among them.
    """

    def __init__(self, *functions: RewardFunc):
        if not functions:
            raise ValueError("best_of needs at least one reward function")
        self.functions = [_synchronous(function) for function in functions]
        self.__name__ = "best_of_" + "_".join(function.__name__ for function in functions)
        self.__qualname__ = self.__name__

    def __call__(self, **arguments: Any) -> list[float | None]:
        """The rewards, as of any reward function."""
        columns = [function(**arguments) for function in self.functions]
        best = []
        for row in zip(*columns, strict=True):
            given = [value for value in row if value is not None]
            best.append(max(given, default=None))
        return best


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
