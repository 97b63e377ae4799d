PYTHON ?= $(shell python3.11 -c "" 2>/dev/null && echo python3.11 || echo python3)
BIN := .venv/bin
STAMP := .venv/.installed
JOBS ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: venv demo test lint format clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: venv
	$(BIN)/python examples/digits_norms.py

# One torch thread per worker: the workers already fill the cores. A worker that is done takes tests from another.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Keeps .venv, which takes minutes to fill; remove it by hand to start over.
clean:
	rm -rf build dist out .pytest_cache .ruff_cache .hypothesis
	find src tests examples -type d -name __pycache__ -prune -exec rm -rf {} +
