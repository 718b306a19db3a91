#!/usr/bin/env bash
# Checks the CUDA path on one GPU, in at most ten minutes. Needs a CUDA build of torch, Triton, transformers and
# megatron-core; Transformer Engine is checked too where it is installed. Exits 3 on a machine without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
exec timeout 600 "${PYTHON:-python}" -m benchmarks.gpu_check "$@"
