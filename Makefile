# `make demo` and `make test` do everything on a fresh machine; each target sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow lint format bench-recognize bench-tapa clean

demo: $(STAMP)
	$(BIN)/cocodiff demo

test: lint
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-recognize: $(STAMP)
	$(BIN)/python -m benchmarks.recognize_ulysses

bench-tapa: $(STAMP)
	$(BIN)/python -m benchmarks.split_tapa_phases

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check \
		--editable '.[dev,diffusers,plots]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
