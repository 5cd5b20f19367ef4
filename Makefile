# Everything runs from a virtual environment of its own; nothing is installed outside this directory.
#   PYTHON  the interpreter to build it with (3.11 or newer)
#   TORCH   another torch than constraints.txt pins, in an environment beside the first: make TORCH=2.11.0 test
#   ARGS    more arguments for pytest or for the demo: make test ARGS="-k disk", make demo ARGS="--steps 4"
#   JOBS    how many tests run side by side
#   CUDA_VENV  the environment of fake-gpu, with torch's CUDA build
PYTHON ?= python3
TORCH ?=
ARGS ?=
JOBS ?= 2
CUDA_VENV ?= .venv-cuda
CUDA_STAMP := $(CUDA_VENV)/.installed

VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
# What the demo needs is installed by itself, and is a part of what everything else does.
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.installed-for-demo
# Pages are made of the sources as texts: what makes them is installed without the library, torch and frameworks.
DOCS_VENV := .venv-docs
DOCS := $(DOCS_VENV)/.installed

# Tests start hundreds of processes: without bytecode each of them would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo docs test test-full gpu fake-gpu fake-gpu-environment stacks soak mutants bench lint clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
	  while IFS='|' read -r target text; do printf '%-18s %s\n' "$$target" "$$text"; done

demo: $(DEMO) ## train a small language model four ways in 2 minutes; a table and demo/memory.png
	$(BIN)/python examples/train_lm.py $(ARGS)

docs: $(DOCS) ## the documentation into site/, which opens from the folder; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --clean $(ARGS)

test: $(STAMP) ## the tests, about 7 minutes on 2 cores
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not long and not gpu" $(ARGS)

# What is drawn anew may find what no change has made: CI runs what is the same in every run.
test-full: $(STAMP) ## the long ones too, about 30 minutes on 2 cores; TESTS_WHOLE=1 leaves no sampled case out
	TESTS_FRESH=$${TESTS_FRESH-$(if $(CI),0,2)} $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not gpu and not short" $(ARGS)

gpu: ## the tests and benchmarks that need a GPU, under 10 minutes, with PYTHON's own torch and nothing installed
	@$(PYTHON) -c 'import torch, psutil' || { echo "skipped: $(PYTHON) has no torch or no psutil"; exit 0; }; \
	  exec $(PYTHON) -m benchmarks.gpu $(ARGS)

fake-gpu: $(CUDA_STAMP) ## torch's CUDA build (5 GB, installed once) over a stand-in for CUDA: what needs no values, 4 minutes
	$(CUDA_VENV)/bin/python -m tests.fake_cuda -m pytest -n $(JOBS) tests/fake_cuda/on_cuda $(ARGS)

fake-gpu-environment: $(CUDA_STAMP)

stacks: ## the releases that people train with, in environments of their own (installed once): each bit for bit
	@$(CHECK_PYTHON)
	$(PYTHON) -m tests.stacks $(ARGS)

soak: $(STAMP) ## trains for MINUTES (10) with faults and exceptions; a table of every resource before and after
	$(BIN)/python -m tools.soak --minutes $(or $(MINUTES),10) $(ARGS)

mutants: $(STAMP) ## which test notices each wait, record, keepalive and release that is taken out, an hour on 2 busy cores
	$(BIN)/python -m tools.mutants $(ARGS)

bench: $(STAMP) ## every benchmark, half an hour on 2 quiet cores; benchmarks/results (ARGS="--quick --check")
	@status=0; for name in hooks planning compile_time cpu_train cpu_defaults; do \
	  $(BIN)/python -m benchmarks.$$name $(ARGS) || status=1; done; exit $$status

lint: $(STAMP) ## ruff (lint and format), mypy --strict, and marks of the prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.prose --check

clean: ## remove what the targets above made
	rm -rf .venv .venv-* build dist *.egg-info demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis .virtual_device .compiled .fake_cuda
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }

# pip runs again only when what is installed has changed. The package itself is installed in place: no need for it to.
$(STAMP): EXTRAS := test,frameworks,docs,lint,demo
$(DEMO): EXTRAS := demo
$(STAMP) $(DEMO): pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	sed $(if $(TORCH),'s/^torch==.*/torch==$(TORCH)/',-n p) constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]'
	touch $@ $(DEMO)

$(DOCS): pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(DOCS_VENV)
	$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["optional-dependencies"]["docs"], sep="\n")' > $(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -r $(DOCS_VENV)/requirements.txt
	touch $@

# Torch's CUDA build, with wheels for x86-64 and 5 GB of libraries. The library itself is run in place.
$(CUDA_STAMP): tests/fake_cuda/requirements.txt
	@test "$$(uname -sm)" = "Linux x86_64" || { echo "torch's CUDA build is for Linux on x86-64 here" >&2; exit 1; }
	@$(PYTHON) -c 'import shutil, sys; sys.exit(shutil.disk_usage(".").free < 8e9)' || \
	  { echo "the environment for fake-gpu takes 5 GB, and 8 GB of disk space are not free" >&2; exit 1; }
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --disable-pip-version-check --no-compile -r $<
	touch $@
