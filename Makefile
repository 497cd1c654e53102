# Everything runs from a bare checkout: `make demo`, `make test`. See `make help`.

PYTHON ?= python3
# VENV= (empty) uses PYTHON as it is: nothing is created, installed or downloaded.
VENV ?= .venv
WORKERS ?= 2

# CUDA 13 needs driver 580 or newer.
driver := $(shell { nvidia-smi --query-gpu=driver_version --format=csv,noheader \
                    || cat /proc/driver/nvidia/version; } 2>/dev/null | grep -oE '[0-9]{3,}\.[0-9]+' | head -n 1 | cut -d. -f1)
ifneq ($(shell uname -s),Linux)
test_cuda := none
else ifeq ($(driver),)
# Compiling a kernel for any GPU needs no GPU, only NVRTC, which comes with CuPy.
test_cuda := 13
else
test_cuda := $(shell test $(driver) -ge 580 && echo 13 || echo 12)
endif
demo_cuda := $(if $(driver),$(test_cuda),none)

ifneq ($(VENV),)
python := $(VENV)/bin/python
test_ready := $(VENV)/.test-$(or $(CUDA),$(test_cuda))
demo_ready := $(VENV)/.demo-$(or $(CUDA),$(demo_cuda))
docs_ready := $(VENV)/.docs-none
else
python := $(PYTHON)
endif
run := PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(python)

.PHONY: help demo test test-oldest lint docs docs-links notebooks wheel clean

help:
	@echo 'make demo        classify handwritten digits by attention, on the GPU if there is one, else with NumPy'
	@echo 'make test        all tests (those that need a GPU are skipped without one)'
	@echo 'make test-oldest tests with the least versions that setup.cfg names, in .venv-oldest, without a GPU'
	@echo 'make lint        ruff, clang-format and mypy'
	@echo 'make docs        the documentation as a site, in build/docs (make docs-links: links to others, too)'
	@echo 'make notebooks   run the notebooks with NumPy and store their outputs'
	@echo 'make wheel       sdist and wheel in dist/'
	@echo 'make clean       remove the environment and everything that was built'
	@echo
	@echo 'PYTHON=python3.12   the interpreter (3.10 or newer)          VENV=.venv   where the environment goes'
	@echo 'VENV=               use PYTHON with the packages it has: no network, nothing is installed'
	@echo 'CUDA=12|13|none     which CuPy to install (by default as the driver allows)'
	@echo 'WORKERS=2           processes for make test                  ARGS="..."   more arguments for demo, test'

demo: $(demo_ready)
	$(run) -m cuflash demo $(ARGS)

test: $(test_ready)
	$(run) -m pytest -n $(WORKERS) $(ARGS)

# Without CuPy, which asks for a newer NumPy.
test-oldest:
	mkdir -p .venv-oldest
	sed -n 's/^ *\([A-Za-z_-]*\)>=\([0-9.]*\)$$/\1==\2/p' setup.cfg > .venv-oldest/constraints.txt
	PIP_CONSTRAINT=$(CURDIR)/.venv-oldest/constraints.txt $(MAKE) test VENV=.venv-oldest CUDA=none \
	    ARGS='$(or $(ARGS),tests/problem tests/cpu tests/tools)'

lint: $(test_ready)
	$(run) -m ruff check .
	$(run) -m ruff format --check .
	$(run) -c 'import clang_format; clang_format.clang_format()' --dry-run --Werror \
	    cuda_src/*.cu cuda_src/*/*.cuh tests/emulator/*.h tests/emulator/*.cpp tests/emulator/ptx/*.cuh \
	    tests/emulator/hip/*.h tests/emulator/hip/ptx/*.cuh
	$(run) -m mypy

docs: $(docs_ready)
	$(run) -m sphinx -W --keep-going -b html docs build/docs

docs-links: $(docs_ready)
	$(run) -m sphinx -b linkcheck docs build/docs-links

notebooks: $(test_ready)
	$(run) tests/tools/test_notebooks.py

wheel: $(test_ready)
	$(run) -m build

ifneq ($(VENV),)
# Each stamp names what was installed, so that a second run starts at once.
$(VENV)/.demo-%: setup.cfg pyproject.toml | $(VENV)/bin/python
	$(call install,examples)

$(VENV)/.docs-%: setup.cfg pyproject.toml | $(VENV)/bin/python
	$(call install,docs)

$(VENV)/.test-%: setup.cfg pyproject.toml | $(VENV)/bin/python
	$(call install,test)

# The CuPy wheels for CUDA 12 and 13 overwrite each other's files: before one comes the other has to go.
comma := ,
other_cuda = $(if $(filter 12,$*),13,12)
define install
	$(if $(filter none,$*),,$(python) -m pip uninstall --quiet --quiet --yes cupy-cuda$(other_cuda)x)
	$(if $(filter none,$*),,rm -f $(VENV)/.*-$(other_cuda))
	$(python) -m pip install --quiet --config-settings editable_mode=compat --editable '.[$(1)$(if $(filter none,$*),,$(comma)cuda$*)]'
	touch $@
endef

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo 'cuflash needs Python 3.10 or newer: make ... PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo 'This Python cannot create environments. Install its venv package (Debian, Ubuntu: python3-venv), choose'; \
	         echo 'another Python with PYTHON=..., or use the packages that it already has with VENV= (empty).'; exit 1; }
	$(PYTHON) -m venv $(VENV)
endif

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info digits.png .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
