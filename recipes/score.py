"""Rank many answers to one long context by their log-probability; the context is forwarded once.

python -m recipes.score MODEL context.txt answers.txt        # one answer a line
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import training.rare_attention  # noqa: F401  # for models of any family
from prefix_attention import attach, completion_logprobs, pack


@torch.no_grad()
def scores(model: Any, tokenizer: Any, context: str, answers: list[str]) -> list[float]:
    """log p(answer and its end | context) of every answer, nats; `model` went through `attach`."""
    ids = tokenizer(answers, add_special_tokens=False).input_ids
    completions = [[*answer, tokenizer.eos_token_id] for answer in ids]
    (row,) = pack([(tokenizer(context).input_ids, completions)])
    logprobs = completion_logprobs(model, row.to(model.device))
    return logprobs.new_zeros(len(answers)).index_add(0, row.completion, logprobs).tolist()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    model_id, context_path, answers_path = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = attach(AutoModelForCausalLM.from_pretrained(model_id, device_map=device))
    context = Path(context_path).read_text(encoding="utf-8").removesuffix("\n")
    answers = [line for line in Path(answers_path).read_text(encoding="utf-8").split("\n") if line]
    if not answers:
        sys.exit(f"error: no answers in {answers_path}")
    ranked = scores(model, AutoTokenizer.from_pretrained(model_id), context, answers)
    for score, answer in sorted(zip(ranked, answers, strict=True), reverse=True):
        print(f"{score:8.2f}  {answer}")
