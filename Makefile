# The commands of the project. Each sets up what it needs and may be repeated: what is there already is kept.

# Interpreter that the environments are made with: Python 3.11, 3.12 or 3.13.
PYTHON ?= python3
# Where PyTorch's CPU build comes from when pip finds no wheel of it locally.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# More options for snakemake, e.g. ARGS="--config reps=3" or ARGS="--profile workflow/profiles/h200".
ARGS ?=
export TORCH_INDEX

ENV := $(PYTHON) workflow/scripts/make_env.py
SNAKEMAKE := .venvs/snakemake/bin/snakemake
MAKEFLAGS += --no-print-directory

.PHONY: help release smoke test test-all lint format setup relock clean system environments
.DEFAULT_GOAL := help

help:
	@echo "make release   the whole evaluation, of the image where this host can take it: report in reports/<run>/"
	@echo "make smoke     the same at the smallest scale, from the source tree, a few minutes"
	@echo "make test      style, types and tests (without the slow ones)"
	@echo "make test-all  the slow tests too"
	@echo "make setup     only the virtual environments"
	@echo "make lint      only style and types"
	@echo "make relock    resolve the locks in workflow/envs/ and containers/locks/ again"
	@echo "make clean     remove caches and logs; results, reports and environments stay"

system:
	@sh workflow/scripts/system_packages.sh $(PYTHON)

release: system
	@sh workflow/scripts/system_packages.sh --image
	@$(ENV) snakemake
	@$(SNAKEMAKE) release $(ARGS)

smoke: system
	@$(ENV) snakemake
	@$(SNAKEMAKE) smoke $(ARGS)

setup environments: system
	@$(ENV) snakemake engine vllm aiperf

lint: system
	@$(ENV) snakemake engine
	@sh workflow/scripts/lint.sh

format: system
	@$(ENV) snakemake engine
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .
	@.venvs/snakemake/bin/snakefmt Snakefile workflow/rules

test: setup
	@sh workflow/scripts/lint.sh
	@.venv/bin/python -m pytest -m "not slow" $(ARGS)

test-all: setup
	@sh workflow/scripts/lint.sh
	@.venv/bin/python -m pytest $(ARGS)

relock: system
	@$(PYTHON) workflow/scripts/relock.py
	@$(ENV) engine
	@if command -v mmdebstrap >/dev/null; then .venv/bin/python -m sparkinfer_containers relock; \
	else echo "containers/locks/ are unchanged: apt-get install mmdebstrap, then make relock again"; fi

clean:
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist results/logs results/benchmarks
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
