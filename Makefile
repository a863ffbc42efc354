# Everything runs in .venv, which is created on first use. Once its packages are installed, no
# network is needed. Another Python has an environment of its own, with the newest versions of all
# packages: `make test-all PYTHON=python3.13` runs in .venv-python3.13. There, tiledbsoma keeps pandas
# at 2; `make test` and `.ci/versions newest` install pandas 3.
PYTHON ?= python3
ifeq ($(PYTHON),python3)
VENV := .venv
CONSTRAINTS := -c constraints.txt
else
VENV := .venv-$(notdir $(PYTHON))
CONSTRAINTS :=
endif
BIN := $(VENV)/bin
# What is installed is in layers: what `make demo` needs; tests; what else the complete run needs
# (databases, object stores, frameworks); pages. Tests that need a missing package are skipped.
DEMO := $(VENV)/.demo
TEST := $(VENV)/.test
COMPLETE := $(VENV)/.complete
DOCS := $(VENV)/.docs
# Most installed modules are never imported; the others are compiled on import.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(CONSTRAINTS)
DEMO_CELLS ?= 28000

# Otherwise each process compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

# One target per notebook, named after the first word of its file name: figure4, table2 and so on.
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
FIGURES := $(sort $(foreach path,$(NOTEBOOKS),$(firstword $(subst _, ,$(basename $(notdir $(path)))))))

.PHONY: demo test test-core test-all tests tests-but-soma tests-soma thorough coverage docs readme check format lint types types-all env bench bench-compare bench-full peers compare-here replay autotune-times advice figures $(FIGURES) clean
.DEFAULT_GOAL := demo

# All layers.
env: $(COMPLETE) $(DOCS)

$(DEMO): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -e '.[tune]'
	@touch $@

$(TEST): $(DEMO)
	@echo "Installing what tests need ..."
	@$(PIP_INSTALL) 'pip>=25.1' # which knows dependency groups
	@$(PIP_INSTALL) --group test
	@echo "Compiling for this processor, about a minute ..."
	@$(BIN)/cellfeed warm-up
	@touch $@

$(COMPLETE): $(TEST)
	@echo "Installing what all tests need ..."
	@$(PIP_INSTALL) --group complete
	@touch $@

$(DOCS): $(TEST)
	@echo "Installing what pages need ..."
	@$(PIP_INSTALL) --group docs
	@touch $@

demo: $(DEMO)
	$(BIN)/cellfeed synthesize demo/plates --cells $(DEMO_CELLS)
	$(BIN)/autotune demo/plates --label cell_line --label plate --dense --output demo

# Lint, types of what users import, and the tests that find nearly all faults. All parts run, also
# after one has failed.
test: $(TEST)
	+@$(MAKE) --keep-going --no-print-directory check light-tests

# Everything.
test-all: $(COMPLETE)
	+@$(MAKE) --keep-going --no-print-directory format lint types-all tests

check: format lint types

format: $(TEST)
	$(BIN)/ruff format --check .

lint: $(TEST)
	$(BIN)/ruff check .

types: $(TEST)
	$(BIN)/mypy loader tuner

types-all: $(COMPLETE)
	$(BIN)/mypy

# One process more than there are cores, since tests often wait, but at most four; each uses one
# thread for linear algebra.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist=worksteal \
	--numprocesses=$$($(BIN)/python -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')

# The light tests of what every minibatch passes through; they need no extension.
CORE = bytes collection dataset decode fetch rows sampling sources testing transforms

test-core: $(TEST)
	$(PYTEST) --hypothesis-profile=quick -m 'not (slow or process or server or docs)' \
		$(CORE:%=tests/loader/%) $(PYTEST_OPTIONS)

# Lists those that take longest; the heaviest should be marked `slow`.
light-tests: $(TEST)
	$(PYTEST) --hypothesis-profile=quick -m 'smoke or not (slow or process or server or docs)' \
		--durations=20 --durations-min=2 $(PYTEST_OPTIONS)

# TileDB runs in its own process: tiledbsoma has crashed now and then beside other tests.
SOMA = $(wildcard tests/loader/storages/soma/test_*.py)

# Those with some marks, for example `make tests MARKS='process and not server'`; all without.
tests: tests-but-soma tests-soma

tests-but-soma: $(COMPLETE)
	$(PYTEST) $(SOMA:%=--ignore=%) $(if $(MARKS),-m '$(MARKS)') $(PYTEST_OPTIONS)

tests-soma: $(COMPLETE)
	$(PYTEST) --numprocesses=1 $(SOMA) $(if $(MARKS),-m '$(MARKS)') $(PYTEST_OPTIONS) $(if $(MARKS),|| [ $$? = 5 ])

# With ten times as many hypothesis examples, which differ from run to run.
thorough: $(COMPLETE)
	+@$(MAKE) --keep-going --no-print-directory tests PYTEST_OPTIONS=--hypothesis-profile=thorough

# Branch coverage of loader and tuner, in half an hour: make coverage [OF=tests/loader/sampling].
# A test that becomes another user is left out, since coverage cannot write as that one.
coverage: $(COMPLETE)
	$(PYTEST) -p tests.coverage_of_forks -k 'not files_of_others' \
		--cov --cov-context=test --cov-report=term --cov-report=html $(OF)

# Build the pages, with warnings as errors. This runs the tutorial.
docs: $(DOCS)
	rm -rf docs/_build docs/reference/api
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs=auto docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Regenerate the README's tables and pictures from the runs in docs/benchmarks.
readme: $(DEMO)
	$(BIN)/python docs/speed.py
	$(BIN)/python docs/recommended.py

# The quick profile, once; fails if a benchmark fails, or if nothing was measured.
bench: $(TEST)
	$(BIN)/python bench/suite/cli.py check

# The working tree against a commit: make bench-compare BASE=main [BENCH=REGEX]. Fails if a counter
# is worse.
bench-compare: $(TEST)
	@$(BIN)/python bench/suite/cli.py compare '$(or $(BASE),$(error BASE=COMMIT is missing))' \
		--bench='$(BENCH)'

# The full profile of the last commit, in an environment that asv creates; adds to the history.
bench-full: $(TEST)
	CELLFEED_BENCH_PROFILE=full $(BIN)/python bench/suite/cli.py record

# The comparison with other loaders, each in its own environment; takes hours.
peers: $(TEST)
	$(BIN)/python bench/peers/compare.py --out demo/peers $(PEERS_OPTIONS)

# The README's pairs on this machine, in about ten minutes.
compare-here: $(TEST)
	$(BIN)/python bench/peers/compare.py --profile short --out demo/here $(COMPARE_OPTIONS)

# Replay the search on all recorded grids; the table goes into docs/benchmarks/autotune.md.
replay: $(TEST)
	$(BIN)/python -m bench.backtest table

# Time autotune and the whole grid; takes half an hour. The table goes into the same page.
autotune-times: $(TEST)
	$(BIN)/python -m bench.backtest times demo/times

# Compare autotune's advice with the result of following it; takes half an hour.
advice: $(TEST)
	$(BIN)/python -m bench.compare advice --data demo/advice

# Execute notebooks in place; the pictures go to demo/figures. CELLFEED_NOTEBOOK_SIZE is small,
# medium (the default) or large.
$(FIGURES): $(TEST)
	$(BIN)/python notebooks/execute.py $(filter notebooks/$@_% notebooks/$@.ipynb,$(NOTEBOOKS))

figures: $(FIGURES)

clean:
	rm -rf $(VENV) .asv .peers demo
