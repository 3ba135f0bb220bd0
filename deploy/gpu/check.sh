#!/usr/bin/env bash
# Does hivlp use the GPU of this machine as it should? Runs the tests marked `gpu`, and prints one
# verdict. Training is checked where the environment has the extra `train` with torch for CUDA.
#
#   deploy/gpu/check.sh            makes .venv-gpu with hivlp[gpu,dev], unless it is there
#   deploy/gpu/check.sh VENV       uses an environment that has them
#
# Exit codes: 0 passed, 1 failed, 2 no GPU or nothing to run it with. Takes under 8 minutes.
set -euo pipefail
given=${1:+$(realpath -s "$1")}
cd "$(dirname "$0")/../.."

venv=${given:-.venv-gpu}
limit_s=${GPU_CHECK_S:-480}
began=$SECONDS

verdict() {
    echo "GPU check: $1"
    exit "$2"
}

if ! command -v nvidia-smi >/dev/null || ! device=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null); then
    verdict "NO GPU: nvidia-smi sees none on this machine" 2
fi
device=${device%%$'\n'*}

if [ $# -eq 0 ] && [ ! -e "$venv/.installed" ]; then
    "${PYTHON:-python3.11}" -m venv "$venv" || verdict "NOT RUN: no environment could be made" 2
    timeout "$limit_s" "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        -e '.[gpu,dev]' || verdict "NOT RUN: hivlp[gpu,dev] could not be installed" 2
    touch "$venv/.installed"
fi
[ -x "$venv/bin/python" ] || verdict "NOT RUN: no python in $venv" 2
"$venv/bin/python" -c 'import faiss, pytest' || verdict "NOT RUN: $venv lacks faiss or pytest" 2

tests=(tests/unit/index tests/parity/test_device_parity.py)
if "$venv/bin/python" -c 'import sys, torch, accelerate; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    tests+=(tests/integration/test_train_processes.py)
else
    echo "training is not checked: $venv has no torch for CUDA, or no accelerate (extra train)"
fi

left_s=$((limit_s - (SECONDS - began)))
[ "$left_s" -gt 0 ] || verdict "NOT RUN: installing took all of $limit_s s" 2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# A test that finds no device then fails, where it would be skipped.
if HIVLP_REQUIRE=gpu OMP_NUM_THREADS=1 timeout "$left_s" \
    "$venv/bin/python" -m pytest -q -m gpu "${tests[@]}" 2>&1 | tee "$log"; then
    verdict "PASSED on $device, $(tail -n 1 "$log")" 0
fi
verdict "FAILED on $device, $(tail -n 1 "$log")" 1
