r"""Qwen2.5-14B-Instruct over two nodes of eight GPUs for the trainer, and one for the servers.

On the third node, whose address the trainer's first node reaches:

    export VLLM_API_KEY=...                                                            # the same for the trainer
    for pair in 0,1 2,3 4,5 6,7; do
        (until CUDA_VISIBLE_DEVICES=$pair python vllm_server.py --host 0.0.0.0 --port 800${pair%,*} \
            --model Qwen/Qwen2.5-14B-Instruct --tensor-parallel-size 2 --max-model-len 10240; do sleep 1; done) &
    done

On both nodes of the trainer, with `output_dir` on a disk that they share:

    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$FIRST_NODE:29500 \
        train.py recipes/fsdp_multi_node.py \
        --vllm_urls http://$SERVERS:8000,http://$SERVERS:8002,http://$SERVERS:8004,http://$SERVERS:8006

Meant for 24 GPUs of 80 GB; every rank loads the whole model into host memory first (60 GB in float32, eight ranks to a
node: 0.5 TB). Not measured here; no public curve to compare with is known.
"""

from dataclasses import replace

from recipes.math import config as math

config = replace(
    math,
    model_id="Qwen/Qwen2.5-14B-Instruct",
    max_tokens_per_gpu=16384,
    output_dir="outputs/math_14b",
)
