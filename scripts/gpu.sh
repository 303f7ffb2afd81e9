#!/usr/bin/env bash
# Prove and measure the CUDA path on this machine's GPU: bash scripts/gpu.sh [PART [SIZE]] [--out FOLDER]
# Parts, all of them in this order where none is given, each in under nine minutes and with a JSON of its own in FOLDER
# (default outputs/gpu), which is written row by row:
#   tests          the tests marked gpu
#   micro          attention and head alone, beside their rivals
#   prefix SIZE    shared against repeated prompts, 1.5B or 8B; without SIZE both
#   steps          a trainer's step at the shapes of published ones
#   trees          a step over the packed prefix trees of TRL 1.16, and over our rows
#   train          train.py in its modes against a stand-in for the server, compared with the CPU
#   ranks          2 and 4 ranks: modes, the group of weights, members that are killed or stopped. They share one GPU
#                  where NCCL_LIBRARY= names a libnccl.so.2 of 2.30 or later
#   server         the real vLLM: syncs, an update in flight, a server that sleeps
#   run            whole runs with the real vLLM on the same GPU: where a step's time goes
# Without a GPU every part that can run runs small on the CPU, and the others say why not.
# PYTHON=python3 takes that interpreter as it is, with its PYTHONPATH, in place of the environment in .venv.
# GPU_PART_SECONDS sets another limit. A part that reaches it is cut, and the next one follows; the status is then 1.
set -euo pipefail

out=outputs/gpu
words=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
        --out) [ -n "${2:-}" ] || { echo "error: --out needs a folder" >&2; exit 2; }; out=$2; shift 2 ;;
        -*) echo "error: unknown option $1: there is --out FOLDER" >&2; exit 2 ;;
        *) words+=("$1"); shift ;;
    esac
done
case "${words[*]:-}" in
    "") parts=(tests micro prefix-1.5B prefix-8B steps trees train ranks server run) ;;
    tests | micro | steps | trees | train | ranks | server | run) parts=("${words[0]}") ;;
    prefix) parts=(prefix-1.5B prefix-8B) ;;
    "prefix 1.5B" | "prefix 8B") parts=("prefix-${words[1]}") ;;
    prefix*) echo "error: unknown size ${words[*]:1}: 1.5B or 8B" >&2; exit 2 ;;
    *) echo "error: unknown part ${words[*]}: tests, micro, prefix [1.5B|8B], steps, trees, train, ranks, server, run" >&2; exit 2 ;;
esac
out=$(realpath -m "$out")

if [ -n "${PYTHON:-}" ]; then
    python=$PYTHON
    case $PYTHON in */*) python=$(realpath -s "$PYTHON") ;; esac
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
else
    source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
    make_environment gpu
    install dev -r requirements/dev.txt
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1

device=$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")') ||
    { echo "error: $python cannot import torch" >&2; exit 1; }
limit=${GPU_PART_SECONDS:-540}
quick=()
if [ "$device" = cpu ]; then
    quick=(--quick)
    reason="no GPU here"
    if nvidia-smi >/dev/null 2>&1; then reason="nvidia-smi answers, but this torch sees no GPU"; fi
    echo "$reason: what can run runs small on the CPU"
fi

# run NAME script options...: one part, with its limit.
status=0
run() {
    local json=$out/$1.json ended=0
    echo "== $1"
    timeout --foreground -k 10 "$limit" "$python" "benchmarks/$2" --json "$json" "${@:3}" || ended=$?
    case $ended in
        0) ;;
        124) echo "$1: cut after $limit s"; status=1 ;;
        137) echo "$1: killed, after $limit s or for want of memory"; status=1 ;;
        130 | 143) exit $ended ;;
        *) echo "$1: failed with status $ended"; status=1 ;;
    esac
    if [ -e "$json" ]; then echo "$1: the rows are in $json"; fi
}

for part in "${parts[@]}"; do
    case $part in
        tests) run tests gpu_tests.py ;;
        micro) run micro micro.py "${quick[@]}" ;;
        prefix-*) run "$part" prefix_attention.py --one-process --models "${part#prefix-}" "${quick[@]}" ;;
        steps) run steps steps.py "${quick[@]}" ;;
        trees) run trees trees.py "${quick[@]}" ;;
        train) run train ranks.py --parts single "${quick[@]}" ;;
        ranks) run ranks ranks.py --parts transfer modes lost "${quick[@]}" ;;
        server) run server real_server.py ;;
        run) run run one_gpu.py "${quick[@]}" ;;
    esac
done
exit $status
