# They need Python 3.11 and make. `make demo` and `make test` are the two commands of the README.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORST_DAYS := $(addprefix tests/distributed/test_,exit_matrix.py lost_at_operations.py \
	random_days.py) tests/e2e/test_exactness.py

.PHONY: setup demo test worst-days check bench clean

setup: $(STAMP)

# An environment that works is added to, not made anew. One whose making was interrupted has a
# python but no pip, and `venv` mends it in place. The stamp is written last: an install that
# failed or was interrupted is tried again.
$(STAMP): pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[language,optim,remote,trackers,report,dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/python examples/kill_and_resume.py

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

worst-days: setup
	KEEPSTEP_WORST_DAYS=all $(BIN)/python -m pytest $(WORST_DAYS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests/unit

bench: setup
	$(BIN)/python benchmarks/training.py

clean:
	rm -rf $(VENV) build dist
