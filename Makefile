# Everything runs in .venv, which is created on first use. Once its packages are installed, no
# network is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Most installed modules are never imported; the others are compiled on import.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	-c constraints.txt
DEMO_CELLS ?= 28000
PEERS_CELLS ?= 200000

# One target per notebook, named after the first word of its file name: figure4, table2 and so on.
# Otherwise each process compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

NOTEBOOKS := $(wildcard notebooks/*.ipynb)
FIGURES := $(sort $(foreach path,$(NOTEBOOKS),$(firstword $(subst _, ,$(basename $(notdir $(path)))))))

.PHONY: demo test quick tests tests-but-soma tests-soma thorough coverage docs readme check format lint types env bench bench-compare bench-full peers compare-here replay autotune-times advice figures $(FIGURES) clean
.DEFAULT_GOAL := demo

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) 'pip>=25.1' # which knows dependency groups
	@$(PIP_INSTALL) -e '.[tune]' --group dev --group docs
	@echo "Compiling for this processor, about a minute ..."
	@$(BIN)/cellfeed warm-up
	@touch $@

demo: $(STAMP)
	$(BIN)/cellfeed synthesize demo/plates --cells $(DEMO_CELLS)
	$(BIN)/autotune demo/plates --label plate --output demo

# All parts run, also after one has failed.
test: $(STAMP)
	+@$(MAKE) --keep-going --no-print-directory check tests

check: format lint types

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# One process more than there are cores, since tests often wait, but at most four; each uses one
# thread for linear algebra.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist=worksteal \
	--numprocesses=$$($(BIN)/python -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')

# TileDB runs in its own process: tiledbsoma has crashed now and then beside other tests.
SOMA = tests/loader/storages/test_conformance_soma.py tests/loader/storages/test_soma.py \
	tests/loader/storages/test_soma_tiles.py

tests: tests-but-soma tests-soma

tests-but-soma: $(STAMP)
	$(PYTEST) $(SOMA:%=--ignore=%) $(PYTEST_OPTIONS)

tests-soma: $(STAMP)
	$(PYTEST) --numprocesses=1 $(SOMA) $(PYTEST_OPTIONS)

# To run before each commit: lint; what may import what; public names; plans, epochs and states; h5ad
# and zarr against NumPy; the theory and what autotune says.
QUICK = tests/docs/test_rooms.py tests/loader/test_imports.py tests/loader/test_public_api.py \
	tests/loader/test_errors.py tests/loader/sampling tests/loader/rows tests/loader/fetch \
	tests/loader/dataset/test_golden_states.py tests/loader/dataset/test_epoch_machine.py \
	tests/loader/storages/test_conformance.py tests/loader/storages/test_conformance_zarr.py \
	tests/tuner/test_theory.py tests/tuner/test_recommend.py tests/tuner/test_terminal.py

quick: $(STAMP)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(PYTEST) --quiet --hypothesis-profile=quick -k 'not process' $(QUICK)

# With ten times as many hypothesis examples, which differ from run to run.
thorough: $(STAMP)
	+@$(MAKE) --keep-going --no-print-directory tests PYTEST_OPTIONS=--hypothesis-profile=thorough

# Branch coverage of loader and tuner: make coverage [OF=tests/loader/sampling]. Code that tests run
# in other Python processes is not counted.
coverage: $(STAMP)
	$(PYTEST) --cov --cov-report=term --cov-report=html $(OF)

# Build the pages, with warnings as errors. This runs the tutorial.
docs: $(STAMP)
	rm -rf docs/_build docs/reference/api
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs=auto docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Regenerate the README's tables and pictures from the runs in docs/benchmarks.
readme: $(STAMP)
	$(BIN)/python docs/speed.py
	$(BIN)/python docs/recommended.py

# The quick profile, once; fails if a benchmark fails, or if nothing was measured.
bench: $(STAMP)
	$(BIN)/python bench/suite/cli.py check

# The working tree against a commit: make bench-compare BASE=main [BENCH=REGEX]. Fails if a counter
# is worse.
bench-compare: $(STAMP)
	@$(BIN)/python bench/suite/cli.py compare '$(or $(BASE),$(error BASE=COMMIT is missing))' \
		--bench='$(BENCH)'

# The full profile of the last commit, in an environment that asv creates; adds to the history.
bench-full: $(STAMP)
	CELLFEED_BENCH_PROFILE=full $(BIN)/python bench/suite/cli.py record

# The comparison with other loaders, each in its own environment; takes hours.
peers: $(STAMP)
	$(BIN)/cellfeed synthesize demo/peers/plates --cells $(PEERS_CELLS)
	$(BIN)/python bench/peers/compare.py --collection demo/peers/plates --output demo/peers \
		$(PEERS_OPTIONS)

# The README's pairs on this machine, in about ten minutes: one file with everything, and its page.
compare-here: $(STAMP)
	$(BIN)/python -m bench.here run $(COMPARE_OPTIONS)

# Replay the search on all recorded grids; the table goes into docs/benchmarks/autotune.md.
replay: $(STAMP)
	$(BIN)/python -m bench.backtest table

# Time autotune and the whole grid; takes half an hour. The table goes into the same page.
autotune-times: $(STAMP)
	$(BIN)/python -m bench.backtest times demo/times

# Compare autotune's advice with the result of following it; takes half an hour.
advice: $(STAMP)
	$(BIN)/python bench/advice/check.py demo/advice

# Execute notebooks in place; the pictures go to demo/figures. CELLFEED_NOTEBOOK_SIZE is small,
# medium (the default) or large.
$(FIGURES): $(STAMP)
	$(BIN)/python notebooks/execute.py $(filter notebooks/$@_% notebooks/$@.ipynb,$(NOTEBOOKS))

figures: $(FIGURES)

clean:
	rm -rf $(VENV) .asv .peers demo
