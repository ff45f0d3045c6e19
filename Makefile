PYTHON ?= python3
# Installed on its own, before everything else, when the environment has no torch; make TORCH=... for another build.
TORCH ?= torch==2.13.0

BIN := .venv/bin
# What the agents need, and everything that tests, checks and documentation need beside it.
AGENTS := .venv/.agents
STAMP := .venv/.installed

.PHONY: help install demo test test-slow lint format docs bench

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## make .venv and install the package with everything the agents, tests and checks need

$(AGENTS): pyproject.toml
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) not found: install Python 3.10 or newer, or run make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$$($(PYTHON) --version) is too old: retrieval_gym needs Python 3.10 or newer; run make PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' || $(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e '.[all]'
	touch $@

$(STAMP): $(AGENTS)
	$(BIN)/python -m pip install -e '.[all,examples,test,dev,docs]'
	touch $@

demo: $(AGENTS)  ## train a small agent on generated questions and show it before and after
	$(BIN)/python agents/pqn.py --env ChainRetrieval-Synthetic-v0 --preset demo

# Tests never reach for the network.
test test-slow: export HF_HUB_OFFLINE = 1

test: $(STAMP)  ## run the tests, in minutes
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP)  ## run the learning tests, which take minutes
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## put the code into the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## build the documentation into site/
	$(BIN)/python -m mkdocs build --strict

# Not gpu_check.py, which needs a GPU, nor the comparisons of trainings, which take hours; leaderboard.py measures nothing.
bench: $(STAMP)  ## measure speed and memory on this machine
	for script in $(filter-out %/gpu_check.py %/leaderboard.py %/list_objectives.py %/state_regimes.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done
