"""Build what the tiny recipes train: a 0.8 M-parameter Qwen3, half-taught, and its problems. About 15 s.

    python scripts/build_tiny.py [--task sort|calculator|agent] [--output DIR] [--seed N]

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
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from torch.nn.functional import cross_entropy
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
    for thought, tool_says in (
        (prompt[:-2], answer[::-1]),
        (answer[::-1] + "~", answer),
        (answer, ""),
    ):
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


def teach(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, task: str
) -> None:
    """Supervised steps on fresh training problems until `STOP_AT` of them are right before they are trained on.

    All teacher-forced argmaxes right is the same as greedy decoding right, so the accuracy costs nothing.
    """
    rows = problems(BATCH_SIZE * MAX_STEPS, held_out=False, seed=seed + 1, task=task)
    taught = []  # by turn: ids and labels
    for turns in zip(*(transcripts(row, task) for row in rows), strict=True):
        ids = tokenizer(
            ["".join(text for text, _ in pieces) for pieces in turns], return_tensors="pt"
        )["input_ids"]
        labels, place = ids.clone(), 0  # all of one length, laid out alike
        for text, is_ours in turns[0]:
            length = len(tokenizer(text)["input_ids"])
            if not is_ours:
                labels[:, place : place + length] = -100
            place += length
        taught.append(zip(ids.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS
    )
    accuracy = 0.0
    for step, batches in enumerate(zip(*taught, strict=True), 1):
        right, loss = torch.tensor(True), torch.tensor(0.0)
        for batch, labels in batches:
            logits, target = model(batch[:, :-1]).logits, labels[:, 1:]
            right = right & ((logits.argmax(-1) == target) | (target == -100)).all(-1)
            loss = loss + cross_entropy(logits.flatten(0, 1), target.flatten())
        accuracy += 0.1 * (right.float().mean().item() - accuracy)
        if step % 25 == 0 or accuracy >= STOP_AT[task]:
            print(f"teaching: step {step}, {accuracy:.0%} of fresh problems right", flush=True)
        if accuracy >= STOP_AT[task]:
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
    teach(model, tokenizer, seed, task)
    part = folder / "model.part"
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder / "model")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    outputs = Path(__file__).resolve().parent.parent / "outputs"
    parser.add_argument("--task", choices=["sort", "calculator", "agent"], default="sort")
    parser.add_argument(
        "--output", type=Path, help="default: outputs/tiny, outputs/calculator, outputs/agent"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = args.output or outputs / {"sort": "tiny"}.get(args.task, args.task)
    if (folder / "model").is_dir():
        sys.exit(print(f"{folder} is there already"))
    build(folder, args.seed, args.task)


if __name__ == "__main__":
    main()
