"""Tiny models, real servers and ranks for the tests."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from select import select
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from forked import Forked
from launch import free_port

from benchmarks.local_server import local_server

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
VOCAB = ["<pad>", "<bos>", "<eos>", "\n", *(chr(code) for code in range(32, 127))]
CHAT_TEMPLATE = (
    "<bos>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def make_tokenizer(add_bos=False, chat_template=None):
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCAB)}, merges=[]))
    backend.decoder = decoders.Fuse()
    if add_bos:
        marks = {"single": "<bos> $A", "special_tokens": [("<bos>", 1)]}
        backend.post_processor = TemplateProcessing(**marks)
    names = {"pad_token": "<eos>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **names, model_max_length=256, chat_template=chat_template
    )


def far_from_uniform(model, factor=5):
    """Make a random model's distributions so; and matrices of zeros random, as one of Gemma3's."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(factor)
                if not weight.any():
                    weight.normal_(std=0.5)
    return model


def moved_adapter(model):
    """The model, with LoRA whose B is away from zero, so that A has a gradient, too."""
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    return model


def make_model(path, tied=True, layers=2, max_len=256, chat_template=None):
    """A random Qwen3 whose weights are large enough for its distributions to be far from uniform."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(VOCAB), hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=max_len, tie_word_embeddings=tied,
        pad_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    far_from_uniform(Qwen3ForCausalLM(config)).save_pretrained(path)
    make_tokenizer(chat_template=chat_template).save_pretrained(path)
    return str(path)


def table(rows):
    """Rewards of a group: a row for each completion, a column for each function, NaN for None."""
    rows = [[float("nan") if reward is None else reward for reward in row] for row in rows]
    return torch.tensor(rows, dtype=torch.float64)


def server(model, log, *options, start=Forked, **more):
    """A real server for short sequences, quickly started."""
    short = ("--max-model-len", "128", "--max-num-seqs", "64")
    return local_server(model, log, *short, *options, start=start, **more)


def on_ranks(num_ranks, folder, function, *arguments):
    """Call `module.function(*arguments)` of a test module on every rank; fails with what the ranks printed."""
    module, name = function.split(".")
    script = folder / f"{name}.py"
    script.write_text(
        f"import sys; sys.path[:0] = {[str(ROOT / name) for name in ('', 'tests', 'scripts')]!r}\n"
        f"from utils import exits\nfrom {module} import {name}\n"
        f"with exits():\n    {name}(*{[str(a) for a in arguments]!r})\n"
    )
    on_forked_ranks(num_ranks, script, status=0)


@cache
def _forkserver():
    """A process of `ranks.py`, which ends with this one."""
    command = [sys.executable, str(ROOT / "tests" / "ranks.py")]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=ENV, text=True)


def on_forked_ranks(num_ranks, *arguments, status=None, timeout_s=300, env=()):
    """What torchrun does, without importing the libraries for each rank; returns the finished process with its output.

    0 ranks are one process without torchrun's variables, as `python script.py`. A `status` is that of its end.
    """
    server = _forkserver()
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        for output in outputs:
            output.touch()
        words = [*map(str, arguments)]
        run = [num_ranks, free_port(), words, {**ENV, **dict(env)}, str(ROOT), *map(str, outputs)]
        server.stdin.write(json.dumps(run) + "\n")
        server.stdin.flush()
        has_ended = select([server.stdout], [], [], timeout_s)[0]
        said = [output.read_text() for output in outputs]
    if not has_ended:
        server.kill()
        _forkserver.cache_clear()
        raise subprocess.TimeoutExpired(words, timeout_s, *said)
    done = subprocess.CompletedProcess(words, int(server.stdout.readline()), *said)
    assert status in (None, done.returncode), "".join(said)[-6000:]
    return done


RECIPE = """
from config import TrainConfig
def rows(): return [{{"prompt": f"{{i}}+{{i}}="}} for i in range(40)]
def mean_id(completion_ids, **_): return [sum(ids) / len(ids) / 50 for ids in completion_ids]
config = TrainConfig(
    model_id={model!r}, vllm_urls={urls!r}, dataset_id=rows, reward_funcs=[mean_id], max_completion_len=12,
    batch_size=6, num_generations=4, max_steps=3, learning_rate=1e-2, output_dir={output!r}, max_staleness=0,
    reward_workers=1, logged_groups=None,
)
"""


def said(prompt_ids, number):
    """A completion of 1 to 9 tokens that depends on nothing but prompt and number."""
    rng = random.Random(1000 * sum(prompt_ids) + number)
    return [rng.randrange(5, 90) for _ in range(rng.randrange(1, 10))]


def answer_in(seconds):
    """Answers with `said`, in about `seconds`, from a tenth to twice."""
    rng = random.Random(0)
    return lambda prompt_ids, number: (said(prompt_ids, number), seconds * rng.uniform(0.1, 2))


def saved_state(checkpoint):
    """What a checkpoint says of its run, beside weights and optimizer."""
    return torch.load(checkpoint / "trainer" / "state.pt", weights_only=True)


def read(folder, name):
    lines = (folder / "run" / f"{name}.jsonl").read_text().splitlines()
    return [*map(json.loads, lines)]


def wait_until(condition, seconds=20):
    """Look again and again until a condition holds; a test that waits for longer fails."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not come about in {seconds} s"
        time.sleep(0.02)


