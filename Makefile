SHELL := bash
VENV ?= .venv
export VENV
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test unit lint format bench check-cluster clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: ## make the environment (done by the others; a second time returns at once)
	@.ci/setup.sh

demo: setup ## the main job on what this machine has: run, compare, report
	$(BIN)/raytest demo

test: setup ## all tests: unit, integration (Ray), e2e (real vLLM), gpu where there is one
	$(BIN)/python -m pytest $(ARGS)

unit: setup ## unit tests only: no Ray, no torch
	$(BIN)/python -m pytest tests/unit $(ARGS)

lint: setup ## ruff, mypy --strict, direction of imports: all of them, then the outcome
	@failed=; \
	for check in "ruff check ." "ruff format --check ." mypy "lint-imports --no-cache"; do \
		echo "$$check"; $(BIN)/$$check || failed="$$failed, $$check"; \
	done; \
	if [ -n "$$failed" ]; then echo "lint failed: $${failed#, }" >&2; exit 1; fi

format: setup ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## measure raytest itself (tests/benchmarks)
	$(BIN)/python -m pytest tests/benchmarks -s $(ARGS)

check-cluster: setup ## check the files of cluster/, each by its own tool, offline
	$(BIN)/python -m cluster.checks $(ARGS)

clean: ## remove caches and build products; the environment and results stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find raytest tests -name __pycache__ -type d -print0 | xargs -0 -r rm -rf
