# `make` lists the targets. Each sets up $(VENV) first, once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.agoge-async-ready

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-all check bench lint format type layering clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "Settings: PYTHON=$(PYTHON) (3.11 or newer), VENV=$(VENV)"

setup: $(READY) ## Make the environment: vLLM for this machine's GPU or CPU, the project, its tools

$(READY): pyproject.toml constraints.txt tools/setup.sh
	@PYTHON='$(PYTHON)' VENV='$(VENV)' bash tools/setup.sh
	@touch $@

demo: $(READY) ## Run the demo: a router over local engines
	$(BIN)/agoge-async demo

test: $(READY) ## Run the tests
	$(BIN)/python -m pytest

test-all: $(READY) ## Run also the tests that take long: engines and ranks that are killed
	$(BIN)/python -m pytest -m "slow or not slow"

check: lint type layering test-all ## Run all that CI runs: format check, lint, types, layering, tests

bench: $(READY) ## Measure the local engine, and pushes of weights
	$(BIN)/python benchmarks/local_engine.py
	$(BIN)/python benchmarks/weight_sync.py

lint: $(READY) ## Check the code's style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(READY) ## Format the code, and fix what ruff can
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

type: $(READY) ## Check the types
	$(BIN)/mypy

layering: $(READY) ## Check that modules import only from lower layers
	$(BIN)/python -m pytest tests/test_layering.py

clean: ## Remove the environment, caches and builds
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
