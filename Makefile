# `make study` repeats the study, `make test` checks everything. Both install into .venv what they need, once.

PYTHON ?= python3
EXPERIMENT ?= launch/experiments/articles.toml

VENV := .venv
INSTALLED := $(VENV)/.installed
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
# Not only the commands of the environment: torch looks for ninja on the path when an engine compiles an operator.
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help study test types claims format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

study: $(INSTALLED) ## run the experiment, then write tables and report under results/
	$(IN_VENV) twinshard run $(EXPERIMENT)
	$(IN_VENV) twinshard report

test: $(INSTALLED) ## check format, rules, types, direction of imports and every claim
	$(IN_VENV) ruff format --check .
	$(IN_VENV) ruff check .
	$(IN_VENV) $(MAKE) --jobs 2 --no-print-directory types claims

# Side by side, because types take one core for minutes, and most claims another one.
types:
	mypy --strict
	lint-imports --no-logo

claims:
	pytest

format: $(INSTALLED) ## rewrite the sources in the one format
	$(IN_VENV) ruff format .
	$(IN_VENV) ruff check --fix .

clean: ## remove the environment and caches; records, tables and report stay
	rm -rf $(VENV) build ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two steps, because the engines' own setup imports torch: it comes first, and they are built beside it instead of
# in an isolated environment, which would fetch a second torch.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'twinshard needs Python 3.11 or newer: make PYTHON=python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch numpy setuptools wheel ninja packaging py-cpuinfo
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[engines,study,dev]'
	touch $@
