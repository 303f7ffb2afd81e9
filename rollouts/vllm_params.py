"""The sampling parameters of vLLM that a run may set.

vLLM drops unknown names without a word, so names and types are checked when the config is made.
"""

import difflib
from typing import Annotated, Any, Required, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # typing has the one that pydantic needs from 3.12 on

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
OneOrMore = Annotated[int, Field(ge=1)]
ZeroOrMore = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenIds = Annotated[list[ZeroOrMore], Field(min_length=1)]

# Those that are fields of the config, by their name there.
FIELDS = {
    "n": "num_generations", "max_tokens": "max_completion_len", "temperature": "temperature",
    "top_k": "top_k", "stop": "stop",
}  # fmt: skip


@with_config(STRICT)
class StructuredOutputs(TypedDict, total=False):
    """vLLM's guided decoding: one of the `KINDS`, and options."""

    json: str | dict[str, Any]
    regex: str
    choice: list[str]
    grammar: str
    json_object: bool
    structural_tag: str
    disable_any_whitespace: bool
    disable_additional_properties: bool
    whitespace_pattern: str


@with_config(STRICT)
class RepetitionDetection(TypedDict, total=False):
    """vLLM's early end of completions that repeat themselves."""

    max_pattern_size: Required[OneOrMore]
    min_pattern_size: ZeroOrMore
    min_count: Required[Annotated[int, Field(ge=2)]]


@with_config(STRICT)
class SamplingParams(TypedDict, total=False):
    """The parameters of vLLM 0.32 and 0.33 that change tokens, but for `FIELDS`."""

    top_p: Annotated[float, Field(gt=0, le=1)]
    min_p: Share
    presence_penalty: Penalty
    frequency_penalty: Penalty
    repetition_penalty: Positive
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    stop_token_ids: TokenIds
    ignore_eos: bool
    min_tokens: ZeroOrMore
    structured_outputs: StructuredOutputs
    logit_bias: dict[ZeroOrMore | Annotated[str, Field(pattern="^[0-9]+$")], float]
    allowed_token_ids: TokenIds
    bad_words: list[Annotated[str, Field(min_length=1)]]
    thinking_token_budget: Annotated[int, Field(ge=-1)]
    repetition_detection: RepetitionDetection
    extra_args: dict[str, Any]


PARTS: dict[Any, Any] = {
    "structured_outputs": StructuredOutputs,
    "repetition_detection": RepetitionDetection,
}


KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def fault_in(given: dict[str, Any], max_completion_len: int) -> str | None:
    """The first thing wrong with parameters, to follow `sampling_params`; None if they are good."""
    try:
        TypeAdapter(SamplingParams).validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
    else:
        return _fault_between(given, max_completion_len)

    name = str(first["loc"][-1])
    where = "".join(f".{part}" for part in first["loc"])
    if first["type"] != "extra_forbidden":
        return f"{where}={first['input']!r:.100}: {first['msg']}"
    known = [*get_type_hints(SamplingParams), *FIELDS]
    if len(first["loc"]) > 1:
        known = [*get_type_hints(PARTS[first["loc"][0]])]
    nearest = difflib.get_close_matches(name.lower(), known, n=1)
    if nearest and nearest[0] in FIELDS:
        return f" may not set {name}: use the field {FIELDS[nearest[0]]}"
    hint = f": did you mean {nearest[0]}?" if nearest else ""
    return f"{where} has no effect on tokens, or is unknown to vLLM{hint}"


def _fault_between(given: dict[str, Any], max_completion_len: int) -> str | None:
    """What is wrong between parameters that are good by themselves."""
    if given.get("min_tokens", 0) > max_completion_len:
        return ": min_tokens must not exceed max_completion_len"

    outputs = given.get("structured_outputs")
    if outputs is not None and len(outputs.keys() & set(KINDS)) != 1:
        return f".structured_outputs must have one of {', '.join(KINDS)}, and one alone"
    repetition = given.get("repetition_detection", {})
    if repetition.get("min_pattern_size", 0) > repetition.get("max_pattern_size", 0):
        return ".repetition_detection: min_pattern_size must not exceed max_pattern_size"
    return None
