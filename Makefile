# Every command works on a fresh clone: each sets up .venv first when it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
EVERYDAY := -m "not nightly" --durations=10
# Pure tests one by one; those of Ray by file, since the tests of a file share a cluster and its groups; those of hosts of
# name spaces and of accelerators, which are there once, in one process (`tests/conftest.py`). Many wait for processes or
# for time to pass, which a process more than two cores have uses.
PURE := --numprocesses=3 --dist=worksteal $(EVERYDAY) tests/unit
SHARED := --numprocesses=3 --dist=loadfile $(EVERYDAY) tests/cluster tests/gpu tests/golden tests/integration
# Thousands of processes start in tests: without bytecode each compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE
LONG := --hypothesis-profile=nightly --timeout=3600 --durations=10

.DEFAULT_GOAL := help
.PHONY: help setup train test test-pure test-processes check golden lint type format docs gallery media bench gpu nightly nightly-processes nightly-pure chaos mutants conformance release-check clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with rlinf, what training needs, and the tools
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("rlinf needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
# torch first and alone: with it in place nothing else can pull another build of it.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

train: setup ## train the embodied recipe on this machine
	$(BIN)/rlinf train recipe=embodied

test: setup test-pure test-processes ## all tests but the nightly ones

test-pure: setup
	$(BIN)/pytest $(PURE)

test-processes: setup
	$(BIN)/pytest $(SHARED)

check: setup ## what CI runs: lint, types, import contracts, tests
# Lint and types take a core each: pure tests, which bound no time, fill the rest.
	$(MAKE) --no-print-directory --jobs=3 lint type test-pure
	$(MAKE) --no-print-directory test-processes

golden: setup ## freeze anew what tests/golden compares; read its diff, and commit it with what changed it
	REWRITE_FROZEN=1 $(BIN)/pytest -q tests/golden

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m docs.style

type: setup
	$(BIN)/pyright

format: setup ## rewrite the code as lint wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## rewrite the pages that are made from the code, and build the site into site/
	$(BIN)/python -m docs.generate
	$(BIN)/python -c 'import material, mkdocstrings_handlers.python' 2>/dev/null || \
	  $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
# Not with --quiet: it hides warnings from --strict, which then fails on none.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

gallery: setup ## make the runs of docs/results.md, for whose reports `make docs` then has links
	$(BIN)/python -m docs.gallery

media: setup ## make the pictures of README and the site: a run in a terminal, and the arm beside its curve
	$(BIN)/python -m docs.media
	$(BIN)/python -m docs.arm

bench: setup ## measure every promise, as ratios in one run
	$(BIN)/python -m benchmarks

# GPU_PYTHON=python3 takes an interpreter that has torch, transformers, pydantic, ruamel.yaml, typer, rich and pytest.
gpu: $(if $(GPU_PYTHON),,setup) ## tests and benchmarks on an NVIDIA GPU
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest tests/gpu tests/unit/recipes/training/weights/test_state.py
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.language.on_gpu

nightly: setup ## the long tests: fuzzing, many seeds, soaks
# Both halves at once, on a machine that has cores to spare: beside pure tests, a machine with none to spare starts
# Ray too slowly.
	$(MAKE) --no-print-directory --jobs=2 --keep-going nightly-processes nightly-pure

nightly-processes: setup
	$(BIN)/pytest $(LONG) tests/cluster tests/golden tests/integration

# Pure tests bound no time, so that they give way. Their output comes when they have ended, so that it does not run into
# the other half's.
nightly-pure: setup
	nice -n 10 $(BIN)/pytest -p no:cacheprovider $(LONG) --ignore=tests/cluster --ignore=tests/golden --ignore=tests/integration tests \
	  > nightly-pure.log 2>&1; status=$$?; cat nightly-pure.log; exit $$status

mutants: setup ## break ROOM=FOLDER in small ways (N=12, SEED=1), and list what its unit tests do not notice
	$(BIN)/python -m tests.mutants $(ROOM) --n $(or $(N),12) --seed $(or $(SEED),1)

chaos: setup ## inject faults by seed into runs of JOB="FILE [KEY=VALUE...]", and check that each recovers
	$(BIN)/python -m tests.chaos $(JOB)

conformance: setup ## what others wrote, run against rlinf: DIR=FOLDER holds checkouts RLinf and verl
	RLINF_CONFORMANCE=$(DIR) $(BIN)/pytest --timeout=3600 --durations=10 tests/conformance

release-check: setup ## build wheel and sdist, check them, and use them in clean environments
	$(BIN)/pytest --timeout=3600 --durations=10 tests/integration/test_packaging.py tests/integration/test_release.py

clean: ## remove what setup and builds made
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
