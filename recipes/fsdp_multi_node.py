r"""Qwen2.5-14B-Instruct over two nodes for the trainer, and one for the servers.

    python scripts/launch.py recipes/fsdp_multi_node.py --slurm job.sh \
        --trainer_nodes 2 --tensor_parallel 2

It writes a batch script for Slurm: `sbatch job.sh`. Without Slurm, docs/scale.md has the commands
for each node.

Meant for 24 GPUs of 80 GB, eight to a node; while it loads, rank 0 alone holds the whole model in
host memory (60 GB in float32). Not measured here; no public curve to compare with is known.
"""

from dataclasses import replace

from recipes.math import config as math

config = replace(
    math,
    model_id="Qwen/Qwen2.5-14B-Instruct",
    max_tokens_per_gpu=16384,
    output_dir="outputs/math_14b",
)
