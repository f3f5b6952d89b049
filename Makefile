# Every target makes .venv from nothing if need be, with the versions in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help readme notebooks demo test test-all test-plain test-native-sanitized test-rounding test-torch test-zensical fuzz lint bench docs dist test-dist clean
.NOTPARALLEL:

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 15

demo: .venv/installed-train ## Train equilibrium classifiers on digits beside their explicit twin, with a report
	$(BIN)/equilibria demo

# One thread per worker: two workers with two threads each would fight over two cores.
test: lint ## Lint, check types and run the tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2

test-all: lint ## The same with the slow tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 -m "not gpu"

test-ray: .venv/installed-dev ## Replicas of a served model on a local Ray instance; installs the extra `ray`, 300 MB
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e ".[ray]"
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -m slow tests/serving/test_ray.py

test-plain: .venv/installed-dev ## Solvers, core and gradients with steps in torch, without the compiled kernels
	EQUILIBRIA_NATIVE=0 OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 tests/solvers tests/core tests/gradients tests/native

# Built in place and afterwards built again as usual.
BUILD_KERNELS := $(BIN)/python setup.py -q build_ext --inplace --force
SANITIZERS = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0
test-native-sanitized: .venv/installed-dev ## The tests of the compiled kernels under address and undefined-behaviour sanitizers
	EQUILIBRIA_SANITIZE=1 $(BUILD_KERNELS)
	$(SANITIZERS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/native/test_same_as_torch.py tests/native/test_rows.py; \
		found=$$?; $(BUILD_KERNELS); exit $$found

SAMPLES ?= 20000
fuzz: .venv/installed-dev ## Look for statuses and gradients that are not true; SAMPLES=100000 takes ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --samples $(SAMPLES)

# SETTINGS="aten-default other-seeds" runs those alone; the summary goes to rounding.json.
test-rounding: .venv/installed-dev ## The tests under several settings of arithmetic, before a release
	$(BIN)/python -m tests.rounding $(if $(SETTINGS),--only $(SETTINGS))

# An environment of its own, .venv-torch-$(TORCH), with that version of torch: 5.5 GB on disk, since only the pinned version
# has a build for the CPU alone. The summary goes to torch-$(TORCH).json.
TORCH ?= 2.15.0
TORCH_BIN := .venv-torch-$(TORCH)/bin
test-torch: ## Core, solvers, gradients, compilation and export with another torch: make test-torch TORCH=2.15.0
	test -d .venv-torch-$(TORCH) || $(PYTHON) -m venv .venv-torch-$(TORCH)
	$(TORCH_BIN)/pip install -qq --disable-pip-version-check torch==$(TORCH) -e ".[export]" \
		hypothesis numpy pytest pytest-xdist scikit-learn
	$(TORCH_BIN)/python -m tests.torch_version --json torch-$(TORCH).json

lint: .venv/installed-dev ## Lint, check format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: .venv/installed-dev ## Measure training steps next to TorchDEQ, two minutes
	OMP_NUM_THREADS=1 $(BIN)/equilibria bench --quick

readme: .venv/installed-train ## Write the figures of results/ into the README, the documentation and the notes
	$(BIN)/equilibria report results
	$(BIN)/python docs/stored_figures.py
	$(BIN)/equilibria report results

notebooks: .venv/installed-dev ## Run the notebooks and write their outputs
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/execute.py

docs: .venv/installed-docs ## Build the documentation into site/
	$(BIN)/python docs/site_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-zensical: .venv/installed-dev ## Build the documentation with Zensical too, from an environment of its own, and compare the pages
	test -d .venv-zensical || $(PYTHON) -m venv .venv-zensical
	.venv-zensical/bin/pip install -qq --disable-pip-version-check -c constraints.txt zensical "mkdocstrings[python]"
	ZENSICAL=$(CURDIR)/.venv-zensical/bin/zensical $(BIN)/pytest -q -m slow tests/test_site.py -k zensical

dist: .venv/installed-dev ## Build the archive and the wheel of a release into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# From inside dist/, where the package is not to be found but as it was installed.
test-dist: dist ## Install the wheel into an environment of its own; run the example of the README and the help of every command there
	rm -rf .venv-dist && $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install -qq --disable-pip-version-check -c constraints.txt "$$(echo dist/*.whl)[train]"
	sed -n '/^```python/,/^```/{/^```/!p}' README.md > dist/readme.py
	cd dist && ../.venv-dist/bin/python -W error readme.py
	cd dist && for command in "" $$(../.venv-dist/bin/python -c "from equilibria.lab.cli.main import COMMANDS; print(*COMMANDS, 'bench')"); \
		do ../.venv-dist/bin/equilibria $$command --help > help.txt || exit 1; done
	rm dist/readme.py dist/help.txt

clean: ## Remove what the other targets made, but for .venv
	rm -rf build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info digits.png runs rounding.json torch-*.json .venv-torch-* .venv-dist .venv-zensical
	find equilibria tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv .venv

# installed-X: the package, editable, with its extra X. The exact torch in constraints.txt must be in the same command,
# or pip may settle on a build that brings gigabytes of GPU libraries.
KERNELS := setup.py $(wildcard equilibria/native/*.cpp equilibria/native/*.h)
.venv/installed-%: pyproject.toml constraints.txt $(KERNELS) | $(BIN)/python
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@
