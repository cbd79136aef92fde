#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the CUDA kernels for the emulated device: cuda_build.sh KIND OUTPUT, where KIND is
#   library                  a shared library with the C API of librwkv6_cuda.so, for the Python tests
#   plain|asan|tsan|msan     the native driver, by itself or under a sanitizer (those want clang)
# CXX chooses the compiler, CUDA_SOURCES another folder than cuda/ to take the kernels from. CUDA_COMMON is a folder that
# keeps what does not come from there, the emulator and the driver, for the next build of the same KIND. CUDA_FLAGS are
# more flags for the kernels.
set -euo pipefail
kind=$1 output=$2 root=$(cd "$(dirname "$0")/../.." && pwd)
sources=${CUDA_SOURCES:-$root/cuda}
objects=$(mktemp -d)
trap 'rm -r "$objects"' EXIT
common=${CUDA_COMMON:-$objects}

flags=(-std=c++17 -O2 -g1 -ffp-contract=off -fno-strict-aliasing -Wall -Wextra -Wno-unknown-pragmas -Werror -DWKV6_EMULATE)
[[ $(uname -m) == x86_64 ]] && grep -qw fma /proc/cpuinfo && flags+=(-mfma)
kernel=() scheduler=() link=(-pthread)
case $kind in
  library) flags+=(-fPIC -fvisibility=hidden) scheduler=(-fvisibility=default) link+=(-shared) ;;
  plain) ;;
  asan) kernel=(-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
    scheduler=(-fsanitize=address -DEMULATION_ASAN) link+=("${kernel[@]}") ;;
  # The scheduler itself is not instrumented: what it does between two CUDA threads must not count as synchronisation.
  tsan) kernel=(-O1 -fsanitize=thread) scheduler=(-DEMULATION_TSAN) link+=("${kernel[@]}") ;;
  msan) kernel=(-O1 -fsanitize=memory -fno-sanitize-recover=all) scheduler=("${kernel[@]}" -DEMULATION_MSAN) link+=("${kernel[@]}") ;;
  *) echo "cuda_build.sh: unknown kind $kind" >&2 && exit 2 ;;
esac

# Loops that the kernels ask to unroll stay loops under clang: the sanitizers' checks, unrolled, take minutes to compile.
[[ $("${CXX:-c++}" --version) == *clang* ]] && flags+=(-mllvm -pragma-unroll-threshold=1 -Wno-pass-failed)

compile() { "${CXX:-c++}" "${flags[@]}" "$@"; }
emulator=$common/$kind-emulator.o driver=$common/$kind-driver.o jobs=()
for file in "$sources"/*.cu; do
  compile "${kernel[@]}" ${CUDA_FLAGS:-} -x c++ -c "$file" -o "$objects/$(basename "$file").o" &
  jobs+=($!)
done
[[ -e $emulator ]] || compile "${scheduler[@]}" -c "$root/cuda/host_emulation/emulator.cpp" -o "$emulator"
[[ $kind == library || -e $driver ]] || compile "${kernel[@]}" -c "$root/tests/native/cuda_driver.cpp" -o "$driver"
for job in "${jobs[@]}"; do wait "$job"; done
[[ $kind == library ]] && driver=
"${CXX:-c++}" "${link[@]}" "$objects"/*.cu.o "$emulator" $driver -o "$output"
