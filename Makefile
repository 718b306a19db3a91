# `make quickstart` needs python3 >= 3.11, gcc and make. Nothing is installed outside .venv.
#   PYTHON=python3.12       the Python that makes .venv
#   PYTHON_NEXT=python3.13  the Python of `make test-mcore-next` (default: python3.12)
#   TORCH_INDEX_URL=URL     where torch comes from (default: the usual index)
#   ARGS="..."              more overrides for `make quickstart`, options for `make bench`
#   NAME=log_probs          which benchmark `make bench` runs (default: all)
PYTHON ?= python3
TORCH_INDEX_URL ?=
ARGS ?=
NAME ?= all
PYTHON_NEXT ?= python3.12
BIN := .venv/bin
START := runs/quickstart-sft/model/config.json

# One thread per process: several processes share the cores, and more threads make all of them slower.
export OMP_NUM_THREADS := 1
export PYTHON TORCH_INDEX_URL

.DEFAULT_GOAL := help
.PHONY: help quickstart install install-dev test test-slow test-oracle test-mcore-next test-signatures bench bench-verl bench-trl lint format docs clean

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

quickstart: install $(START) ## install, then train the quickstart model with GRPO
	$(BIN)/megappo train experiment=quickstart $(ARGS)

# Made once; the model that both quickstart experiments start from.
$(START): | install
	$(BIN)/megappo sft experiment=quickstart

install: ## make .venv and install everything a CPU run needs
	@requirements/install.sh

install-dev: ## install, and the tools of `make test`
	@requirements/install.sh dev

lint: install-dev ## lint, format check, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

test: lint ## everything that must hold before a commit
	$(BIN)/pytest -m "not slow and not gpu"

test-slow: install-dev ## the tests that take minutes each
	$(BIN)/pytest -m "slow and not gpu"

test-oracle: install-dev bench-verl ## the algorithms against verl's own functions
	PYTHONPATH=.oracle $(BIN)/pytest tests/algo/test_against_verl.py

test-mcore-next: ## the trainers with the megatron-core that Python 3.12 gets (about 6 GB in .venv-mcore-next)
	VENV=.venv-mcore-next PYTHON=$(PYTHON_NEXT) requirements/install.sh trainer
	.venv-mcore-next/bin/pytest -m "not slow and not gpu" tests/device tests/models tests/train

# Sources to read, apart and never imported: Transformer Engine without its CUDA half breaks Megatron's imports.
test-signatures: install-dev ## calls into Transformer Engine against its oldest and newest supported release
	for version in 2.8.0 2.20.2; do \
	    $(BIN)/pip install -q --no-deps --no-compile --upgrade --target .gpu-sources/$$version transformer-engine==$$version || exit 1; \
	done
	$(BIN)/pytest tests/device/test_gpu_signatures.py

bench: install bench-verl $(if $(filter all end_to_end,$(NAME)),bench-trl) ## benchmarks (NAME=controller, ARGS="--quick", ARGS="--fail-below", ARGS="-- --case gae")
	$(BIN)/python -m benchmarks.run $(NAME) $(ARGS)

# What benchmarks and oracle tests compare with, apart from .venv and never a dependency; made anew when its list changes.
bench-verl: .oracle/installed ## verl in .oracle
.oracle/installed: requirements/oracle.txt | install
	rm -rf .oracle
	$(BIN)/pip install -q --no-deps --target .oracle -r requirements/oracle.txt
	touch $@

bench-trl: .trl/installed ## TRL in .trl, an environment of its own (1.2 GB)
.trl/installed: requirements/torch.txt requirements/trl.txt
	rm -rf .trl
	$(PYTHON) -m venv .trl
	.trl/bin/pip install -q $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) -r requirements/torch.txt
	.trl/bin/pip install -q -r requirements/trl.txt
	touch $@

format: install-dev ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install ## write docs/metrics.md anew
	$(BIN)/python -m megappo.observability.metric_catalogue > docs/metrics.md

clean: ## remove caches and build output; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
