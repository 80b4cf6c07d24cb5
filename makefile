# Change these on the command line or in the environment, e.g. `make test PYTHON=python3.12`.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=
# where `make test-oldest` installs the oldest version of torch
OLDEST_VENV ?= .venv-oldest
# e.g. BENCHMARK_ARGS="--problems mlp --quantities KFAC", see python -m benchmark --help
BENCHMARK_ARGS ?=
# e.g. FAST_PATHS_ARGS="--problems mlp --quantities KFAC", see python -m benchmark.fast_paths --help
FAST_PATHS_ARGS ?=

BIN := $(VENV)/bin
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# The stamps stand for "installed from this setup.cfg".
READY := $(VENV)/.ready
READY_DEMO := $(VENV)/.ready-demo
READY_DEV := $(VENV)/.ready-dev
READY_DOCS := $(VENV)/.ready-docs
READY_BENCHMARK := $(VENV)/.ready-benchmark

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-oldest docs install-dev lint format clean benchmark benchmark-quick benchmark-guard

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY_DEMO) ## Train a small CNN on digits; print the quantities, write pictures to demo/
	$(BIN)/python docs_src/examples/demo_digits.py --out demo

test: $(READY) ## Run the tests but for slow ones, and the examples in README.md and docstrings
	$(PYTEST) -m "not slow" --doctest-glob=README.md --doctest-modules $(PYTEST_ARGS) \
		test README.md backpack

test-slow: $(READY) ## Run the other tests: large models, several processes, programs of every kind
	$(PYTEST) -m slow $(PYTEST_ARGS) test

test-oldest: $(OLDEST_VENV)/.ready ## Run a part of the tests with the oldest version of torch that works
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -q $(PYTEST_ARGS) test/test_results.py \
		test/test_threads.py test/test_engine.py
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -q $(PYTEST_ARGS) \
		test/test_quantities.py -k lstm

docs: $(READY_DOCS) ## Build the site in docs_src/_build/html; run all examples and doctests
	for builder in html doctest; do \
		OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -b $$builder \
			-d docs_src/_build/doctrees docs_src/rtd docs_src/_build/$$builder || exit 1; \
	done

install-dev: $(READY_DEV) ## Install for development: tests, examples, docs, benchmarks

benchmark: $(READY_BENCHMARK) ## Measure everything against the peers (hours), write benchmark/results/
	$(BIN)/python -m benchmark $(BENCHMARK_ARGS)
	$(BIN)/python -m benchmark.families
	$(BIN)/python -m benchmark.fast_paths $(FAST_PATHS_ARGS)

benchmark-quick: $(READY_BENCHMARK) ## The same for a selection, in less than five minutes
	$(BIN)/python -m benchmark --quick $(BENCHMARK_ARGS)

benchmark-guard: $(READY_BENCHMARK) ## Check that no quantity has become slower, relative to a plain pass
	$(BIN)/python -m pytest benchmark/test_regression.py $(PYTEST_ARGS)

lint: $(READY) ## Check style, format, types and the directions of imports; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy backpack
	$(BIN)/lint-imports --no-cache

format: $(READY) ## Format the code and fix what can be fixed automatically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove caches, build artefacts and demo/; keep the virtual environment
	rm -rf demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf docs_src/_build docs_src/rtd/gallery docs_src/rtd/generated docs_src/rtd/sg_execution_times.rst
	find backpack test docs_src benchmark -type d -name __pycache__ -prune \
		-exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(READY_DEMO): setup.cfg | $(BIN)/python
	$(BIN)/python -m pip install -e ".[examples]"
	@touch $@

$(READY): setup.cfg | $(BIN)/python
	$(BIN)/python -m pip install -e ".[test,examples]"
	@touch $@ $(READY_DEMO)

$(OLDEST_VENV)/.ready: setup.cfg
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install "torch==2.6.*" -e ".[test-oldest]"
	@touch $@

$(READY_DEV): setup.cfg | $(BIN)/python
	$(BIN)/python -m pip install -e ".[test,examples,docs,benchmark]"
	@touch $@ $(READY_DEMO) $(READY) $(READY_DOCS) $(READY_BENCHMARK)

$(READY_DOCS): setup.cfg | $(BIN)/python
	$(BIN)/python -m pip install -e ".[docs]"
	@touch $@

$(READY_BENCHMARK): setup.cfg | $(BIN)/python
	$(BIN)/python -m pip install -e ".[benchmark]"
	@touch $@
