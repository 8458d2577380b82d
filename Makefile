# Two commands do all the set-up: `make demo` and `make test`. Paths are relative, so a folder with a space in it is fine.
PYTHON ?= python3
PY = .venv/bin/python
WORKERS ?= 2

.PHONY: help demo test lint format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    what it does, in the terminal"
	@echo "make test    the whole test suite"
	@echo "make lint    ruff, format check, mypy"
	@echo "make bench   the tiled kernel against the plain NumPy formula"

.venv/made:
	$(PYTHON) -m venv .venv
	touch .venv/made

.venv/demo: .venv/made pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check --editable .
	touch .venv/demo

.venv/test: .venv/made pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch .venv/demo .venv/test

demo: .venv/demo
	@$(PY) -m clearhead explain

test: .venv/test
	$(PY) -m pytest --quiet --numprocesses $(WORKERS)

lint: .venv/test
	$(PY) -m ruff check src tests bench
	$(PY) -m ruff format --check src tests bench
	$(PY) -m mypy

format: .venv/test
	$(PY) -m ruff check --fix src tests bench
	$(PY) -m ruff format src tests bench

bench: .venv/test
	$(PY) bench/tiled.py

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
