"""Two turns with a tool: a tiny model copies a calculator's answer.

    bash scripts/demo.sh recipes/tool_calculator.py

`547+582=` is answered by `547+582?`, the calculator says `1129!`, and the model ends with `1129`.
The rollout joins the ids of both turns and of the tool, whose own do not train. About three minutes
on two cores. Expected: sampled 9 to 57 %, greedy 90 to 100 %.
"""

from typing import Any

from config import TrainConfig
from recipes.turns import side_by_side


def calculate(call: str) -> str:
    """The calculator's word: `1129!` to `547+582?`."""
    left, _, right = call.removesuffix("?").partition("+")
    if not left.isdecimal() or not right.isdecimal():
        return "error!"
    return f"{int(left) + int(right)}!"


def use_calculator(client: Any, prompt: Any, sampling: dict[str, Any]) -> list[Any]:
    """A turn up to a question mark, the calculator's word, another turn."""

    def second_turn(turn: Any) -> Any:
        call = client.tokenizer.decode(turn.token_ids)
        said = client.tokenizer(calculate(call), add_special_tokens=False)["input_ids"]
        room = sampling["max_tokens"] - len(turn.token_ids) - len(said)
        if not call.endswith("?") or room < 1:
            return turn
        ids = [*prompt.token_ids, *turn.token_ids.tolist(), *said]
        (reply,) = client.generate(ids, {**sampling, "n": 1, "max_tokens": room})
        return turn.then(said, reply)

    return side_by_side(second_turn, client.generate(prompt.token_ids, {**sampling, "stop": ["?"]}))


def right_with_tool(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the answer follows the calculator's word, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.endswith(f"!{truth}")) for text, truth in pairs]


config = TrainConfig(
    model_id="outputs/calculator/model",
    dataset_id="outputs/calculator/train.jsonl",
    eval_dataset_id="outputs/calculator/heldout.jsonl",
    reward_funcs=[right_with_tool],
    rollout_fn=use_calculator,
    no_apply_chat_template=True,
    max_completion_len=24,
    max_steps=80,
    learning_rate=3e-4,
    lr_scheduler="linear",
    output_dir="outputs/calculator/run",
)
