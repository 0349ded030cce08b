# make demo: everything from nothing to digits classified on the simulated stick.  make test: the whole default suite.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
MINUTES ?= 600
SLOW ?= tests

.PHONY: demo test slow lint docs size system clean

demo: $(VENV)/.demo
	@PARALLEL=0 MOCKCORAL=1 DEV=CORAL $(BIN)/python examples/digits.py

test: system $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS)

slow: system $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) -m slow --minutes $(MINUTES) $(SLOW)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m coral.isa.docs docs/isa --check
	@$(MAKE) --no-print-directory size

docs: $(VENV)/.dev
	$(BIN)/python -m coral.isa.docs docs/isa

size:
	@$(PYTHON) tools/size.py

system:
	@tools/system_packages.sh

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tinycoral needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "could not make a virtual environment: on Debian, apt-get install python3-venv"; exit 1; }

$(VENV)/.demo: $(BIN)/python pyproject.toml
	@echo "installing tinycoral and what the demo needs into $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
