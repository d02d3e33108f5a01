# Turns a fresh clone into a running app or a verdict. `make` alone lists what there is.

VENV := .venv
PYTHON := $(VENV)/bin/python
# Stamps: a file in .venv says that a step is done, and is older than the file that asks for more.
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
PIP := $(PYTHON) -m pip install --disable-pip-version-check --progress-bar off
# The interpreters to try for .venv; `make run BASE_PYTHON=/some/python3` tries that one alone.
BASE_PYTHON ?= python3 python3.13 python3.12 python3.11 python3.14 python
PORT ?= 8501
# `make test ARGS="tests/viz -x"` passes more to pytest.
ARGS ?=
# Compiled tests are kept, whatever the environment says: to compile them takes seconds.
unexport PYTHONDONTWRITEBYTECODE
# Side by side, one more than there are cores, since a test often waits for processes of its own; browser tests of a file
# stay together, since they share what takes long to start.
PYTEST = $(PYTHON) -m pytest -n $$($(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))') --dist loadgroup

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test table check format browser clean distclean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: $(INSTALLED) ## start the app on http://127.0.0.1:8501 (another port: make run PORT=8600)
	@echo "Lockstep: http://127.0.0.1:$(PORT) (Ctrl-C ends it)"
	@$(PYTHON) -m streamlit run app.py --server.port $(PORT)

test: check browser ## check, then test everything but slow variants (some: make test ARGS=tests/viz)
	$(PYTEST) -m "not slow" $(ARGS)

# Both together are all tests, and what they record of the modes is what the README's table claims.
test-slow: $(INSTALLED_DEV) ## the variants that are left out there, and then the README's table of the modes
	$(PYTEST) -m slow
	$(PYTHON) -m tests.table --check

# Of the other files every process of pytest would collect five thousand tests, to leave them out.
table: $(INSTALLED_DEV) ## run what proves the modes, and write the README's table of them
	$(PYTEST) -m "real or proof" $$(grep -lE 'mark\.(real|proof)' tests/engine/test_*.py)
	$(PYTHON) -m tests.table

check: $(INSTALLED_DEV) ## lint, and see that everything is formatted
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: $(INSTALLED_DEV) ## fix what check can fix by itself
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# Where it cannot be installed, browser tests skip and say why; in CI that would hide them, so fail.
browser: ## install Chromium for the browser tests, where there is apt, root and none yet
	@if command -v chromium chromium-browser google-chrome >/dev/null 2>&1; then :; \
	elif command -v apt-get >/dev/null 2>&1 && [ "$$(id -u)" = 0 ]; then \
		echo "Installing Chromium and Chinese fonts for the browser tests"; \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get update -qq && apt-get install -y -qq chromium fonts-noto-cjk >/dev/null \
		|| { echo "Chromium could not be installed: browser tests will be skipped"; [ -z "$$CI" ]; }; \
	else echo "No Chromium, and no apt with root to install it: browser tests will be skipped"; fi

clean: ## remove caches and test results (runs and .venv stay)
	rm -rf .pytest_cache .ruff_cache test-results
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf $(VENV)

# A .venv that already works is kept, whoever made it.
$(CREATED):
	@ok='import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; \
	if $(PYTHON) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		touch $@; exit 0; \
	fi; \
	for python in $(BASE_PYTHON); do \
		if $$python -c "$$ok" 2>/dev/null; then \
			echo "Creating $(VENV) with $$($$python --version) ($$python)"; \
			$$python -m venv --clear $(VENV) && touch $@; exit $$?; \
		fi; \
	done; \
	echo "Lockstep needs Python 3.11 to 3.14 with the modules venv and ensurepip." >&2; \
	echo "Tried, without finding one: $(BASE_PYTHON)" >&2; \
	echo "Install one (on Debian and Ubuntu: apt-get install python3 python3-venv), or name one:" >&2; \
	echo "    make BASE_PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; \
	exit 1

$(INSTALLED): requirements.txt $(CREATED)
	@echo "Installing what Lockstep needs; PyTorch is large, so the first time takes minutes"
	$(PIP) -q -r requirements.txt
	@touch $@

$(INSTALLED_DEV): requirements-dev.txt $(INSTALLED)
	$(PIP) -q -r requirements-dev.txt
	@touch $@
