# `make demo` trains on the built-in digits, `make test` is what every commit must pass.
PYTHON ?= python3
BIN := .venv/bin
# Two processes with one thread each: more threads would wait for a core. PyTorch asks the DNS for names of addresses.
# In large pages, memory is copied sooner to the many processes that are forked.
PYTEST := OMP_NUM_THREADS=1 RES_OPTIONS=timeout:1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/pytest -n 2 --dist loadgroup

# Where it is set, each of the many processes of a run would compile PyTorch's Python again, for ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all fast-tests all-tests quick chaos scoreboard pictures check style types docs wheel lock format clean

setup: .venv/ready

demo: setup
	$(BIN)/python jobs/imagenet.py

test: setup
	@$(BIN)/python tests/support/cpu_seconds.py $(MAKE) --no-print-directory fast-tests

test-all: setup
	@$(BIN)/python tests/support/cpu_seconds.py $(MAKE) --no-print-directory all-tests

# The type checker takes the time in which the tests leave a core idle.
fast-tests: style
	@$(MAKE) --no-print-directory -j 2 types quick

all-tests: check
	$(PYTEST)

quick: setup
	$(PYTEST) -m "not slow and not gpu" --hypothesis-profile quick

# Faults in a run on several nodes of this machine; as root, also cut links and a full disk.
chaos: setup
	$(BIN)/python -m tests.support.chaos

# Loaders of other projects on the images in DATA; OPTIONS="--train --s3 s3://bucket/prefix ..." for more.
scoreboard: setup
	PYTHONPATH=.:$(PYTHONPATH) $(BIN)/python -m tests.support.peers \
		--data $(or $(DATA),$(error give DATA=DIR, a folder of class folders of JPEGs)) $(OPTIONS)

# Of docs/, from runs of the demo and in Debian's chromium; with DATA=DIR of the scoreboard, too.
pictures: setup
	$(BIN)/python -m tests.support.doc_pictures
	$(if $(DATA),$(MAKE) scoreboard OPTIONS="--local-s3 --picture docs/scoreboard.svg")

check: style types

style: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

types: setup
	nice -n 19 $(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Into build/site; a warning is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The wheel and the source distribution, into build/dist.
wheel: setup
	$(BIN)/uv build --no-build-isolation --python $(BIN)/python --clear --out-dir build/dist
	$(BIN)/twine check --strict build/dist/*

# Every package at the newest version that pyproject.toml allows.
lock: $(BIN)/uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header \
		--extra dev --group build --group real-data pyproject.toml --output-file requirements.lock

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find raydali jobs tests docs -name __pycache__ -prune -exec rm -r {} +

.venv/ready: pyproject.toml requirements.lock | $(BIN)/uv
	$(BIN)/uv pip sync --python $(BIN)/python --require-hashes requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

# pip installs uv alone, by its hashes in the lock; uv installs the rest.
$(BIN)/uv:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
		sys.exit(sys.version_info < (3, 11) and "raydali needs Python 3.11 or newer, not " + v + ": try make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	awk '/^[^ ]/ { is_uv = /^uv==/ } is_uv' requirements.lock | $(BIN)/pip install --quiet --require-hashes -r /dev/stdin
