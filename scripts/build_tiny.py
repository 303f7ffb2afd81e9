"""Build what `recipes/tiny.py` trains: a 0.8 M-parameter Qwen3 half-taught to sort digits, and its problems.

python scripts/build_tiny.py [--output DIR] [--seed N]      # about 15 s; nothing to do where DIR is complete
"""

import argparse
import json
import random
import string
import sys
import zlib
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

NUM_DIGITS = 8
NUM_TRAIN, NUM_HELD_OUT = 9600, 512
BATCH_SIZE, MAX_STEPS, LEARNING_RATE, WARMUP_STEPS = 32, 1000, 2e-3, 20
STOP_AT = 0.3  # share of fresh problems right at which teaching ends: partly able, and soft enough to explore


def is_held_out(answer: str) -> bool:
    """Split by the answer's hash, so that the two sides share neither a prompt nor an answer."""
    return zlib.crc32(answer.encode()) % 8 == 0


def problems(num: int, held_out: bool, seed: int) -> list[dict[str, str]]:
    """`num` distinct problems of one side: prompt `52719384=`, answer `12345789`."""
    rng = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < num:
        digits = "".join(rng.choices(string.digits, k=NUM_DIGITS))
        answer = "".join(sorted(digits))
        if is_held_out(answer) == held_out:
            rows[f"{digits}="] = answer
    return [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and pad, bos, eos."""
    tokens = ["<pad>", "<bos>", "<eos>", "\n", *(chr(code) for code in range(32, 127))]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=128
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A randomly initialized Qwen3 of 0.8 M parameters."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Supervised steps on fresh training problems until `STOP_AT` of them are right before they are trained on.

    All teacher-forced argmaxes right is the same as greedy decoding right, so the accuracy costs nothing.
    """
    rows = problems(BATCH_SIZE * MAX_STEPS, held_out=False, seed=seed + 1)
    texts = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in rows]
    ids = tokenizer(texts, return_tensors="pt")["input_ids"]  # all of one length
    labels = ids.clone()
    labels[:, : NUM_DIGITS + 1] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    accuracy = 0.0
    for step, (batch, target) in enumerate(zip(ids.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True), 1):
        logits, target = model(batch[:, :-1]).logits, target[:, 1:]
        right = ((logits.argmax(-1) == target) | (target == -100)).all(-1).float().mean().item()
        accuracy += 0.1 * (right - accuracy)
        if step % 25 == 0 or accuracy >= STOP_AT:
            print(f"teaching: step {step}, {accuracy:.0%} of fresh problems right", flush=True)
        if accuracy >= STOP_AT:
            return
        cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()


def build(folder: Path, seed: int) -> None:
    """Write `train.jsonl`, `heldout.jsonl` and then `model/` into `folder`: a model there means that all is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, num, held_out in (("train", NUM_TRAIN, False), ("heldout", NUM_HELD_OUT, True)):
        lines = [json.dumps(row) + "\n" for row in problems(num, held_out, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    teach(model, tokenizer, seed)
    part = folder / "model.part"
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder / "model")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parent.parent / "outputs" / "tiny"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.output / "model").is_dir():
        sys.exit(print(f"{args.output} is there already"))
    build(args.output, args.seed)


if __name__ == "__main__":
    main()
