#!/usr/bin/env bash
# Train recipes/tiny.py end to end on this machine: environment, model, vLLM server, GRPO, reward curve.
# Arguments go to launch.py: bash scripts/demo.sh --max_steps 20, or a recipe first: demo.sh recipes/tool_calculator.py
set -euo pipefail
case " $* " in *" -h "* | *" --help "*) sed -n '2,3s/^# //p' "${BASH_SOURCE[0]}"; exit ;; esac
if [[ ${1:-} == *.py ]]; then set -- "$(realpath "$1")" "${@:2}"; else set -- recipes/tiny.py "$@"; fi
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
make_environment gpu
echo "checking the recipe"  # errors show before a model is made or a server started
found=$(PYTHONPATH=scripts "$python" -c 'import sys, launch
_, _, config = launch.parse(sys.argv[1:])
print(config.model_id, config.output_dir, sep="\n")' "$@" | tail -n 2) || exit 1
{ read -r model; read -r run; } <<< "$found"
case $model in
    outputs/tiny/model) "$python" scripts/build_tiny.py ;;
    outputs/calculator/model) "$python" scripts/build_tiny.py --task calculator ;;
    outputs/agent/model) "$python" scripts/build_tiny.py --task agent ;;
    outputs/tiny_vlm/model) "$python" scripts/build_tiny_vlm.py ;;
    HuggingFaceTB/SmolLM2-135M-Instruct)
        model=$("$python" scripts/get_smollm.py | tail -n 1)  # a folder where the hub is out of reach
        set -- "$@" --model_id "$model" ;;
esac
in_group "$python" scripts/launch.py "$@" || exit 1
"$python" scripts/show.py "$run" --html
"$python" scripts/plot.py "$run"
