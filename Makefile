# Everything runs in .venv, made on first use. Once its packages are there, no network is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Most of what is installed is never imported; the rest is compiled when it is.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	-c constraints.txt
DEMO_CELLS ?= 28000
PEERS_CELLS ?= 200000

# One target for each notebook, called as its name begins: figure4, table2 and so on.
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
FIGURES := $(sort $(foreach path,$(NOTEBOOKS),$(firstword $(subst _, ,$(basename $(notdir $(path)))))))

.PHONY: demo test tests tests-but-soma tests-soma thorough coverage docs readme check lint types env bench bench-compare bench-full peers replay autotune-times advice figures $(FIGURES) clean
.DEFAULT_GOAL := demo

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -e '.[dev,docs]'
	@touch $@

demo: $(STAMP)
	$(BIN)/cellfeed synthesize demo/plates --cells $(DEMO_CELLS)
	$(BIN)/autotune demo/plates --label plate --output demo

check: lint types

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

test: check tests

# By a process more than there are cores, since tests often wait, but four at most; each has a
# thread of linear algebra.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist=worksteal \
	--numprocesses=$$($(BIN)/python -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')

# TileDB in a process of its own: beside all else in one, tiledbsoma has crashed now and then.
SOMA = tests/loader/sources/test_conformance_soma.py tests/loader/sources/test_soma.py \
	tests/loader/sources/test_soma_tiles.py

tests: tests-but-soma tests-soma

tests-but-soma: $(STAMP)
	$(PYTEST) $(SOMA:%=--ignore=%)

tests-soma: $(STAMP)
	$(PYTEST) --numprocesses=1 $(SOMA)

# With ten times as many examples of what hypothesis draws.
thorough: $(STAMP)
	$(PYTEST) --hypothesis-profile=thorough

# Which branches of loader and tuner the tests take: make coverage [OF=tests/loader/sampling].
# What they run in other Pythons is not counted.
coverage: $(STAMP)
	$(PYTEST) --cov --cov-report=term --cov-report=html $(OF)

# The pages, strictly: a warning is an error. The tutorial is run.
docs: $(STAMP)
	rm -rf docs/_build docs/reference/api
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs=auto docs docs/_build/html
	@echo "docs/_build/html/index.html"

# The figures and pictures of the README, from the runs that docs/benchmarks keeps.
readme: $(STAMP)
	$(BIN)/python docs/speed.py
	$(BIN)/python docs/recommended.py

# The quick profile, once; fails where a benchmark does, or where none measured anything.
bench: $(STAMP)
	$(BIN)/python bench/suite/cli.py check

# The working tree beside a commit: make bench-compare BASE=main [BENCH=REGEX]. Fails where a
# counter is worse.
bench-compare: $(STAMP)
	@$(BIN)/python bench/suite/cli.py compare '$(or $(BASE),$(error BASE=COMMIT is missing))' \
		--bench='$(BENCH)'

# The full profile of the last commit, in an environment that asv makes; adds to the history.
bench-full: $(STAMP)
	CELLFEED_BENCH_PROFILE=full $(BIN)/python bench/suite/cli.py record

# The same work done by other loaders, each in an environment of its own; takes hours.
peers: $(STAMP)
	$(BIN)/cellfeed synthesize demo/peers/plates --cells $(PEERS_CELLS)
	$(BIN)/python bench/peers/compare.py --collection demo/peers/plates --output demo/peers \
		$(PEERS_OPTIONS)

# The search on all recorded grids; the table goes into docs/benchmarks/autotune.md.
replay: $(STAMP)
	$(BIN)/python -m bench.backtest table

# How long autotune takes, beside the whole grid; half an hour. The table goes there too.
autotune-times: $(STAMP)
	$(BIN)/python -m bench.backtest times demo/times

# What autotune says of other files, beside those files; half an hour.
advice: $(STAMP)
	$(BIN)/python bench/advice/check.py demo/advice

# Executed in place; the pictures go to demo/figures. CELLFEED_NOTEBOOK_SIZE is small, medium (the
# default) or large.
$(FIGURES): $(STAMP)
	$(BIN)/python notebooks/execute.py $(filter notebooks/$@_% notebooks/$@.ipynb,$(NOTEBOOKS))

figures: $(FIGURES)

clean:
	rm -rf $(VENV) .asv .peers demo
