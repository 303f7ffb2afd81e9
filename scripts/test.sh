#!/usr/bin/env bash
# bash scripts/test.sh [PYTEST ARGUMENT ...]          all tests but the slow ones, on the CPU also where there is a GPU
# bash scripts/test.sh --quick [PYTEST ARGUMENT ...]  those of them that start no server, and look at behaviour alone
# bash scripts/test.sh --versions [SET ...]           the same on other versions (scripts/versions.py)
# bash scripts/test.sh -m slow, or -m gpu             those that train for minutes, or need a GPU
set -euo pipefail
if [ "${1:-}" = --quick ]; then set -- -m "not server and not slow and not house and not gpu" "${@:2}"; fi
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "${1:-}" = --versions ]; then
    export CUDA_VISIBLE_DEVICES=
    find_index
    in_group "$(find_python)" scripts/versions.py "${@:2}" "${index[@]}"
    exit
fi
if [[ " $* " == *" -m gpu "* ]]; then
    has_gpu || die "no GPU answers to nvidia-smi"
    make_environment gpu
else
    export CUDA_VISIBLE_DEVICES=
    make_environment cpu
fi
install dev -r requirements/dev.txt
# Two workers, each with whole files, which share a server: much of a test is waiting for one to start.
in_group "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