def printed_until(capsys, text):
    """What is printed until a text is among it."""
    printed = [""]

    def is_there():
        printed.append(capsys.readouterr().out)
        return text in "".join(printed)

    wait_until(is_there)
    return "".join(printed)


def living():
    """Id, parent, session and command line of each process that has not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (folder / "stat").read_text().rpartition(")")[2]
            state, parent, _, session = stat.split()[:4]
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
            if state != "Z":
                found.append((int(folder.name), int(parent), int(session), command))
    return found


def processes_of(leader):
    """Ids of a process, of those in its session, and of all their children."""
    found = {leader}
    before: set[int] = set()
    while found != before:
        before = set(found)
        for number, parent, session, _ in living():
            if parent in found or session == leader:
                found.add(number)
    return found


def have_ended(processes):
    """Whether none of these ids is there any more."""
    return not processes & {number for number, *_ in living()}


def flags(**fields):
    """Fields as words of a command line: `--save_steps 2 --use_fsdp true`."""
    words = []
    for name, value in fields.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        words += [f"--{name}", text]
    return words


def change(path, old, new):
    """Write `new` in place of `old`, which a file must have."""
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def write_recipe(folder, model, urls=()):
    """The recipe of a short run into `folder / "run"`, by a name that no other test imports."""
    path = folder / f"recipe_{folder.name}.py"
    path.write_text(RECIPE.format(model=model, urls=[*urls], output=str(folder / "run")))
    return path


def write_program(path, text):
    """A shell script that stands in for a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def finished(*command, env=ENV, timeout=300, **options):
    """A program that has ended, with its output."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, timeout=timeout, **options
    )


def start_as_a_user(*command, **options):
    """A program that was started from `/`, with Ctrl-C and SIGHUP, which tests in the background do not hear."""
    numbers = signal.SIGINT, signal.SIGHUP
    return subprocess.Popen(
        command, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={name: value for name, value in ENV.items() if name != "OMP_NUM_THREADS"},
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in numbers], **options,
    )  # fmt: skip


def start_train(num_ranks, *arguments, env=ENV, **options):
    """A started `train.py`, alone or under torchrun, whose output can be read while it runs."""
    command = [sys.executable]
    if num_ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}"]
        command += ["--master_port", str(free_port())]
    command += [str(ROOT / "train.py"), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        **options,
    )  # fmt: skip


def read_until(process, text):
    """Read what a process prints, up to a line with a text."""
    printed = []
    for line in process.stdout:
        printed.append(line)
        if text in line:
            return
    raise AssertionError("".join(printed))


def request_times(server, path="/sample"):
    """When a stand-in got its requests of a path, in seconds of the monotonic clock."""
    return [seconds for name, seconds in server.log if name == path]


def steps_of(folder):
    """The steps of a run's metrics, as they stand there."""
    return [row["step"] for row in read(folder, "metrics")]


def trained_groups(folder):
    """The numbers of the groups that a run trained, each once."""
    return sorted({row["group"] for row in read(folder, "completions")})


def checkpoints_of(folder):
    """The names of a folder's checkpoints."""
    return sorted(path.name for path in folder.glob("checkpoint-*"))
