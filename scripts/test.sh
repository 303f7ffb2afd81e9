#!/usr/bin/env bash
# Run the tests. Arguments go to pytest, for example: bash scripts/test.sh -m slow
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
make_environment
install dev -r requirements-dev.txt
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Two workers, each with whole files, which share a server: much of a test is waiting for one to start.
start - "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
wait "${groups[-1]}"
