# Everything a user or developer types. `make run` and `make test` need only Python 3.11 or
# newer, a C++ compiler and make; the rest is set up in .venv.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
# What running needs, and what tests, checks and benchmarks need besides.
STAMP   := $(VENV)/.installed
DEV     := $(VENV)/.installed-dev
CUDA_TOOLS := build/cuda-tools/.installed
SOURCES := pyproject.toml CMakeLists.txt $(shell find ps/engine scheduler/engine workers/offload/engine cuda -type f -not -name "*.py*" 2>/dev/null)
INSTALL := $(BIN)/python deploy/install.py
# The CPU build where one is offered: a GPU machine sets TORCH=torch to get its own.
TORCH   ?= torch>=2.9,<2.14

# One more than cores: tests wait for processes as often as they compute.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 1)

# Tests start hundreds of processes: without its bytecode kept, each would compile us again.
unexport PYTHONDONTWRITEBYTECODE

# Seconds that `make fuzz` spends on each of what parses bytes.
FUZZ    ?= 60
# How many times as long `make soak` goes on as `make test-all`.
SOAK    ?= 10
# How long `make soak` goes on after that, and which chances it takes.
MINUTES ?= 60
SEED    ?= 1
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup run test test-all cuda-tools soak fuzz test-containers check format protos bench bench-train bench-gpu bench-moe bench-plan bench-ps clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the virtual environment and build the native core

$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"heterps needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}")'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(INSTALL) pip "pip>=25.1"
	@$(INSTALL) PyTorch "$(TORCH)"
	@$(INSTALL) "HeterPS and what it needs" --editable ".[examples]"
	@touch $@

$(DEV): pyproject.toml | $(STAMP)
	@$(INSTALL) "what tests and checks need" --group dev
	@touch $@

run: $(STAMP) ## train the flights job on an embedded cluster and explain its plan
	@$(BIN)/heterps train examples/flights/job.yaml

test: $(DEV) ## run the tests, on all cores, in some 20 minutes on two
	@$(PYTEST) -m "not exhaustive"

test-all: $(DEV) $(CUDA_TOOLS) ## run all tests, with whole sweeps, sanitizers and long rounds of kills
	@$(PYTEST)

cuda-tools: $(CUDA_TOOLS) ## fetch nvcc, cuobjdump and CUTLASS's headers into build/, for test-all

# In a folder of their own: torch has some of the same packages in other versions.
$(CUDA_TOOLS): pyproject.toml | $(STAMP)
	@rm -rf $(dir $@)
	@$(INSTALL) "what compiles for GPUs" --target $(dir $@) --group cuda
	@$(INSTALL) "CUTLASS's headers" --target $(dir $@) --no-deps "nvidia-cutlass==4.2.*"
	@touch $@

soak: $(DEV) ## kill and disturb processes SOAK times as long as test-all does, then MINUTES of all at once
	@HETERPS_SOAK=$(SOAK) $(PYTEST) -m soak
	@$(BIN)/python -m tests.soak.run --minutes $(MINUTES) --seed $(SEED)

fuzz: $(DEV) ## feed what parses bytes with mutations, FUZZ seconds each; findings go to tests/fuzz/findings
	@$(INSTALL) "what fuzzing needs" --group fuzz
	@$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ)

test-containers: $(DEV) ## run the deployment in containers, as root, on Debian or Ubuntu
	@tests/deploy/install-engine.sh
	@HETERPS_CONTAINERS=1 $(BIN)/python -m pytest tests/deploy/test_compose_run.py

check: $(DEV) ## lint, format, types, floors, stubs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m protos.generate --check
	git ls-files '*.cc' '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(DEV) ## format everything
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cc' '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

protos: $(DEV) ## regenerate the stubs
	$(BIN)/python -m protos.generate

bench: $(DEV) ## compare with plain PyTorch; writes bench/results/
	$(BIN)/python -m bench.train

bench-train: $(DEV) ## train a CTR network beside others; writes bench/results/ and docs/
	@$(BIN)/python -m bench.ctr

bench-moe: $(DEV) ## measure the mixture of experts beside others; writes bench/results/ and docs/
	@$(BIN)/python -m bench.moe

bench-gpu: $(DEV) ## on a machine with a GPU: build, test, train with and measure the CUDA ops
	@$(BIN)/python -m bench.gpu

bench-plan: $(DEV) ## measure planning, for hours; writes bench/results/ and docs/
	$(BIN)/python -m bench.scheduler

bench-ps: $(DEV) ## measure the parameter server beside others; writes bench/results/ and docs/
	@$(BIN)/python -m bench.ps

clean: ## remove what was built
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
