# The only way things are run. Every verb works as the first command on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := $(BIN)/python -m pytest -n 2 --doctest-modules

.PHONY: demo test test-slow test-hosts lint types imports unit coverage bench bench-sketch bench-alarms \
  results tables picture tutorials docs links dist clean

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
	$(PYTEST) -m "not slow and not hosts" src tests
	cd benchmarks && ../$(PYTEST) --collect-only -qq tests >/dev/null

# killed processes, process groups, browsers, compilers; and the experiments' own tests
test-slow: $(STAMP)
	$(PYTEST) -m slow tests
	cd benchmarks && ../$(PYTEST) scodbench tests

# adapters in the libraries they are for, and models of Hugging Face; the longest needs SCODKIT_DATA
test-hosts: .venv/.hosts
	$(PYTEST) -m hosts tests

.venv/.hosts: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[hosts]"
	touch $@

# all tests of the library, and which lines they run
coverage: $(STAMP)
	$(PYTEST) --cov --cov-report=term:skip-covered -m "not hosts" src tests

# speed, on the CPU (a quarter of an hour); on a GPU: scodbench speed --device cuda
bench: $(STAMP)
	$(BIN)/scodbench speed

bench-sketch: $(STAMP)
	$(BIN)/scodbench sketch

bench-alarms: $(STAMP)
	$(BIN)/scodbench alarms

# the paper's small domains and the real frames, all methods, three networks each: an hour on two
# cores, and half an hour of sweeps; on a GPU before that:
# scodbench run --domain taxinet --domain cifar10 --seeds 3 --device cuda
# scodbench sweep --domain taxinet --domain cifar10 --device cuda
SMALL := --domain wine --domain rotated_mnist --domain binary_mnist --domain mnist --domain taxinet_tiny
results: $(STAMP)
	$(BIN)/scodbench run $(SMALL) --seeds 3
	$(BIN)/scodbench sweep $(SMALL)
	$(BIN)/scodbench table --output results
	$(BIN)/scodbench figures
	$(MAKE) tables

# measured tables into the pages that show them, and the table of public names
tables: $(STAMP)
	$(BIN)/python docs/_site/fill_tables.py
	$(BIN)/python docs/_site/reference.py

picture: $(STAMP)
	$(BIN)/python examples/hero.py docs/images/hero.png
	$(BIN)/python examples/explain_digits.py docs/images/explain.png
	$(BIN)/python examples/detector.py docs/images/detector.png
	$(BIN)/python examples/ideas docs/images

# runs examples/tutorials and writes docs/tutorials: two minutes
tutorials: $(STAMP)
	$(BIN)/python examples/render_tutorials.py

# the site, into site/; a warning is an error
docs: $(STAMP)
	rm -rf site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -E -c docs/_site -d site/.doctrees docs site
	rm -rf site/.doctrees

# dead links of the pages in Markdown are errors; those to the web are printed, not followed
links: $(STAMP)
	$(BIN)/python docs/_site/links.py

# wheel and sdist, checked, and tried in an empty environment for each extra; publishes nothing
dist: $(STAMP)
	$(BIN)/python tests/try_dist.py

# pip alone: the pinned torch is a CPU build that other installers do not find
$(STAMP): pyproject.toml benchmarks/pyproject.toml constraints.txt peers.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,peers,docs,dev]" -e ./benchmarks
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r peers.txt
	$(BIN)/python -m compileall -q src benchmarks/scodbench
	touch $@

clean:
	find docs -name '*.rst' -delete
	rm -rf .venv dist site .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
