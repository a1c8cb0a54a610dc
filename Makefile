# From a fresh clone: `make demo` and `make test`. Needs python3 >= 3.10, g++ and make; the rest
# is installed into a virtual environment.
#
#   PYTHON=python3.12   which Python makes the virtual environment
#   TORCH=2.12.0        which torch is installed into it
#   VENV=.venv-212      another place for it
#   VENV=none           use the Python, torch and tools that are there; install nothing
#   ARGS="--steps 4"    more arguments for the demo, the tests or the benchmarks

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= 2.13.0
ARGS ?=
# `make gpu` runs where torch with CUDA is installed already, often without a network.
ifneq (,$(filter gpu,$(MAKECMDGOALS)))
VENV ?= none
endif
VENV ?= .venv

native_sources := $(shell find csrc kernels third_party tests/gpu -type f -not -name '*.py*' 2>/dev/null) \
                  CMakeLists.txt setup.py pyproject.toml
cpp_files := $(shell find csrc kernels tests -type f \
               \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Who works on memswap switches it on; the option's default is for `pip install`. `make gpu` has its own.
MEMSWAP_WERROR ?= ON
export MEMSWAP_WERROR

ifeq ($(VENV),none)
python := $(PYTHON)
tools :=
lint_tools :=
bench_tools :=
picture_tools :=
site_tools :=
export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))
# pip puts cmake and ninja where that Python has its scripts, which need not be on PATH.
python_scripts := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))' 2>/dev/null)
export PATH := $(PATH)$(if $(python_scripts),:$(python_scripts))
# Another torch in the same Python is another build.
torch_version := $(shell $(PYTHON) -c 'import torch; print(torch.__version__)' 2>/dev/null)
else
python := $(abspath $(VENV))/bin/python
tools := $(VENV)/.tools
lint_tools := $(VENV)/.lint-tools
bench_tools := $(VENV)/.bench-tools
picture_tools := $(VENV)/.picture-tools
site_tools := $(VENV)/.site-tools
# The build finds cmake and ninja on PATH.
export PATH := $(abspath $(VENV))/bin:$(PATH)
torch_version := $(TORCH)
endif

build := build/$(subst /,_,$(VENV))-torch-$(torch_version)
export MEMSWAP_BUILD_DIR := $(CURDIR)/$(build)

# Requirements of one kind, from pyproject.toml, which is the only place that lists them.
# Python 3.10 has no tomllib of its own; pip brings one.
requirements = $(python) -c 'import importlib.util, sys; \
  name = "tomllib" if importlib.util.find_spec("tomllib") else "pip._vendor.tomli"; \
  toml = __import__(name, fromlist=["loads"]); \
  project = toml.loads(open("pyproject.toml", encoding="utf-8").read()); \
  groups = {"build": project["build-system"]["requires"], \
            **project["project"]["optional-dependencies"]}; \
  print("\n".join(line for group in sys.argv[1:] for line in groups[group]))'

.PHONY: help demo test test-all test-npu test-integrations bench lint format site gpu cpp-test build wheel \
        clean distclean \
        require-python require-torch FORCE

help:
	@echo 'make demo        train a small GPT plain, with memswap and under a budget; compare every gradient,'
	@echo '                 show the plan, and draw it (build/demo/memory.png)'
	@echo 'make test        C++ tests, Python tests on the CPU and on the simulated accelerator'
	@echo 'make bench       benchmarks on this machine, results to benchmarks/results/'
	@echo 'make site        the documentation, to build/site'
	@echo 'make lint        ruff, mypy and clang-format; `make format` applies what they can'
	@echo 'Options: PYTHON=python3.12 TORCH=2.12.0 VENV=.venv|none ARGS="..."'
	@echo 'CONTRIBUTING.md has the others: build, wheel, clean, cpp-test, test-all, test-npu,'
	@echo 'test-integrations, gpu.'

demo: build $(picture_tools)
	$(python) -m memswap demo --picture build/demo $(ARGS)

test: build
	$(python) tests/run.py $(ARGS)

test-all: build
	$(python) tests/run.py --slow $(ARGS)

# torch_npu takes part in every `import torch` of the environment it is in, so it has one of its own.
test-npu: build
	$(python) tests/npu/run.py --torch $(TORCH) $(ARGS)

# Other stacks' libraries, in an environment of their own beside this one.
test-integrations: build
	$(python) tests/integrations/run.py $(ARGS)

