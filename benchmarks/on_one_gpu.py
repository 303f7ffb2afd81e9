"""Run a script of torchrun as if each rank stood on a host of its own, with this machine's one GPU.

    torchrun --nproc_per_node=4 benchmarks/on_one_gpu.py train.py [the script's arguments]

nccl takes several ranks on one GPU from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1. It shows that the collectives are
right and end, not how fast several GPUs are.
"""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
