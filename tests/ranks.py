"""Ranks forked from a process that has imported the libraries already: under torchrun each imports them anew.

Reads runs from stdin, one JSON line each, [num_ranks, port, argv, environment, folder, stdout, stderr]; answers each
with a line, the exit code: 0, or 1 where a rank failed, in which case the others are ended, as torchrun does it. With 0
ranks it is one process without the variables of a rank, and its own exit code (1 for a signal).
"""

import json
import os
import runpy
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import datasets  # noqa: F401
import peft  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

sys.path.append(str(Path(__file__).resolve().parent.parent))

from utils import die_with


def become(rank, num_ranks, port, argv, environment, folder, *outputs):
    """Run the script as this rank; does not return."""
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    if num_ranks:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")
    sys.exit()


def end(ranks, number):
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank, number)


def main():
    for line in sys.stdin:
        num_ranks, *run = json.loads(line)
        parent, ranks, code, failed_s = os.getpid(), set(), 0, None
        for rank in range(max(num_ranks, 1)):
            if (pid := os.fork()) == 0:
                die_with(parent)
                become(rank, num_ranks, *run)
            ranks.add(pid)
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            ranks.discard(pid)
            if pid and status:
                code = 1 if num_ranks else max(1, os.waitstatus_to_exitcode(status))
                failed_s = failed_s or time.monotonic()
                end(ranks, signal.SIGTERM)
            if failed_s and time.monotonic() > failed_s + 10:
                end(ranks, signal.SIGKILL)
            time.sleep(0.01)
        print(code, flush=True)


if __name__ == "__main__":
    main()
