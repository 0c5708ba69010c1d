#!/bin/sh
# Style and types of everything; stops at the first fault with its message.
set -eu
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet . || { echo "error: run make format" >&2; .venv/bin/ruff format --check . >&2; exit 1; }
.venv/bin/mypy
.venvs/snakemake/bin/snakefmt --check Snakefile workflow/rules
.venvs/snakemake/bin/snakemake --lint
