# `make style` before a commit, `make test` before a push. Another interpreter: `make test PYTHON=.venv/bin/python`.

PYTHON ?= python
PYTHON3_10 ?= python3.10
LOWEST ?= build/lowest

.PHONY: style test slow lowest fix-copies docs site

# Formats the code, then checks it: style, types, spelling, copies, directions of imports.
style:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(PYTHON) -m mypy
	$(PYTHON) -m codespell_lib
	$(PYTHON) tests/check_copies.py
	$(PYTHON) tests/check_structure.py

test:
	$(PYTHON) -m pytest -n auto

# Real compilation, killed and resumed runs, browsers.
slow:
	$(PYTHON) -m pytest -m slow

# The lower bounds of pyproject.toml together, in a virtual environment of their own.
lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON3_10) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --constraint tests/lowest_versions.txt --editable ".[test]"
	$(LOWEST)/bin/python -m pytest -n auto

# Rewrites what stands below `# Copied from` headers.
fix-copies:
	$(PYTHON) tests/check_copies.py --fix
	$(PYTHON) -m ruff format hf_decayed

# Compares what README, docs and cards show with the JSON files it is made from, and runs their examples.
docs:
	$(PYTHON) -m pytest tests/test_readme.py tests/test_cards.py tests/test_checkpoints.py tests/test_generation.py

# The documentation as a site in build/site (extra `docs`); a broken link is an error.
site:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build