# For this Python and this minor version of torch, and tried where nothing of this checkout is.
wheel: build
	rm -rf build/wheel
	$(python) -m pip wheel --quiet --no-build-isolation --no-deps --no-index --wheel-dir build/wheel .
	$(python) tests/wheel.py build/wheel/*.whl
	mkdir -p dist && mv build/wheel/*.whl dist/

cpp-test: build
	$(python) tests/run.py --only cpp $(ARGS)

bench: build $(bench_tools)
	$(python) benchmarks/run.py $(ARGS)

# Borrowed machines: the device's architecture alone, and parts with limits (tests/gpu/session.py).
gpu: require-torch
	@$(python) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || { \
	  echo 'make gpu: torch of $(python) sees no CUDA device; nothing was run.' >&2; exit 2; }
	@MEMSWAP_CUDA=ON; MEMSWAP_WERROR=OFF; \
	MEMSWAP_CUDA_ARCHITECTURES=$$($(python) -c \
	  'import torch; print("%d%d-real" % torch.cuda.get_device_capability())'); \
	export MEMSWAP_CUDA MEMSWAP_WERROR MEMSWAP_CUDA_ARCHITECTURES; \
	$(python) tests/gpu/session.py $(if $(PARTS),--parts $(PARTS)) \
	  $(if $(LIMIT_S),--limit-s $(LIMIT_S)) $(if $(TESTS_S),--tests-s $(TESTS_S)) \
	  $(if $(HOST_MEMORY),--host-memory $(HOST_MEMORY)) \
	  --build $(MAKE) --no-print-directory build VENV='$(VENV)' PYTHON='$(PYTHON)'

lint: $(lint_tools)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	$(if $(cpp_files),clang-format --dry-run --Werror $(cpp_files))

# The documentation, from docs/ and the docstrings, which are read as text: no torch, no build. Links
# and anchors that lead nowhere fail. ARGS=--external asks external links, too; that needs a network.
site: $(site_tools)
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict
	@$(if $(ARGS),$(python) docs/site.py $(ARGS),echo 'build/site/index.html')

format: $(lint_tools)
	$(python) -m ruff check --fix .
	$(python) -m ruff format .
	$(if $(cpp_files),clang-format -i $(cpp_files))

clean:
	rm -rf build python/memswap/_C*.so python/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-*

# The module is built in place, so it belongs to one torch at a time. This file names which; it
# changes, and with it everything after it, only when the answer does.
build/.built-for: FORCE
	@mkdir -p build
	@echo '$(VENV) $(PYTHON) torch $(torch_version)' | cmp --silent - $@ \
	  || echo '$(VENV) $(PYTHON) torch $(torch_version)' > $@

build: build/.built

ifeq ($(VENV),none)

build/.built: $(native_sources) build/.built-for | require-torch
	$(python) setup.py --quiet build_ext --inplace
	@touch $@

require-torch:
	@$(python) -c 'import torch' || { \
	  echo 'VENV=none uses the torch that is installed, and $(python) has none. Install torch' \
	       '(for example: pip install torch==$(TORCH)) or leave VENV=none away.' >&2; exit 2; }

else

build/.built: $(native_sources) build/.built-for $(tools)
	$(python) -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

# A file says which torch is wanted, so that TORCH=... after another TORCH=... installs it.
$(VENV)/.torch-wanted: FORCE | $(VENV)/.created
	@echo '$(TORCH)' | cmp --silent - $@ || echo '$(TORCH)' > $@

$(VENV)/.created: | require-python
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.torch-wanted
	$(python) -m pip install torch==$(TORCH)
	@touch $@

$(tools): $(VENV)/.torch pyproject.toml
	$(requirements) build test > $(VENV)/requirements-test.txt
	$(python) -m pip install --quiet --requirement $(VENV)/requirements-test.txt
	@touch $@

# The linters read Python and C++ as text: they need no torch.
$(lint_tools): pyproject.toml | $(VENV)/.created
	$(requirements) lint > $(VENV)/requirements-lint.txt
	$(python) -m pip install --quiet --requirement $(VENV)/requirements-lint.txt
	@touch $@

# mkdocs reads Python as text as well.
$(site_tools): pyproject.toml | $(VENV)/.created
	$(requirements) site > $(VENV)/requirements-site.txt
	$(python) -m pip install --quiet --requirement $(VENV)/requirements-site.txt
	@touch $@

# What draws the demo's picture of a planned step. Without it the demo says that there is none.
$(picture_tools): $(VENV)/.torch pyproject.toml
	$(requirements) picture > $(VENV)/requirements-picture.txt
	-$(python) -m pip install --quiet --requirement $(VENV)/requirements-picture.txt
	@touch $@

# The codecs that ours is measured against, and what draws the picture. Without them (no network)
# the benchmarks run and say what is missing.
$(bench_tools): $(VENV)/.torch pyproject.toml
	$(requirements) bench > $(VENV)/requirements-bench.txt
	-$(python) -m pip install --quiet --requirement $(VENV)/requirements-bench.txt
	@touch $@

require-torch: $(VENV)/.torch

require-python:
	@$(PYTHON) -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' || { \
	  echo 'memswap needs Python >= 3.10. Choose one: make PYTHON=python3.12' >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo '$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv' \
	    >&2; exit 2; }
	@$(PYTHON) -c 'import os, sysconfig; \
	  raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { \
	  echo '$(PYTHON) has no C headers (Python.h); on Debian: apt-get install python3-dev' \
	    >&2; exit 2; }

endif
