# make demo       train a small model to add, from nothing, in a few minutes
# make venv       .venv with everything for development
# make test       style, types, layers and all quick tests
# make test-all   and the long ones
# make gpu        tests and benchmarks on one GPU, into build/gpu.json; DEVICE=cpu or pretended: without one
#
# PYTHON=python3.12 chooses the interpreter; PIP_FLAGS="..." is passed to pip, for example an index of CPU-only wheels;
# WORKERS=4 is how many processes run the tests.

.SHELLFLAGS := -eu -c
.DEFAULT_GOAL := help
.PHONY: help venv demo lint quick-tests test test-all gpu clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt

# The first interpreter that runs, has a supported version and can make environments (a pyenv shim may be there and fail).
SUPPORTED := import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# The package in the environment is this folder itself, so only a change of dependencies asks for a new installation.
$(VENV)/.runtime: pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or 3.12 with venv is needed (on Debian: apt install python3-venv)"; exit 1; }
	@echo "installing into $(VENV) with $(PYTHON); the first time this downloads PyTorch"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@rm -rf src/tilth.egg-info  # what it was called before; and that name on PyPI is another project's package tilth
	@$(BIN)/python -m pip uninstall --yes -qq --disable-pip-version-check tilth
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@$(PIP) -e ".[dev]"
	@touch $@

venv: $(VENV)/.dev

demo: $(VENV)/.runtime
	@$(BIN)/tilth run addition-grpo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Two processes more than cores: a third of the time tests wait, for processes of their own or for limits to pass.
WORKERS ?= $(shell $(BIN)/python -c "import os; print(min(8, 2 + len(os.sched_getaffinity(0))))")
# Also where no bytecode is to be written: hundreds of processes would compile the package anew.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 GOMP_SPINCOUNT=1000 $(BIN)/python -m pytest --processes $(WORKERS)

quick-tests: $(VENV)/.dev
	$(PYTEST) -m "not slow and not gpu"

# At the same time: what lint does is done by one process.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j 2 lint quick-tests
	@$(BIN)/python -m tests.test_size

# Numbers under other instruction sets too: a library chooses the order of a sum by them.
NUMERIC := tests/models tests/training tests/engines/test_parity.py -m "not slow and not gpu"

test-all: lint
	$(PYTEST) --hypothesis-profile=long
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST) $(NUMERIC)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) $(NUMERIC)

DEVICE ?= cuda
gpu: $(VENV)/.dev
	@mkdir -p build
	$(BIN)/python benchmarks/gpu.py --device $(DEVICE) --json build/gpu.json --markdown build/gpu.md

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
