# The end of each batch script that `launch.py --slurm` writes, whose first lines set the variables used here.
set -euo pipefail
mkdir -p "$output"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=("${nodes[@]:server_nodes}")
port=$((10000 + SLURM_JOB_ID % 20000))  # another one for each job
VLLM_API_KEY=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export VLLM_API_KEY  # in the environment, as other users of a node can read command lines
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1  # the last one is for torchrun to pass on, too
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT  # the servers end with the trainer

step=(srun --export=ALL --overlap --cpu-bind=none --ntasks-per-node=1 --open-mode=append)  # with all of a node's cores and GPUs
: > "$output/servers.txt"
for node in "${nodes[@]:0:server_nodes}"; do
    for ((gpu = 0; gpu < gpus_per_node; gpu += tensor_parallel)); do
        gpus=$(seq -s , $gpu $((gpu + tensor_parallel - 1))) at=$((port + 1 + gpu))
        "${step[@]}" --nodes=1 --nodelist="$node" --output="$output/server-$node-$gpu.log" \
            env CUDA_VISIBLE_DEVICES="$gpus" bash -c 'until "$@"; do sleep 1; done' server \
            "${server[@]}" --host 0.0.0.0 --port $at &
        echo "http://$node:$at" >> "$output/servers.txt"
    done
done
"${step[@]}" --nodes=${#trainers[@]} --nodelist="$(IFS=,; echo "${trainers[*]}")" --output="$output/trainer.log" \
    "$python" -m torch.distributed.run --nnodes=${#trainers[@]} --nproc_per_node="$gpus_per_node" \
    --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="${trainers[0]}:$port" "${trainer[@]}"
