# Sourced by the scripts beside it: an environment of pinned packages, and processes that end with the script.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
unset PYTHONPATH PYTHONHOME

die() { echo "error: $*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed, and not on the PATH"
}

# install NAME pip-arguments...: once per content of the requirements files.
install() {
    local stamp=$venv/.installed-$1 sum
    shift
    sum=$(cat requirements.txt requirements/*.txt | cksum)
    [ "$(cat "$stamp" 2>/dev/null)" = "$sum" ] && return
    echo "installing into $venv, a few minutes: $*"
    "$python" -m pip install -qq --disable-pip-version-check "$@" || die "pip could not install: $*"
    echo "$sum" > "$stamp"
}

has_gpu() { nvidia-smi >/dev/null 2>&1; }

# find_index: sets $index to pip's argument for PyTorch's builds for CPUs. pip asks every index for every package, so
# there is one only where it answers.
find_index() {
    local url=https://download.pytorch.org/whl/cpu
    index=()
    if "$(find_python)" -c "import urllib.request as r; r.urlopen('$url/torch/', timeout=5)" 2>/dev/null; then
        index=(--extra-index-url "$url")
    fi
}

# make_environment gpu|cpu: sets $venv and $python. .venv has the GPU set where there is a GPU, else the CPU set; the
# CPU set of a machine with a GPU has .venv-cpu.
make_environment() {
    venv=$root/.venv
    if has_gpu && [ "$1" = cpu ]; then venv=$root/.venv-cpu; fi
    python=$venv/bin/python
    if has_gpu && [ "$1" = gpu ]; then  # with an old driver CUDA 13 fails late and in other words
        local driver
        driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
        [ "${driver%%.*}" -ge 580 ] || die "the NVIDIA driver is $driver: torch and vLLM need 580 or newer (CUDA 13)"
    fi
    if ! "$python" -c 'import pip' 2>/dev/null; then  # none yet, or one whose making was interrupted
        "$(find_python)" -m venv --clear "$venv" || die "python could not make $venv (on Debian: apt install python3-venv)"
    fi
    if has_gpu && [ "$1" = gpu ]; then
        install gpu --no-deps -r requirements/gpu.txt
        return
    fi
    find_index
    install cpu --no-deps "${index[@]}" -r requirements/cpu.txt
    "$python" scripts/torchvision_ops.py  # a torchvision that PyPI has built for CUDA can be imported, too
}

group=  # of processes, which in_group started

# in_group command...: in a process group of its own (set -m), so that a server goes with all its workers.
in_group() {
    set -m
    "$@" &
    set +m
    group=$!
    wait "$group"
}

# end_group: end it, and see it gone: TERM, and KILL after a minute, in which a trainer saves its last step.
end_group() {
    local signal waited
    [ -n "$group" ] || return 0
    for signal in TERM KILL; do
        kill "-$signal" -- "-$group" 2>/dev/null || true
        waited=0
        while kill -0 -- "-$group" 2>/dev/null && [ $waited -lt 300 ]; do sleep 0.2; waited=$((waited + 1)); done
    done
}
trap end_group EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
