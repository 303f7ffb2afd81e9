"""Rank many answers to one long context by their log-probability; the context is forwarded once.

python -m recipes.score MODEL context.txt answers.txt        # one answer a line
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefix_attention import attach, completion_logprobs, pack


@torch.no_grad()
def scores(model: Any, tokenizer: Any, context: str, answers: list[str]) -> list[float]:
    """log p(answer | context) of every answer, nats; `model` went through `attach`."""
    completions = [tokenizer(answer, add_special_tokens=False).input_ids for answer in answers]
    (row,) = pack([(tokenizer(context).input_ids, completions)])
    logprobs = completion_logprobs(model, row)
    return logprobs.new_zeros(len(answers)).index_add(0, row.completion, logprobs).tolist()


if __name__ == "__main__":
    model_id, context_path, answers_path = sys.argv[1:]
    model = attach(AutoModelForCausalLM.from_pretrained(model_id))
    answers = Path(answers_path).read_text().splitlines()
    ranked = scores(model, AutoTokenizer.from_pretrained(model_id), Path(context_path).read_text(), answers)
    for score, answer in sorted(zip(ranked, answers, strict=True), reverse=True):
        print(f"{score:8.2f}  {answer}")
