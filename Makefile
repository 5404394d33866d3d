# Each target sets itself up in .venv; a second run of `make setup` does nothing.
PYTHON ?= python3
TORCH ?= torch
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadscope

.PHONY: setup demo bard test test-all check wheel-test clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch .venv/ready

demo: setup
	$(BIN)/mainstem demo

bard: setup
	$(BIN)/mainstem train runs/bard --preset bard
	$(BIN)/python tests/runs/make_bundled_model.py runs/bard

test: setup
	$(PYTEST)

test-all: setup
	$(PYTEST) -m 'slow or not slow' --hypothesis-profile search

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

wheel-test: setup
	TORCH='$(TORCH)' .ci/wheel

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info
