# `make test` and `make demo` are all a fresh machine needs. Everything lives in .venv.
VENV   ?= .venv
ifneq ($(words $(VENV)),1)
$(error VENV must be the name of one folder, without spaces; found "$(VENV)")
endif
BIN    := $(VENV)/bin
# What the environment is made with: by default the one that it was made with, if that still runs.
PYTHON ?= $(if $(shell $(BIN)/python -c "print(1)" 2>/dev/null),$(BIN)/python,python3)
STAMP  := $(VENV)/.installed
# The versions to install. `make test CONSTRAINTS=` takes the newest that pyproject.toml allows,
# CONSTRAINTS=constraints-lowest.txt the oldest.
CONSTRAINTS ?= constraints.txt
# With LOCK=.ci/requirements.lock every package but torch must have one of the hashes in that file.
# torch is not in it: which build one gets (CPU or CUDA) depends on the machine's package index.
LOCK ?=

# Checks the types in the JavaScript of the viewer's pages; the page itself needs no build.
TSC := npx --yes --package typescript@5.9.3 tsc

# Compiled test files are kept, so that a second run starts at once.
unexport PYTHONDONTWRITEBYTECODE

# Where `make install` puts a link to the command `piston`: a folder that is in PATH.
BINDIR ?= $(HOME)/.local/bin

.PHONY: help setup install test test-client wheels demo check bench lock stress clean
.DEFAULT_GOAL := help

help:
	@echo "make test         install and run the whole test suite"
	@echo "make test-client  run the client's tests with other versions of Python, from 3.8 on"
	@echo "make wheels       build piston and piston-client into dist/"
	@echo "make demo         install and run the main job"
	@echo "make install      install, and link the command piston to $(BINDIR)"
	@echo "make check        sizes of packages, ruff (lint, format), mypy and tsc"
	@echo "make bench        measure speed (benchmarks/)"
	@echo "make stress       try to break servers and files for about ten minutes (tests/stress/)"

setup: $(STAMP)

$(STAMP): scripts/install.py pyproject.toml packages/piston-client/pyproject.toml $(CONSTRAINTS) $(LOCK)
	$(PYTHON) scripts/install.py $(VENV) $(addprefix --constraints ,$(CONSTRAINTS)) $(addprefix --lock ,$(LOCK))
	@touch $@

install: setup
	mkdir -p $(BINDIR)
	ln -sf $(abspath $(BIN)/piston) $(BINDIR)/piston
	@case ":$$PATH:" in *":$(BINDIR):"*) ;; *) echo "Add $(BINDIR) to your PATH." ;; esac

# One thread per worker: more threads than cores make everything slower, not faster. A file's tests
# run in one worker, because they share what is expensive to prepare.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	@$(MAKE) --no-print-directory test-client

# The versions of Python that are installed here; the main one is part of `make test`.
test-client: setup
	$(BIN)/python packages/piston-client/run_tests.py

# What an earlier build left would bring modules that are gone; the README installs all files of
# these names, so there must be one version.
wheels: setup
	rm -rf build packages/piston-client/build dist/piston-*.whl dist/piston_client-*.whl
	$(BIN)/pip wheel --no-deps --wheel-dir dist . packages/piston-client

demo: setup
	$(BIN)/python -m piston.cli demo aloha

check: setup
	$(BIN)/python scripts/sizes.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 packages/piston-client/src
	@if $(TSC) --version >/dev/null 2>&1; then $(TSC) --project src/piston/viewer/static; else \
	    echo "Skipped: the types of src/piston/viewer/static need Node.js and the npm registry."; fi

bench: setup
	$(BIN)/python benchmarks/stats.py
	$(BIN)/python benchmarks/serve.py
	$(BIN)/python benchmarks/train.py mid
	$(BIN)/python benchmarks/inference.py pi0

# Server processes are started as in the benchmarks.
stress: setup
	OMP_NUM_THREADS=1 PYTHONPATH=benchmarks:. $(BIN)/python tests/stress

# Writes the lock file anew, after a change of constraints.txt; needs uv.
lock:
	grep -v '^torch==' constraints.txt | uv pip compile --quiet --generate-hashes --no-deps \
	    --universal --python-version 3.11 --no-header --no-annotate --output-file .ci/requirements.lock -

clean:
	rm -rf $(VENV) .venv-client .mypy_cache .ruff_cache .pytest_cache
