# Everything a newcomer needs, from nothing but python3 and make. The first call makes .venv; later ones only check it.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test check docs bench release clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.sklearn ## LeNet on two processes of this machine: accuracy, measured speed-up, a picture
	$(BIN)/manyhands demo

test: $(VENV)/.dev ## all tests that need neither a GPU nor minutes; PYTEST_ARGS="-k shared" narrows
	$(BIN)/python -m pytest $(if $(PYTEST_ARGS),,-n 2 --dist loadfile) $(PYTEST_ARGS)

check: $(VENV)/.dev ## style (ruff), types (mypy), who imports whom (import-linter)
	@failed=; for tool in "ruff check ." "ruff format --check ." mypy "lint-imports --no-logo"; do \
		echo "== $$tool"; $(BIN)/$$tool || failed="$$failed [$$tool]"; done; \
		test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

docs: $(VENV)/.docs ## write the generated pages anew and build the site into site/
	$(BIN)/python docs/make_strategies.py
	$(BIN)/python docs/make_cli.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the site is in site/: open site/index.html"

bench: $(VENV)/.dev ## every benchmark; each prints a ratio against a peer measured in the same run
	$(BIN)/manyhands bench all

release: $(VENV)/.release ## wheel and sdist in dist/, checked; the demo from the wheel in an empty environment
	.ci/release $(BIN)/python

clean: ## remove the environment and caches; keep runs/
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache dist build site
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# .venv/.dev means: the package with its extra `dev` is installed as pyproject.toml and constraints.txt now say.
# The constraints pin torch, so that no package of ours brings a second, larger build of it.
$(VENV)/.%: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "manyhands needs Python 3.11, 3.12 or 3.13, found: $$(python3 --version 2>&1);" \
		"install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment with pip: on Debian or Ubuntu 'apt install python3-venv'," \
		"elsewhere give it pip ($(PYTHON) -m ensurepip); then run make again" >&2; exit 1; }
	@echo "installing manyhands[$*] into $(VENV): a minute, or several where torch has to be downloaded"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@
