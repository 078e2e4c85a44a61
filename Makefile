# make lab      open the first lesson in JupyterLab          make lab LAB_ARGS="--no-browser --port 8899"
# make test     lint, types, import layers, then every test  make test PYTEST_ARGS="-k block_pool"   NO_BROWSER=1
# make test-browser   every lesson in JupyterLab, the widgets in Notebook 7; screenshots in test-results/ (ten minutes)
# make bench    speed of allocator and scheduler, measured
# make clean    remove the environment and what builds left behind
#
# PYTHON=python3.12    the interpreter that the environment is made with (3.11 or newer)
# JOBS=0               tests in one process, as a debugger needs; else that many files at a time, 2
# CONSTRAINTS=         (empty) newest versions that pyproject.toml admits instead of the tested set

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
LAB_ARGS ?=
PYTEST_ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.model
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# OpenMP threads that wait by spinning make a busy machine several times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: lab test test-browser bench lint env clean constraints

lab: $(MODEL)
	$(BIN)/jupyter lab $(AS_ROOT) --ServerApp.root_dir="$(CURDIR)" notebooks/00_start_here.ipynb $(LAB_ARGS)

env: $(INSTALLED)

$(INSTALLED): pyproject.toml $(wildcard $(CONSTRAINTS))
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("labkit needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	$(BIN)/python -m ipykernel install --sys-prefix --name python3 --display-name "Python 3 (labkit)"
	@touch $@

$(MODEL): $(INSTALLED)
	$(BIN)/labkit models fetch
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# pytest comes last, so that its summary is the last line. The browser is found (or installed) first: without one the
# browser tests fail, unless NO_BROWSER=1 says that this is wanted.
test: lint $(MODEL)
	$(if $(NO_BROWSER),,$(BIN)/python tests/browser/find_browser.py)
	$(BIN)/pytest tests notebooks -n $(JOBS) --dist loadfile --nbval-lax --nbval-current-env --nbval-cell-timeout=120 $(PYTEST_ARGS)

# What is too long for make test: run it before a release, and look at the screenshots.
test-browser: $(MODEL)
	$(BIN)/python tests/browser/find_browser.py
	$(BIN)/pytest tests/browser tests/browser/every_notebook.py $(PYTEST_ARGS)

# Speed of the control plane, on a calm machine; nothing is asserted.
bench: $(INSTALLED)
	$(BIN)/pytest tests/benchmarks/bench_control_plane.py -o python_functions='bench_*' --benchmark-columns=min,median,max,rounds

# Rewrites the pins below the comment of constraints.txt from the environment in .venv.
constraints: $(INSTALLED)
	sed -n '/^#/p' constraints.txt > $(VENV)/constraints.new
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//; s/+cu[0-9]*$$//' | grep -v '^nvidia-.*-cu[0-9]' >> $(VENV)/constraints.new
	mv $(VENV)/constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks test-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
