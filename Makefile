# Two commands matter to a newcomer: `make demo` and `make test`.
# Each sets everything up by itself, once, in .venv.

PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.ready

# How long `make soak` goes on, and which faults it draws.
MINUTES ?= 5
SEED ?= 1

# How many processes `make test` runs its tests in.
LANES ?= 3
SIDE_BY_SIDE = --numprocesses=$(LANES) --dist=loadfile --no-loadscope-reorder

.PHONY: setup demo demo-cluster test check test-all test-operate coverage lint types faults soak soak-serve soak-generate bench bench-detection bench-serving matrix docs release-check release-build release-smoke clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1" -c constraints.txt
	@# torch alone first, at the pinned version: where a CPU build is offered, it is taken
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[demo]" --group test --group dev
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/multiworld demo

# Three tenants, two models, a Ray cluster of four nodes (on this machine); one is lost.
demo-cluster: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ray
	$(BIN)/python examples/cluster/cluster.py

# Lint first; types and tests side by side, and the tests in LANES processes, file by
# file: most of them wait most of the time.
test: lint
	@mkdir -p build
	@nice $(MAKE) --no-print-directory types > build/types.txt 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -m "not heavy" $(SIDE_BY_SIDE) $(ARGS); tests=$$?; \
	wait $$types; types=$$?; cat build/types.txt; exit $$((tests | types))

# The quick loop: lint, types, and the tests that a change most likely breaks. BASE is the
# commit to compare with, by default the last one.
check: lint
	@mkdir -p build
	@nice $(MAKE) --no-print-directory types > build/types.txt 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -q -m "not heavy" $(SIDE_BY_SIDE) $$($(BIN)/python -m tests.meta.affected) $(ARGS); tests=$$?; \
	wait $$types; types=$$?; cat build/types.txt; exit $$((tests | types))

# Line coverage of the library by the same tests, processes included.
coverage: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group coverage
	rm -rf build/coverage
	$(BIN)/coverage run -m pytest -m "not heavy" --timeout=240 $(SIDE_BY_SIDE) $(ARGS); tests=$$?; \
	$(BIN)/coverage combine --quiet && $(BIN)/coverage json --quiet && \
	$(BIN)/python -m tests.meta.coverage_table && exit $$tests

test-all: $(STAMP) lint types
	$(BIN)/python -m pytest --timeout=1800 --hypothesis-profile=new $(ARGS)

# What operators use, in a real browser, which is installed from Debian's packages.
test-operate: $(STAMP)
	command -v chromium > /dev/null || apt-get install -y --no-install-recommends chromium
	command -v prometheus > /dev/null || apt-get install -y --no-install-recommends prometheus
	$(BIN)/python -m pytest tests/operate $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

faults: $(STAMP)
	$(BIN)/python -m pytest tests/faults $(ARGS)

# Random faults over a fleet under traffic; the same seed draws the same ones.
soak: $(STAMP)
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED) $(ARGS)

# The same for a service: checked requests all the while, and nothing may be lost.
soak-serve: $(STAMP)
	$(BIN)/python -m tests.serve.soak --minutes $(MINUTES) --seed $(SEED) $(ARGS)

# Random faults under streams of generated text; every token is checked. With an external
# engine: ENGINE=vllm, llama.cpp (by xllamacpp), llama-server (on the PATH) or stand-in.
soak-generate: $(STAMP)
	$(BIN)/python -m tests.serve.soak_generate --minutes $(MINUTES) --seed $(SEED) --engine "$(ENGINE)" $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group bench
	$(BIN)/python -m benchmarks --out benchmarks/results $(ARGS)

bench-detection: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group bench
	$(BIN)/python -m benchmarks.studies.detection $(ARGS)

bench-serving: $(STAMP)
	$(BIN)/python -m benchmarks serving --out benchmarks/results $(ARGS)

# The wheel outside the source tree, in several Pythons and torches; one: CELLS="3.11x2.13".
matrix:
	$(PYTHON) -m tests.matrix $(if $(CELLS),--cells "$(CELLS)") $(ARGS)

# Fails on a broken link, a missing anchor, or a page that mkdocs.yml does not list.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html; with search: $(BIN)/mkdocs serve"

# All that a release must pass. .github/workflows/release.yml runs the same targets; with
# TAG=v0.1.0 the package must have that version.
release-check:
	$(MAKE) --no-print-directory release-build
	$(MAKE) --no-print-directory release-smoke
	$(MAKE) --no-print-directory docs

DIST := build/dist
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The source distribution, and the wheel that is built from it.
release-build:
	rm -rf $(DIST)
	$(PYTHON) -m venv --clear build/release
	build/release/bin/python $(PIP_INSTALL) "pip>=25.1"
	build/release/bin/python $(PIP_INSTALL) --group release
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt build/release/bin/pyproject-build --outdir $(DIST)
	rm -rf src/multiworld_elastic.egg-info
	build/release/bin/twine check --strict $(DIST)/*
	build/release/bin/python .github/scripts/check_release.py $(DIST) --tag "$(TAG)"

# Install the wheel from build/dist into an empty environment of PYTHON and use it: without
# extras, with [serve], and with [demo]. `multiworld demo` exits with 1 on a wrong token.
release-smoke:
	$(PYTHON) -m venv --clear build/smoke
	build/smoke/bin/python $(PIP_INSTALL) "$$(ls $(DIST)/*.whl)"
	build/smoke/bin/python -I .github/scripts/smoke.py worlds README.md
	build/smoke/bin/python $(PIP_INSTALL) "$$(ls $(DIST)/*.whl)[serve]"
	build/smoke/bin/python -I .github/scripts/smoke.py serve
	build/smoke/bin/python $(PIP_INSTALL) "$$(ls $(DIST)/*.whl)[demo]"
	build/smoke/bin/multiworld demo --picture build/smoke/demo.png

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .hypothesis
