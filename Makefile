# `make quickstart` needs python3 >= 3.11, gcc and make. Nothing is installed outside .venv.
#   PYTHON=python3.12       the Python that makes .venv
#   TORCH_INDEX_URL=URL     where torch comes from (default: the usual index)
#   ARGS="seed=1 ..."       more overrides for `make quickstart`
PYTHON ?= python3
TORCH_INDEX_URL ?=
ARGS ?=
BIN := .venv/bin
START := runs/quickstart-sft/model/config.json

# One thread per process: several processes share the cores, and more threads make all of them slower.
export OMP_NUM_THREADS := 1
export PYTHON TORCH_INDEX_URL

.DEFAULT_GOAL := help
.PHONY: help quickstart install install-dev test test-slow test-oracle lint format docs clean

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

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

test-oracle: install-dev ## the algorithms against verl's own functions
	$(BIN)/pip install -q --no-deps --target .oracle -r requirements/oracle.txt
	PYTHONPATH=.oracle $(BIN)/pytest tests/algo/test_against_verl.py

format: install-dev ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install ## write docs/metrics.md anew
	$(BIN)/python -m megappo.observability.metric_catalogue > docs/metrics.md

clean: ## remove caches and build output; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
