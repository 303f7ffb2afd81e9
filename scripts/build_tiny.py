"""Build what the tiny recipes train: a 0.8 M-parameter Qwen3, half-taught, and its problems. About 15 s.

    python scripts/build_tiny.py [--task sort|calculator] [--output DIR] [--seed N]

`sort` (`recipes/tiny.py`): `52719384=` wants `12345789`. `calculator` (`recipes/tool_calculator.py`): `547+582=` wants
`547+582?`, upon which the tool says `1129!`, and then `1129`. Nothing is done where DIR is complete.
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


def sort_problem(rng: random.Random) -> tuple[str, str]:
    """Eight digits, and the same in order."""
    digits = "".join(rng.choices(string.digits, k=NUM_DIGITS))
    return f"{digits}=", "".join(sorted(digits))


def calculator_problem(rng: random.Random) -> tuple[str, str]:
    """A sum of two numbers, which the model may leave to a calculator, and its four digits."""
    a, b = rng.randint(500, 999), rng.randint(500, 999)
    return f"{a}+{b}=", str(a + b)


def problems(num: int, held_out: bool, seed: int, task: str = "sort") -> list[dict[str, str]]:
    """`num` distinct problems of one side: `prompt` and `answer`."""
    rng = random.Random(seed)
    make = {"sort": sort_problem, "calculator": calculator_problem}[task]
    rows: dict[str, str] = {}
    while len(rows) < num:
        prompt, answer = make(rng)
        if is_held_out(answer) == held_out:
            rows[prompt] = answer
    return [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]


def transcript(row: dict[str, str], task: str) -> list[tuple[str, bool]]:
    """What is taught of a problem, as pieces of text, and whether the model is to write them."""
    if task == "sort":
        return [(row["prompt"], False), (row["answer"], True)]
    call = row["prompt"].replace("=", "?")
    return [(row["prompt"], False), (call, True), (row["answer"] + "!", False), (row["answer"], True)]


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


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, task: str) -> None:
    """Supervised steps on fresh training problems until `STOP_AT` of them are right before they are trained on.

    All teacher-forced argmaxes right is the same as greedy decoding right, so the accuracy costs nothing.
    """
    rows = problems(BATCH_SIZE * MAX_STEPS, held_out=False, seed=seed + 1, task=task)
    transcripts = [[*transcript(row, task), (tokenizer.eos_token, True)] for row in rows]
    texts = ["".join(text for text, _ in pieces) for pieces in transcripts]
    ids = tokenizer(texts, return_tensors="pt")["input_ids"]  # all of one length, laid out alike
    labels, place = ids.clone(), 0
    for text, is_ours in transcripts[0]:
        length = 1 if text == tokenizer.eos_token else len(text)
        if not is_ours:
            labels[:, place : place + length] = -100
        place += length
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


def build(folder: Path, seed: int, task: str = "sort") -> None:
    """Write `train.jsonl`, `heldout.jsonl` and then `model/` into `folder`: a model there means that all is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, num, held_out in (("train", NUM_TRAIN, False), ("heldout", NUM_HELD_OUT, True)):
        lines = [json.dumps(row) + "\n" for row in problems(num, held_out, seed, task)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    teach(model, tokenizer, seed, task)
    part = folder / "model.part"
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder / "model")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    outputs = Path(__file__).resolve().parent.parent / "outputs"
    parser.add_argument("--task", choices=["sort", "calculator"], default="sort")
    parser.add_argument("--output", type=Path, help="default: outputs/tiny, outputs/calculator")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = args.output or outputs / {"sort": "tiny", "calculator": "calculator"}[args.task]
    if (folder / "model").is_dir():
        sys.exit(print(f"{folder} is there already"))
    build(folder, args.seed, args.task)


if __name__ == "__main__":
    main()
