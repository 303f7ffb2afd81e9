"""Ends ranks that wait for a rank 0 that was stopped, or whose host is lost."""

import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist


def watch_main(ended: threading.Event, timeout_s: float) -> None:
    """Let rank 0 show in a thread that it lives, and end other ranks `timeout_s` after it does not.

    Ranks may wait for rank 0, as it does for servers, without a limit; where no connection is
    closed nothing else tells them. Once `ended` is set nothing more happens.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()  # with a connection of its own
    role = _beat if dist.get_rank() == 0 else _listen
    threading.Thread(target=role, args=(store, ended, timeout_s), daemon=True).start()


def _beat(store: dist.Store, ended: threading.Event, timeout_s: float) -> None:
    while not ended.wait(min(5.0, timeout_s / 4)):
        with suppress(RuntimeError):  # the store ends with the run
            store.set("beat", str(time.monotonic()))


def _listen(store: dist.Store, ended: threading.Event, timeout_s: float) -> None:
    seen = b""
    limit = _end_later(ended, timeout_s)
    while not ended.wait(min(5.0, timeout_s / 4)):
        with suppress(RuntimeError):
            beat = store.get("beat")  # for ever, where the store's host does not answer
            if beat != seen:
                limit.cancel()
                limit = _end_later(ended, timeout_s)
            seen = beat


def _end_later(ended: threading.Event, timeout_s: float) -> threading.Timer:
    """A running timer that ends this process."""

    def end() -> None:
        if not ended.is_set():
            print(
                f"error on rank {dist.get_rank()}: no sign of life from rank 0 for "
                f"{timeout_s:.0f} s: it was stopped, or its host is lost",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            os._exit(1)

    limit = threading.Timer(timeout_s, end)
    limit.daemon = True
    limit.start()
    return limit
