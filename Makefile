# Every target prepares .venv by itself: a fresh machine needs make, Python 3.11 or newer, and a package index.
# Without an NVIDIA GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares gigabytes of CUDA libraries.

# The first interpreter that is new enough; `make PYTHON=/path/to/python3.12 test` chooses another.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed
# pyright's wrapper comes from the index as everything else; it shall not ask for newer versions of itself.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: venv test test-gpu lint demo clean

venv: $(STAMP)

# Reinstalled only when what it was made from changes. The stamp is written last: a broken install is tried again.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

# One torch thread per test process: the processes share the cores.
test: venv
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadscope -q $(ARGS)

test-gpu: venv
	$(BIN)/python -m pytest -m gpu -q $(ARGS)

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# Passive waits: on cores that others use too, threads that spin for each other are many times slower.
demo: venv
	OMP_WAIT_POLICY=passive $(BIN)/python scripts/demo.py $(ARGS)

clean:
	rm -rf .venv .pytest_cache .ruff_cache build
