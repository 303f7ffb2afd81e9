#!/usr/bin/env bash
# Run the tests: all of them, or with --quick those that start no servers. Other arguments go to pytest: -m slow
# They run on the CPU, on a machine with a GPU too; -m gpu runs those that need one.
# --versions [SET ...] runs the quick ones on other versions: scripts/versions.py has the sets.
set -euo pipefail
if [ "${1:-}" = --quick ]; then set -- -m "not server and not slow" "${@:2}"; fi
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "${1:-}" = --versions ]; then
    export CUDA_VISIBLE_DEVICES=
    find_index
    start - "$(find_python)" scripts/versions.py "${@:2}" "${index[@]}"
    wait "${groups[-1]}"
    exit
fi
if [[ " $* " == *" -m gpu "* ]]; then
    has_gpu || die "no GPU answers to nvidia-smi"
    make_environment gpu
else
    export CUDA_VISIBLE_DEVICES=
    make_environment cpu
fi
install dev -r requirements-dev.txt
# Two workers, each with whole files, which share a server: much of a test is waiting for one to start.
start - "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
wait "${groups[-1]}"
