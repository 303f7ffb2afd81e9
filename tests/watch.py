"""Wait until the process on the other end of stdin is gone, and end whatever it started: all with its mark, argv[1]."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

sys.stdin.read()
for process in Path("/proc").glob("[0-9]*"):
    with suppress(OSError):
        if (
            process.name != str(os.getpid())
            and sys.argv[1].encode() in (process / "environ").read_bytes()
        ):
            os.kill(int(process.name), signal.SIGKILL)
