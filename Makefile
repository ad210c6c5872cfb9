# The only way things are run. Every verb works as the first command on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint types imports unit coverage bench bench-sketch bench-alarms results picture docs clean

demo: $(STAMP)
	$(BIN)/scod demo

test: lint types imports unit

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/house_rules.py

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/python -m pytest -n 2 --doctest-modules src tests

# the same, and which lines it runs: a quarter longer
coverage: $(STAMP)
	$(BIN)/python -m pytest -n 2 --doctest-modules --cov --cov-report=term:skip-covered src tests

# speed, on the CPU (a quarter of an hour); on a GPU: python benchmarks/speed.py --device cuda
bench: $(STAMP)
	$(BIN)/python benchmarks/speed.py --device cpu

bench-sketch: $(STAMP)
	$(BIN)/python benchmarks/sketch_accuracy.py

bench-alarms: $(STAMP)
	$(BIN)/python benchmarks/alarms.py

# the paper's small domains and the real frames, all methods, three networks each: an hour on two
# cores, and half an hour of sweeps; on a GPU before that:
# scod bench run --domain taxinet --domain cifar10 --seeds 3 --device cuda
# scod bench sweep --domain taxinet --domain cifar10 --device cuda
SMALL := --domain wine --domain rotated_mnist --domain binary_mnist --domain mnist --domain taxinet_tiny
results: $(STAMP)
	$(BIN)/scod bench run $(SMALL) --seeds 3
	$(BIN)/scod bench sweep $(SMALL)
	$(BIN)/scod bench table --output results
	$(BIN)/scod bench figures

picture: $(STAMP)
	$(BIN)/python examples/digits_picture.py docs/digits.png

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# pip alone: the pinned torch is a CPU build that other installers do not find
$(STAMP): pyproject.toml constraints.txt peers.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,bench,peers,docs,dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r peers.txt
	touch $@

clean:
	rm -rf .venv site .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
