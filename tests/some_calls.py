"""Functions for the tests of worker processes, in a module that imports little: the workers import it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time


def add(a, b):
    return a + b, os.getpid()


first_loop: list[asyncio.AbstractEventLoop] = []


async def in_one_loop():
    """As a client that a module shares: it belongs to the loop that first ran it."""
    first_loop.append(asyncio.get_running_loop())
    return first_loop[0] is first_loop[-1]


def fails():
    raise KeyError("gold")


async def leaves_later():
    raise SystemExit(4)


def hangs(path):
    path.write_text(str(os.getpid()))
    re.match(r"(a+)+$", "a" * 40 + "b")  # for ever, and without letting go of the GIL


def sandbox(path):
    with subprocess.Popen(["sleep", "60"]) as process:
        path.write_text(str(process.pid))
        process.wait()


def naps(seconds):
    time.sleep(seconds)


def meets_another(folder):
    """Ends when a second call has begun, too, and returns its span."""
    start = time.monotonic()  # the same clock in all processes
    (folder / str(start)).touch()
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    time.sleep(0.05)  # so that more than two would be seen
    return start, time.monotonic()


def prints_and_is_killed():
    print("to stdout", end="")
    print("to stderr", end="", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)
