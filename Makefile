# The two commands of the README: `make demo` and `make test`. They need Python 3.11 and make.
PYTHON ?= python3.11
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: setup demo test check bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[language,dev]'
	touch $(STAMP)

demo: setup
	$(VENV)/bin/python examples/kill_and_resume.py

test: setup
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist worksteal

check: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m pytest --numprocesses 2 tests/unit

bench: setup
	$(VENV)/bin/python benchmarks/training.py

clean:
	rm -rf $(VENV) build dist
