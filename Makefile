# Three commands matter: `make race`, `make quick` and `make test`. They make the environment on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PEERS  := $(VENV)/.peers
MKDOCS := $(VENV)/.mkdocs
VERSIONS := 3.11 3.12 3.13
ARGS   ?=

# Dozens of processes load the same modules. Whoever loads one first compiles it, and it is kept, whatever the machine's
# usual setting. Most of what is installed is never loaded, so nothing is compiled in advance.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup setup-integrations race test test-long test-integrations quick test-all lint types dist reproduce bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $(READY)

race: $(READY)
	@$(BIN)/paceline race $(ARGS)
	@echo "next: . $(BIN)/activate; paceline race --classes-per-worker 1 --persistence 50"

test: $(READY)
	@$(BIN)/python -m pytest -n auto --dist loadgroup $(ARGS)

# The same with more examples of each law, and tests/long: every experiment as a toy.
test-long: $(READY)
	@PACELINE_TESTS_LONG=1 $(BIN)/python -m pytest -n auto --dist loadgroup $(ARGS)

# What runs inside Trainer, Lightning, Ray and Slurm, in an environment of its own: these are large, and none is needed.
# It holds only what $(VENV) lacks, and finds the rest there by a .pth file, so that torch is installed once.
INTEGRATIONS := .venv-integrations
FRAMEWORKS := huggingface lightning ray
test-integrations: setup-integrations
	@PACELINE_TESTS_INTEGRATIONS=1 $(INTEGRATIONS)/bin/python -m pytest -n auto --dist loadgroup \
	  $(or $(ARGS),tests/integrations tests/data/test_stateful_loader.py $(FRAMEWORKS:%=src/paceline/%))

setup-integrations: $(INTEGRATIONS)/.ready

$(INTEGRATIONS)/.ready: $(READY)
	$(BIN)/python -m venv --clear --without-pip $(INTEGRATIONS)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$(echo $(INTEGRATIONS)/lib/python*/site-packages)/venv.pth
	$(BIN)/python -m pip --python $(INTEGRATIONS)/bin/python install --quiet --disable-pip-version-check --no-compile \
	  -c constraints.txt -e '.[dev,integrations]'
	@touch $@

# Laws, parity and units of the core: what starts no process and takes no seconds. An answer in a minute.
NOT_QUICK := analysis averaging bench cli cluster collective cuda ddp distributed docs golden models pipeline portability \
  ranks recipes reports runs
quick: $(READY)
	@PACELINE_TESTS_QUICK=1 $(BIN)/python -m pytest -n auto --dist loadgroup --timeout 20 tests $(ARGS) \
	  -m "not processes and not slow and not browser" $(NOT_QUICK:%=--ignore=tests/%)

# Every Python that is supported, each in an environment of its own: .venv-3.11 and so on.
test-all:
	@set -e; for version in $(VERSIONS); do \
	  python=$$(.ci/interpreter $$version); echo "== Python $$version: $$python"; \
	  $(MAKE) --no-print-directory test PYTHON=$$python VENV=.venv-$$version; \
	done

lint: $(READY)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)
	@$(BIN)/mypy

# The wheel and the sdist, in dist/. The version is that of src/paceline/__init__.py.
dist: $(READY)
	@rm -rf dist && $(BIN)/python -m hatchling build

# Figures of the papers, and questions and timings of our own: names in ARGS, or none for a list.
reproduce: $(READY)
	@$(BIN)/python -m experiments --of papers $(ARGS)

bench: $(PEERS)
	@$(BIN)/python -m experiments --of questions,timings $(ARGS)

$(PEERS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $(PEERS)

# The site of docs/, in site/: open site/index.html, no server is needed. docs-serve shows changes as they are written.
.PHONY: docs docs-serve docs-tools
docs: $(MKDOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

docs-serve: $(MKDOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve $(ARGS)

docs-tools: $(MKDOCS)

$(MKDOCS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $(MKDOCS)

clean:
	rm -rf $(VENV) $(VERSIONS:%=.venv-%) runs build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
