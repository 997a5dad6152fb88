# Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install demo quick test lint bench picture clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	rm -rf runs/digits
	$(BIN)/stretto tune examples/digits.toml examples/digits.py:train --deadline 90s
	$(BIN)/stretto explain digits
	$(BIN)/stretto simulate --replay digits --policy asha,sha
	$(BIN)/stretto report digits --report runs/digits.html
	$(BIN)/stretto simulate --policy pollux,optimus,tiresias --report runs/demo.html

quick: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup -m "not processes and not slow"

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	$(BIN)/python benchmarks/run.py

picture: $(READY)
	rm -rf runs/picture
	$(BIN)/stretto tune examples/digits.toml examples/digits.py:train --name picture --deadline 5m --slots 4
	$(BIN)/python docs/picture.py runs/picture

clean:
	rm -rf $(VENV) runs
