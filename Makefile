# `make test` and `make demo` are all a fresh machine needs. Everything lives in .venv.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The versions to install. `make test CONSTRAINTS=` takes the newest that pyproject.toml allows,
# CONSTRAINTS=constraints-lowest.txt the oldest.
CONSTRAINTS ?= constraints.txt
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS))

# Compiled test files are kept, so that a second run starts at once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup test demo check bench stress clean
.DEFAULT_GOAL := help

help:
	@echo "make test   install and run the whole test suite"
	@echo "make demo   install and run the main job"
	@echo "make check  ruff (lint, format) and mypy"
	@echo "make bench  measure speed (benchmarks/)"
	@echo "make stress try to break servers and files for about ten minutes (tests/stress/)"

setup: $(STAMP)

# pip, not uv: the constraints select the CPU build of torch where one is offered.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

# One thread per worker: more threads than cores make everything slower, not faster. A file's tests
# run in one worker, because they share what is expensive to prepare.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

demo: setup
	$(BIN)/python -m piston.cli demo aloha

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/stats.py
	$(BIN)/python benchmarks/serve.py
	$(BIN)/python benchmarks/train.py mid
	$(BIN)/python benchmarks/inference.py pi0

# Server processes are started as in the benchmarks.
stress: setup
	OMP_NUM_THREADS=1 PYTHONPATH=benchmarks $(BIN)/python tests/stress

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
