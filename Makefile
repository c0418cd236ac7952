# Two commands are all a new user needs: `make quickstart` and `make test`.
# Both create .venv on first use and need only Python 3.11 to 3.13, gcc, make and git.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DONE   := $(VENV)/.installed
SITE   := .venv-docs
SEED   ?= 0
RUN    ?= runs/quickstart-$(shell date +%Y%m%d-%H%M%S)

# Files of tests at once: most of their time, one process loads libraries and another waits. Three
# where there is memory for the engines and ranks of three.
WORKERS ?= $(shell awk '/^MemTotal/ {print ($$2 > 12000000) ? 3 : 2}' /proc/meminfo)
# Tests without processes of their own keep a core busy each.
UNIT_WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc); echo $$((n < 4 ? n : 4)))
FILES := --dist loadfile --no-loadscope-reorder

export DS_BUILD_OPS := 0
# Threads that spin while they wait starve the other processes of a small machine.
export OMP_WAIT_POLICY := PASSIVE
# The engine in .venv is vLLM's for CPUs, whatever the build of torch beside it could use.
export CUDA_VISIBLE_DEVICES :=
# Files are UTF-8, whatever the locale says.
export PYTHONUTF8 := 1
# Modules are compiled once, not by each of the hundred processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install quickstart test tests sandbox unit lint format types docs clean

help:  ## Show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(DONE)  ## Create .venv with everything for a machine without a GPU

$(DONE): requirements/install.py $(filter-out %/docs.txt,$(wildcard requirements/*.txt)) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "Keel needs Python 3.11, 3.12 or 3.13; set PYTHON=…"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python requirements/install.py
	@touch $@
	@echo "Installed. For the command: source $(BIN)/activate, and then keel --help"

quickstart: install  ## Train the tiny model for real, end to end, in minutes
	$(BIN)/keel train quickstart run.seed=$(SEED) run.dir=$(RUN) $(ARGS)

# Pyright keeps one core busy for a minute, and the tests leave some of theirs idle.
test: install lint sandbox  ## Lint, types and every test
	@$(MAKE) --no-print-directory --jobs=2 types tests

# With a process a core, more threads would wait for each other: a twentieth of the time, of `unit` a
# tenth.
tests unit: export OMP_NUM_THREADS := 1
tests: install
	$(BIN)/python -m pytest -q -n $(WORKERS) $(FILES) $(ARGS)

# System packages are the user's business, but a CI machine is ours to set up.
sandbox:
	@command -v bwrap >/dev/null || { [ "$$CI" = true ] && [ "$$(id -u)" = 0 ] \
	  && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y bubblewrap >/dev/null; } \
	  || echo "No bubblewrap: the tests of the code sandbox will be skipped (apt-get install bubblewrap)"

unit: install  ## The tests that start no engine, Ray, sandbox or other process: a minute or two
	$(BIN)/python -m pytest -q -n $(UNIT_WORKERS) $(FILES) -m "not e2e and not gpu" \
	  --hypothesis-profile=unit $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright

format: install  ## Put the code into the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# In an environment of its own, so that nothing of it is needed for anything else. `--strict`: a link
# or an anchor that leads nowhere ends it.
docs: $(SITE)/.installed  ## Build the documentation into site/, every link checked
	PYTHONPATH=$(CURDIR) $(SITE)/bin/python -m docs.reference_pages
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict
	@echo "site/index.html"

$(SITE)/.installed: requirements/docs.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --requirement $<
	@touch $@

clean:  ## Remove build products (not runs, not .venv)
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
