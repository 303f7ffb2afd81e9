"""DPO (arXiv:2305.18290) outside the trainer: both answers share their prompt's forward.

    python -m recipes.dpo MODEL pairs.jsonl OUTPUT

The rows of `pairs.jsonl` have `prompt`, `chosen` and `rejected`, all text. With one answer and
`loss = -policy.mean()` over its tokens it is supervised fine-tuning.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer

from config import TrainConfig
from prefix_attention import attach, completion_logprobs, pack
from training.model import load_model

BATCH_SIZE = 8
LEARNING_RATE = 1e-6
BETA = 0.1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Token ids of a prompt, and of its chosen and its rejected answer.
Pair = tuple[list[int], list[list[int]]]


def dpo_loss(policy: Any, reference: Any, pairs: list[Pair]) -> torch.Tensor:
    """The DPO loss, the mean over the pairs, 0-d.

    -log σ(β·(Δ chosen - Δ rejected)), where Δ = log p(answer) under the policy minus under the
    reference.

    Args:
        policy: the model that trains, which went through `attach`.
        reference: the model it began as, which did, too.
        pairs: token ids of a prompt, and of its chosen and its rejected answer.
    """
    row = pack(pairs)[0].to(DEVICE)  # one row, as it has no bound
    with torch.no_grad():
        before = completion_logprobs(reference, row)
    change = completion_logprobs(policy, row) - before

    of_answers = change.new_zeros(2 * len(pairs)).index_add(0, row.completion, change)
    chosen, rejected = of_answers.view(-1, 2).T
    return -logsigmoid(BETA * (chosen - rejected)).mean()


def read_pairs(path: str, tokenizer: Any) -> list[Pair]:
    """The rows of a JSONL file as token ids.

    Every answer ends with the end-of-sequence token.
    """
    pairs = []
    for line in Path(path).read_text("utf-8").split("\n"):
        if not line.strip():
            continue
        row = json.loads(line)
        answers = tokenizer([row["chosen"], row["rejected"]], add_special_tokens=False).input_ids
        for token_ids in answers:
            token_ids.append(tokenizer.eos_token_id)
        pairs.append((tokenizer(row["prompt"]).input_ids, answers))
    return pairs


def load(model_id: str) -> Any:
    """A model in float32 that takes packed rows."""
    config = TrainConfig(model_id=model_id, dataset_id="none", reward_funcs=[len])
    return attach(load_model(config).to(DEVICE))  # in eval mode, in which nothing is drawn


def main(model_id: str, path: str, output: str) -> None:
    """Train on the pairs once; print each step's loss, save the model."""
    tokenizer = AutoTokenizer.from_pretrained(model_id)
    policy = load(model_id)
    reference = load(model_id)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    pairs = read_pairs(path, tokenizer)
    if not pairs:
        sys.exit(f"error: no pairs in {path}")

    for start in range(0, len(pairs), BATCH_SIZE):
        loss = dpo_loss(policy, reference, pairs[start : start + BATCH_SIZE])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"pairs from {start}: loss {loss.item():.4f}")

    policy.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
