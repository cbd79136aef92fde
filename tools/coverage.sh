#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Which lines no test runs: the extension built with gcov's counters and the package, in build/coverage, under all tests
# that do not build something else. Fails below 95 % of csrc/ or of rwkv6_ops/. VENV has pytest, coverage and gcovr.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD python=${VENV:-$PWD/.venv}/bin/python build=$PWD/build/coverage
mkdir -p "$build/objects" "$build/rwkv6_ops"

# -O1, else gcc inlines lines away; the counters of several threads are added atomically.
flags=(-std=gnu17 -D_GNU_SOURCE -DPy_LIMITED_API=0x030A0000 -O1 -g --coverage -fprofile-update=atomic -fPIC
  -ffp-contract=off -fno-math-errno -fno-trapping-math -Icsrc "-I$($python -c 'import sysconfig; print(sysconfig.get_path("include"))')")
objects=()
for source in csrc/*.c csrc/cpu/*.c; do
  object=$build/objects/$(basename "$source" .c).o
  objects+=("$object")
  [[ $object -nt $source && -z $(find csrc -name '*.h' -newer "$object") ]] || ${CC:-gcc} "${flags[@]}" -c "$source" -o "$object"
done
find "$build" -name '*.gcda' -delete
${CC:-gcc} --coverage -shared "${objects[@]}" -lm -ldl -pthread -o "$build/rwkv6_ops/_native.abi3.so"
cp rwkv6_ops/*.py rwkv6_ops/*.pyi "$build/rwkv6_ops"
rm -rf "$build/tests" && cp -r tests csrc cuda "$build"

cd "$build"
without=(test_package test_abi test_memory test_house test_cuda_build test_benchmarks test_native)
PYTHONPATH=$build "$python" -m coverage run --branch --parallel-mode --source=rwkv6_ops -m pytest -q -p no:cacheprovider \
  "${without[@]/#/--ignore=tests/}" "$@" || true
"$python" -m coverage combine -q
"$python" -m gcovr --root "$root" --object-directory "$build/objects" --filter 'csrc/' --txt-metric line --print-summary \
  --fail-under-line 95
"$python" -m coverage report --show-missing --fail-under=95
