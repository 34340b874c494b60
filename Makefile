# Two commands matter: `make race` and `make test`. Both make the environment on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := $(VENV)/.peers
ARGS   ?=

.PHONY: setup race test lint types bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

race: $(READY)
	@$(BIN)/paceline race $(ARGS)
	@echo "next: . $(BIN)/activate; paceline race --classes-per-worker 1 --persistence 50"

test: $(READY)
	@$(BIN)/python -m pytest -n auto --dist loadgroup $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)
	@$(BIN)/mypy

bench: $(PEERS)
	@$(BIN)/python -m benchmarks $(ARGS)

$(PEERS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $(PEERS)

clean:
	rm -rf $(VENV) runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
