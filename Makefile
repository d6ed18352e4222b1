# `make demo` on a machine with Python 3.11 and no GPU: everything else is made on the way.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# A CPU run is many small processes on few cores: one thread each, waiting without spinning, at normal priority; and
# nothing is looked up on a model hub.
export RAY_worker_niceness = 0
export OMP_NUM_THREADS = 1
export OMP_WAIT_POLICY = passive
export HF_HUB_OFFLINE = 1

.PHONY: help install demo demo-smollm test test-slow lint format clean

help:  ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(INSTALLED): pyproject.toml requirements/cpu.txt requirements/cpu-nodeps.txt scripts/install.sh scripts/check_install.py
	bash scripts/install.sh $(VENV)
	@touch $@

install: $(INSTALLED)  ## make .venv (a few minutes, once)

demo: $(INSTALLED)  ## PPO teaches a small model a task: two minutes on two cores
	$(BIN)/python -m jobs.models tiny runs/models/tiny
	$(BIN)/hybridflow train --config-name demo $(ARGS)

demo-smollm: $(INSTALLED)  ## the same program with SmolLM2-135M-Instruct, a few steps
	$(BIN)/python -m jobs.models smollm runs/models/smollm
	$(BIN)/hybridflow train --config-name demo_smollm $(ARGS)

test: $(INSTALLED)  ## all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow" --durations=15 $(ARGS)

test-slow: $(INSTALLED)  ## the slow ones: other seeds, the control run, the big demo
	$(BIN)/python -m pytest -m slow --durations=15 $(ARGS)

lint: $(INSTALLED)  ## ruff, its format, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## caches and build leftovers; runs/ and .venv stay
	rm -rf build *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
