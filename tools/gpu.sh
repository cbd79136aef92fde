#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything a machine with a GPU can show, one step after the other: make gpu. Needs nvcc and a torch with CUDA in the
# Python that PYTHON names. A step that fails does not stop the rest; the exit status is 0 if all pass.
# The parts that need a GPU are not yet run on a GPU. Without one, the others run and the script says what it left out.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
status=0

step() { # step WHAT COMMAND...
  printf '\n== %s\n' "$1"
  shift
  "$@" || { echo "FAILED: $*"; status=1; }
}
tests() { "$python" -m pytest -q "$@"; }

has_gpu=0
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && has_gpu=1
if ((has_gpu)); then
  TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')}
  export TORCH_CUDA_ARCH_LIST
fi

step "build" env RWKV6_OPS_CUDA=1 "$python" setup.py -q build_ext --inplace
step "what nvcc makes of the kernels" tests tests/test_cuda_build.py
step "the kernels on the emulated device, under sanitizers too" tests tests/test_cuda_emulation.py
if ((!has_gpu)); then
  printf '\nNo GPU: left out are the tests on CUDA tensors, compute-sanitizer, graphs and streams, and the timings.\n'
  exit "$status"
fi

step "all tests on CUDA tensors" tests tests -k "cuda and not emulated"
step "streams, graphs, devices" tests tests/test_cuda_device.py
# A few cases of every kernel instance: each access is checked, which takes a hundred times as long.
some='cuda and not emulated and (T65 or K3V5T65 or K128V128T65 or varlen or f64-f64)'
for tool in memcheck racecheck initcheck synccheck; do
  step "compute-sanitizer: $tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
    "$python" -m pytest -q tests/test_forward.py tests/test_gradients.py -k "$some"
done
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((gpus > 1)); then
  step "sequences cut over $gpus GPUs" "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" \
    tools/gpu_distributed.py
else
  printf '\nOne GPU: left out is rwkv6_ops.distributed with NCCL.\n'
fi
step "timings" "$python" tools/gpu_bench.py
exit "$status"
