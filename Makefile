# Every target sets up .venv itself: a fresh machine needs make, Python 3.11 or newer, and a package index.
# Without an NVIDIA GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves gigabytes of CUDA libraries.

# The first interpreter that is new enough. Choose another with `make PYTHON=/path/to/python3.12 test`.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed
# Keep pyright's wrapper from looking for newer versions of itself.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help venv test test-gpu lint demo clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

venv: $(STAMP) ## set up .venv with megatrain and everything that development needs

# Reinstalled only when its inputs change. The stamp is written last, so a broken install is repeated.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

# One torch thread per test process, because the processes share the cores.
test: venv ## run the fast CPU tests on all cores; ARGS="tests/data -k packing" runs some of them
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadscope -q $(ARGS)

test-gpu: venv ## run the tests that need one CUDA device
	$(BIN)/python -m pytest -m gpu -q $(ARGS)

lint: venv ## ruff format, ruff check, pyright
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# Passive waits: on shared cores, threads that spin while waiting for each other are many times slower.
demo: venv ## train a small model from scratch, end to end
	OMP_WAIT_POLICY=passive $(BIN)/python scripts/demo.py $(ARGS)

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .ruff_cache build
