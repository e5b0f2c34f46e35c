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
# One thread each, and threads that wait sleep: what runs side by side is not in each other's way.
export OMP_WAIT_POLICY := PASSIVE
export OMP_NUM_THREADS ?= 1
# What a tensor frees is kept for the next one, not given back to the system and fetched again: a
# fifth less processor time in what moves much memory, the same bits (glibc alone reads these).
export MALLOC_MMAP_THRESHOLD_ := 2000000000
export MALLOC_TRIM_THRESHOLD_ := 4000000000
export MALLOC_TOP_PAD_ := 67108864
# Its own font list: one that names the fonts of a deleted environment makes figures complain.
export MPLCONFIGDIR := $(CURDIR)/.venv/matplotlib
# Tests never reach for the hub; what they need is shipped or made on the spot. The language model
# is fetched by the installer where it can be; where not, the tests of it say why they are skipped.
# Two files at a time; nbval runs every notebook and compares its outputs with the committed ones.
RESULTS := $(CURDIR)/_build/test/results
PYTEST = HF_HUB_OFFLINE=1 ICLUTILS_RESULTS="$(RESULTS)" $(BIN)/python -m pytest
TOGETHER := -n 2 --dist loadfile --no-loadscope-reorder
# Types are a test (tests/test_types.py), which runs beside the others.
# At night every call is checked against the shapes of its signature, which costs a quarter more.
SHAPES := --jaxtyping-packages=iclutils,training,beartype.beartype
STYLE := $(BIN)/ruff check && $(BIN)/ruff format --check
GRADED = $(if $(HW),--homework $(HW)) $(if $(BUILD),--build "$(BUILD)")
NUMBERS = $(if $(ARGS),,WHOLE=1) $(PYTEST) tests/test_numbers.py -q
GRADING := $(if $(MASTERS),ICLUTILS_HOMEWORK="$(MASTERS)") \
  PYTHONPATH="notebooks/assignments:notebooks/assignments/answers$(MASTERS:%=:%/answers)" \
  $(BIN)/python -m grading

.PHONY: help setup book test nightly anywhere lint real accept assignments grade gradebook class-trial clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv, install everything into it, fetch SmolLM2 (93 MB)

book: $(READY)  ## run the chapters that changed, build the pages of what ran, compare the numbers
	@status=0; $(BIN)/python tools/run.py || status=1; \
	  $(BIN)/python -m pytest tests/test_numbers.py -q -p no:cacheprovider --noconftest & numbers=$$!; \
	  $(BIN)/python tools/build.py || status=1; wait $$numbers || status=1; exit $$status

test: $(READY)  ## style, types, tests, each notebook against its outputs (nbval), its numbers, the pages
	@$(STYLE)
	@rm -rf "$(RESULTS)"
	@status=0; $(PYTEST) tests notebooks --nbval $(TOGETHER) $(ARGS) || status=1; \
	  $(NUMBERS) || status=1; exit $$status

nightly: $(READY)  ## all of it: also what is exhaustive or long, and part of the tier real
	@$(STYLE)
	@rm -rf "$(RESULTS)"
	@status=0; $(PYTEST) tests notebooks -m "nightly or not nightly" --nbval $(TOGETHER) $(SHAPES) \
	  $(ARGS) || status=1; $(NUMBERS) || status=1; \
	  $(BIN)/python tools/run.py --weights random || status=1; for null in trained random; do \
	  $(BIN)/python tools/run.py --tier real-part --weights $$null || status=1; done; \
	  $(BIN)/python -m pytest tests/test_numbers.py -q || status=1; exit $$status

anywhere: $(READY)  ## all notebooks as on other processors, with 1, 2 and 4 threads: half an hour
	@$(BIN)/python tools/anywhere.py

lint: $(READY)  ## ruff and mypy; nothing is changed
	@$(STYLE)
	@$(BIN)/mypy

real: $(READY)  ## all chapters on a pretrained language model, and their null: about an hour
	@status=0; for weights in trained random; do \
	  $(BIN)/python tools/run.py --tier real --weights $$weights || status=1; done; \
	  $(BIN)/python -m pytest tests/test_numbers.py -q || status=1; exit $$status

accept: $(READY)  ## make the last runs the committed ones; then read git diff
	@$(BIN)/python tools/accept.py

assignments: $(READY)  ## derive homework from the solved masters: student, autograder, instructor
	@$(GRADING) assignments $(GRADED)

grade: $(READY)  ## grade a folder into a CSV: make grade SUBMISSIONS=folder HW=hw01
	@$(GRADING) grade $(GRADED) $(if $(UNCONFINED),--unconfined) --submissions "$(or \
	  $(and $(HW),$(SUBMISSIONS)),$(error which ones? make grade SUBMISSIONS=folder HW=hw01))"

gradebook: $(READY)  ## join the graded homeworks by student: make gradebook ROSTER=participants.csv
	@$(GRADING) gradebook $(if $(BUILD),--build "$(BUILD)") $(if $(ROSTER),--roster "$(ROSTER)")

class-trial: $(READY)  ## a dry run of grading: twelve submissions of all kinds, and their table
	@$(GRADING) trial $(if $(BUILD),--build "$(BUILD)") $(if $(UNCONFINED),--unconfined)

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
	  -e ".[book,cluster,coursework,dev]"
	@$(BIN)/python -c "from iclutils.zoo import smollm2; print(smollm2.fetch_error() or 'SmolLM2 is here')"
	@touch $@
