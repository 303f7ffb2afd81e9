"""Rank many answers to one long context by their log-probability.

    python -m recipes.score MODEL context.txt answers.txt        # one answer a line

The context is forwarded once.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefix_attention import attach, completion_logprobs, pack


@torch.no_grad()
def scores(model: Any, tokenizer: Any, context: str, answers: list[str]) -> list[float]:
    """The sums of log p(answer and its end | context), in nats.

    `model` went through `attach`.
    """
    completions = tokenizer(answers, add_special_tokens=False).input_ids
    for token_ids in completions:
        token_ids.append(tokenizer.eos_token_id)
    (row,) = pack([(tokenizer(context).input_ids, completions)])

    logprobs = completion_logprobs(model, row.to(model.device))
    return logprobs.new_zeros(len(answers)).index_add(0, row.completion, logprobs).tolist()


def main(model_id: str, context_path: str, answers_path: str) -> None:
    """Print the answers with their scores, the best first."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = attach(AutoModelForCausalLM.from_pretrained(model_id, device_map=device))
    tokenizer = AutoTokenizer.from_pretrained(model_id)
    context = Path(context_path).read_text(encoding="utf-8").removesuffix("\n")
    lines = Path(answers_path).read_text(encoding="utf-8").split("\n")
    answers = [line for line in lines if line]
    if not answers:
        sys.exit(f"error: no answers in {answers_path}")

    ranked = zip(scores(model, tokenizer, context, answers), answers, strict=True)
    for score, answer in sorted(ranked, reverse=True):
        print(f"{score:8.2f}  {answer}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
