# `make quickstart` and `make test` do their own set-up; all they need is Python 3.10 or newer, make and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that run tests side by side: at most one a core.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, len(os.sched_getaffinity(0))))')
TESTS := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

# What reads all files, and a whole run in real processes: imports do not say that they reach a change.
ALWAYS := tests/test_style.py tests/test_imports.py tests/training/test_runs.py

.PHONY: help quickstart pictures test test-for test-slow test-all lint format clean

help:
	@echo "make quickstart   fine-tune a real small model and see the effect (about 10 minutes on two cores)"
	@echo "make quickstart MODEL=DIR DATA=FILE   the same with your own model and records; KEYS='key.sub=value ...' too"
	@echo "make pictures     draw the pictures of the docs anew, after make quickstart"
	@echo "make test         lint, type check and tests"
	@echo "make test-for     those of the tests that reach what has changed since main"
	@echo "make test-slow    the long tests"
	@echo "make test-all     everything: those two, and the tests that take longest"
	@echo "make lint         ruff, mypy and the rules of imports alone"
	@echo "make format       reformat the code"
	@echo "make clean        remove the environment, the caches and runs/quickstart"

quickstart: $(VENV)/installed
	$(BIN)/python -m quickstart $(if $(MODEL),--model '$(MODEL)') $(if $(DATA),--data '$(DATA)') $(KEYS)

# Of the quickstart's model; a run that is there already would only be said to be done.
pictures: $(VENV)/installed
	rm -rf runs/recording runs/pictures
	$(BIN)/python -m benchmarks.recording docs/pictures/run.svg train_ds.py --config configs/quickstart.yml save_path=runs/recording max_steps=12
	$(BIN)/python train_ds.py --config configs/quickstart.yml save_path=runs/pictures train_batch_size=48 max_steps=4 'profile_steps=[3,4]'
	$(BIN)/python train_ds.py --config configs/ds_config_pp.yml --plan --devices 8xA100-40G save_path=runs/pictures
	cp runs/pictures/timeline.png runs/pictures/plan.png docs/pictures/
	$(BIN)/python -m benchmarks.schedules docs/pictures/chunks.png

test: lint
	$(TESTS) -m "not slow and not longest"

test-for: $(VENV)/installed-dev
	files=$$($(BIN)/python -m tests.affected) && $(TESTS) -m "not slow and not longest" $$files $(ALWAYS)

test-slow: $(VENV)/installed-dev
	$(TESTS) -m "slow and not longest"

test-all: lint
	PIPETUNE_TEST_ALL=1 $(TESTS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What make itself made: not the runs of a user.
clean:
	find . -path './$(VENV)' -prune -o -name __pycache__ -prune -exec rm -rf {} +
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis *.egg-info runs/quickstart

$(VENV)/installed: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Pipetune needs Python 3.10 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt
	touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
