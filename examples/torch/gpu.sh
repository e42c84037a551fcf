#!/usr/bin/env bash
# Everything that the torch device is to do, on TORCH_DEVICE (cuda:0 if it is not set), from a bare clone: one table.
#
#     examples/torch/gpu.sh [MODEL.gguf ...]
#
# It needs a Python with this project's dependencies and torch. Nothing is installed or downloaded.
set -u
root="$(cd "$(dirname "$0")/../.." && pwd)"
export TORCH_DEVICE="${TORCH_DEVICE:-cuda:0}" GGML_NO_BACKTRACE=1
export PYTHONPATH="$root:$root/examples/torch:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
exec python3 "$root/examples/torch/gpu.py" "$@"
