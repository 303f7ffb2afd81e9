"""Build what the tiny recipes train: a 0.8 M-parameter Qwen3, half-taught, and its problems. About 15 s.

    python scripts/build_tiny.py [--task sort|calculator|agent] [--output DIR]

`sort` (`recipes/tiny.py`): `52719384=` wants `12345789`. `calculator` (`recipes/tool_calculator.py`): `547+582=` wants
`547+582?`, upon which the tool says `1129!`, and then `1129`. `agent` (`recipes/tool_agent.py`): `347+482~=` wants
`(347+482)347+482?`, a thought, which the chat template drops when the turn is over, and a call, upon which a tool says
`829`; then `(829)829~?`, mirrored by another: `928`; then `(928)928`. Nothing is done where DIR is complete.
"""

import argparse
import json
import random
import string
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

NUM_DIGITS = 8
NUM_TRAIN, NUM_HELD_OUT = 9600, 512
BATCH_SIZE, MAX_STEPS, LEARNING_RATE, WARMUP_STEPS = 32, 1000, 2e-3, 20
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
AGENT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'].split(')')[-1] }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'][0]['function']['arguments']['of'] }}?{% endif %}<eos>"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
# share of fresh problems right at which teaching ends: partly able, and soft enough to explore
STOP_AT = {"sort": 0.3, "calculator": 0.3, "agent": 0.6}


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


def agent_problem(rng: random.Random) -> tuple[str, str]:
    """A sum or a difference of three digits, to be mirrored."""
    if rng.random() < 0.5:
        a, b = rng.randint(100, 499), rng.randint(100, 499)
        return f"{a}+{b}~=", str(a + b)[::-1]
    a, b = rng.randint(600, 999), rng.randint(100, 499)
    return f"{a}-{b}~=", str(a - b)[::-1]


def problems(num: int, held_out: bool, seed: int, task: str = "sort") -> list[dict[str, str]]:
    """`num` distinct problems of one side: `prompt` and `answer`."""
    rng = random.Random(seed)
    make = {"sort": sort_problem, "calculator": calculator_problem, "agent": agent_problem}[task]
    rows: dict[str, str] = {}
    while len(rows) < num:
        prompt, answer = make(rng)
        if is_held_out(answer) == held_out:
            rows[prompt] = answer
    return [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]


def transcripts(row: dict[str, str], task: str) -> list[list[tuple[str, bool]]]:
    """What is taught of a problem: texts in pieces, and whether the model is to write them."""
    prompt, answer, end = row["prompt"], row["answer"], ("<eos>", True)
    if task == "sort":
        return [[(prompt, False), (answer, True), end]]
    if task == "calculator":
        call = prompt.replace("=", "?")
        return [[(prompt, False), (call, True), (answer + "!", False), (answer, True), end]]
    said, texts = prompt, []
    turns = {prompt[:-2]: answer[::-1], answer[::-1] + "~": answer, answer: ""}
    for thought, tool_says in turns.items():
        call = thought + "?" * bool(tool_says)
        texts.append([(said, False), (f"({thought.removesuffix('~')}){call}", True), end])
        said += f"{call}<eos>{tool_says}"
    return texts


def build_tokenizer(task: str = "sort") -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and pad, bos, eos."""
    tokens = ["<pad>", "<bos>", "<eos>", "\n", *(chr(code) for code in range(32, 127))]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        model_max_length=128,
    )  # fmt: skip
    tokenizer.chat_template = AGENT_TEMPLATE if task == "agent" else TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A randomly initialized Qwen3 of 0.8 M parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
        tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def lessons(tokenizer: PreTrainedTokenizerFast, seed: int, task: str) -> Iterator[Any]:
    """For each step of `teach` the batch of each turn of fresh training problems."""
    rows = problems(BATCH_SIZE * MAX_STEPS, held_out=False, seed=seed + 1, task=task)
    taught = []  # by turn: ids and labels
    for turns in zip(*(transcripts(row, task) for row in rows), strict=True):
        texts = ["".join(text for text, _ in pieces) for pieces in turns]
        ids = tokenizer(texts, return_tensors="pt")["input_ids"]
        # All of one length, laid out alike.
        is_ours = [own for text, own in turns[0] for _ in tokenizer(text)["input_ids"]]
        labels = ids.where(torch.tensor(is_ours), -100)
        taught.append(zip(ids.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True))
    for batches in zip(*taught, strict=True):
        yield 0.1, [({"input_ids": ids[:, :-1]}, labels[:, 1:]) for ids, labels in batches]


def teach(
    model: Any, steps: Iterable[Any], learning_rate: float, warmup_steps: int, stop_at: float
) -> None:
    """Supervised steps, each with a weight in the mean of what is right before it trains, until that is `stop_at`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    warmup = LinearLR(optimizer, 1 / warmup_steps, total_iters=warmup_steps)
    accuracy = 0.0
    for step, (weight, batches) in enumerate(steps, 1):
        right, loss = torch.tensor(True), torch.tensor(0.0)
        for inputs, target in batches:
            logits = model(**inputs).logits[:, : target.shape[1]]
            # All of these are right where greedy decoding would be.
            right = right & ((logits.argmax(-1) == target) | (target == -100)).all(-1)
            loss = loss + cross_entropy(logits.flatten(0, 1), target.flatten())
        accuracy += weight * (right.float().mean().item() - accuracy)
        if step % 25 == 0 or accuracy >= stop_at:
            print(f"teaching: step {step}, {accuracy:.0%} of fresh problems right", flush=True)
        if accuracy >= stop_at:
            return
        loss.backward()
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
    tokenizer = build_tokenizer(task)
    model = build_model(tokenizer)
    steps = lessons(tokenizer, seed, task)
    teach(model, steps, LEARNING_RATE, WARMUP_STEPS, STOP_AT[task])
    part = folder / "model.part"
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder / "model")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    outputs = Path(__file__).resolve().parent.parent / "outputs"
    parser.add_argument("--task", choices=["sort", "calculator", "agent"], default="sort")
    parser.add_argument("--output", type=Path, help="default: its own folder in outputs/")
    args = parser.parse_args()
    folder = args.output or outputs / {"sort": "tiny"}.get(args.task, args.task)
    if (folder / "model").is_dir():
        sys.exit(print(f"{folder} is there already"))
    build(folder, 0, args.task)


if __name__ == "__main__":
    main()
