#!/bin/sh
# On a machine with an NVIDIA device and a CUDA toolkit (nvcc), one command for all that needs one:
# Horovod with NCCL for the PyTorch that is installed, the tests marked `gpu`, and the figures in
# docs/benchmarks/gpu.md. A step that fails does not keep the next from running.
#
#   sh infra/bench/gpu.sh [PYTHON]      .venv/bin/python where none is named
cd "$(dirname "$0")/../.." || exit 2
python=${1:-.venv/bin/python}
wheels=$(mktemp -d) && trap 'rm -r "$wheels"' EXIT
failed=

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "the PyTorch of $python shows no CUDA device; nothing was done" >&2
  exit 2
}
HOROVOD_GPU_OPERATIONS=NCCL "$python" infra/horovod/horovod_backend.py "$wheels" >"$wheels/log" &&
  "$python" -m pip install --no-deps --no-index --force-reinstall "$wheels"/horovod-*.whl ||
  { tail -n 40 "$wheels/log"; failed="$failed Horovod"; }
# Their own conftest alone: nothing of Prefect is needed.
"$python" -m pytest --confcutdir=tests/gpu -m gpu tests/gpu || failed="$failed tests"
"$python" -m infra.bench gpu || failed="$failed figures"
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
