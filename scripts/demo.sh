#!/usr/bin/env bash
# Train recipes/tiny.py end to end on this machine: environment, model, vLLM server, GRPO, reward curve.
# Arguments go to train.py: bash scripts/demo.sh --max_steps 20, or another recipe for that model: demo.sh my_recipe.py
set -euo pipefail
case " $* " in *" -h "* | *" --help "*) sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"; exit ;; esac
if [[ ${1:-} == *.py ]]; then set -- "$(realpath "$1")" "${@:2}"; else set -- recipes/tiny.py "$@"; fi
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
make_environment gpu
echo "checking the recipe"  # a wrong one, or a wrong option, is told before anything is started
run=$("$python" -c 'import sys, config
try: print(config.parse_args(sys.argv[1:]).output_dir)
except config.UserError as error: sys.exit(f"error: {error}")' "$@" | tail -n 1) || exit 1

# One thread each for trainer and server.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
# Engine and worker in one process: between two of them, vLLM waits by polling, which would take a core of its own.
export VLLM_ENABLE_V1_MULTIPROCESSING=${VLLM_ENABLE_V1_MULTIPROCESSING:-0}
folder=outputs/tiny
"$python" scripts/build_tiny.py --output "$folder"

port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
echo "starting the rollout server on port $port (log: $folder/server.log)"
# vLLM's sampler would compile itself anew for many sizes of a batch, for a quarter of a minute.
start "$folder/server.log" env TORCHDYNAMO_DISABLE=1 "$python" vllm_server.py --model "$folder/model" --port "$port" \
    --dtype float32 --enforce-eager --max-model-len 64 --max-num-seqs 256 --gpu-memory-utilization 0.3
server=${groups[-1]} limit=$((SECONDS + 900))
until "$python" -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health', timeout=2)" 2>/dev/null; do
    problem=
    kill -0 "$server" 2>/dev/null || problem="the server ended"
    [ $SECONDS -lt $limit ] || problem="the server did not start within 900 s"
    if [ -n "$problem" ]; then tail -n 20 "$folder/server.log"; die "$problem: its log is $folder/server.log"; fi
    sleep 1
done

start - "$python" train.py "$@" --vllm_urls "http://127.0.0.1:$port"
wait "${groups[-1]}" || die "training failed"
stop_all
"$python" scripts/plot.py "$run"
