#!/usr/bin/env bash
# Everything that needs a GPU, in one command: the compiled kernels and the learner against the CPU, the benchmarks of
# the RL head, the scan and the learner, and a short training run. A step that fails does not stop the next ones; the
# exit code is 1 if any failed, 2 if there is no GPU.
#
#     tests/benchmarks/gpu.sh [STEP ...]        steps: kernels learner_tests rl_head scan learner train; default: all
#
# PYTHON    the interpreter, with torch and triton; default python3
# RESULTS   folder of gpu_*.json; default tests/benchmarks/results
# LIMIT     most seconds of one step; default 1800
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-1800}
RESULTS=$(realpath -m "${RESULTS:-$root/tests/benchmarks/results}")
cd "$root" || exit
ALL=(kernels learner_tests rl_head scan learner train)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=() lines=()

need_gpu() {
    "$PYTHON" -P - <<'PY'
import sys
try:
    import torch
    import triton
except ImportError as missing:
    sys.exit(f"gpu.sh: {sys.executable} cannot import {missing.name}. Set PYTHON to an interpreter that has torch for "
             "CUDA and triton: PYTHON=/path/to/python tests/benchmarks/gpu.sh")
if not torch.cuda.is_available():
    sys.exit(f"gpu.sh: {sys.executable} sees no GPU (torch {torch.__version__}, CUDA {torch.version.cuda}). Run this "
             "on a machine with an NVIDIA GPU, with a torch that is built for CUDA. Without a GPU, `pytest` tests "
             "the kernels in Triton's interpreter.")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {sys.executable}")
PY
}

need_package() {  # Installed nowhere: into a folder of this run, from a copy, so that the checkout stays clean.
    "$PYTHON" -P -c "import asyncrl.triton_kernels.rl_head" 2> /dev/null && return
    mkdir "$work/source"
    cp -r asyncrl trainers envs triton_kernels pyproject.toml README.md LICENSE "$work/source"
    "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --target "$work/site" "$work/source" || return
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
    "$PYTHON" -P -c "import asyncrl.triton_kernels.rl_head"
}

kernels() { ASYNCRL_TEST_COMPILED=1 "$PYTHON" -P -m pytest -q tests/triton_kernels/test_gpu.py; }
learner_tests() { "$PYTHON" -P -m pytest -q tests/learner/test_cuda.py; }
rl_head() { "$PYTHON" tests/benchmarks/rl_head.py --full --json "$RESULTS/gpu_rl_head.json"; }
scan() { "$PYTHON" tests/benchmarks/scan.py --device cuda --json "$RESULTS/gpu_scan.json"; }
learner() { "$PYTHON" tests/benchmarks/learner.py --device cuda --json "$RESULTS/gpu_learner.json"; }

train() {
    set -o pipefail
    "$PYTHON" -P -m asyncrl train --algo dapo --plain --learner.device cuda --generator.device cuda \
        --generator.count 1 --steps 60 --run.dir "$work/runs" --name gpu --toy.cache_dir "$work/toy" |
        tee "$work/train.txt" || return
    sed -n '/^reward /,/^restarts /p' "$work/train.txt" | report train
}

report() {  # Lines of standard input, with what they were measured on, as gpu_NAME.json.
    "$PYTHON" -P -c '
import json, platform, sys
from datetime import date
from pathlib import Path
import torch, triton
versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
found = {"benchmark": sys.argv[1], "date": date.today().isoformat(), "versions": versions}
found |= {"device": torch.cuda.get_device_name(), "lines": sys.stdin.read().splitlines()}
Path(sys.argv[2]).write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
' "$1" "$RESULTS/gpu_$1.json"
}

run_step() {
    local name=$1 start=$SECONDS code=0
    printf '\n==== %s\n' "$name"
    timeout --kill-after 30 "$LIMIT" bash -uc "$name" || code=$?
    ((code == 0)) || failed+=("$name")
    lines+=("$(printf '%-14s exit %-4s %5s s' "$name" "$code" $((SECONDS - start)))")
}

need_gpu || exit 2
need_package || {
    echo "gpu.sh: asyncrl cannot be imported, and not be installed without an index: see above. Installing needs pip and" >&2
    echo "setuptools 77 or newer in $PYTHON." >&2
    exit 2
}
mkdir -p "$RESULTS"
steps=("$@")
((${#steps[@]})) || steps=("${ALL[@]}")
for step in "${steps[@]}"; do
    [[ " ${ALL[*]} " == *" $step "* ]] || { echo "gpu.sh: no step $step; there are: ${ALL[*]}" >&2; exit 2; }
done
# A step is a process of its own, so that its limit ends all of it.
export PYTHON RESULTS work
export -f report "${ALL[@]}"
for step in "${steps[@]}"; do run_step "$step"; done
printf '\n==== summary\n'
printf '%s\n' "${lines[@]}"
printf '%s\n' "${lines[@]}" | report run
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}"; exit 1; }
