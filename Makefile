# The commands that CONTRIBUTING.md names, in a virtual environment of their own (.venv, made on first use).
# PYTHON=python3.12 chooses the interpreter it is made with. uv installs; where there is none, pip puts one into .venv.
PYTHON ?= python3
ARGS   ?=
FLAGS  ?=
SET    ?= lower-bounds
BIN    := .venv/bin
# pytest runs these, and compares their outputs with those saved
PAGES  := ^(tutorials|howto|explanations|[_.].*)$$
UV     := $(or $(shell command -v uv 2>/dev/null),$(BIN)/uv)
OLDEST := $(shell sed -n 's/^pythons *= *\([0-9.]*\).*/\1/p' settings.ini)
stop    = { echo "$(1)" >&2; exit 1; }
install = $(UV) pip install --python $(BIN)/python
# Let Python keep bytecode, so that not each process compiles what it imports
export PYTHONDONTWRITEBYTECODE :=
# The demo does with less, unless everything is there already
DEMO   := $(if $(wildcard .venv/ready),.venv/ready,.venv/demo)

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /make \1	/p' Makefile

demo: $(DEMO)  ## try every precision on this machine; make demo ARGS="--help" for its options
	$(BIN)/python -m mp_callbacks $(ARGS)

test: check  ## everything that can be tested here; FLAGS="cuda slow" adds those cells and tests
	$(BIN)/nbdev-test --flags "$(FLAGS)" --skip-folder-re "$(PAGES)"
	$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder --flags "$(FLAGS)"

set: .sets/$(SET)/ready  ## the tests with other versions: SET=lower-bounds (the oldest), kaggle or colab
	.sets/$(SET)/bin/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder --flags "$(FLAGS)"

check: .venv/ready  ## make modules and README again from the notebooks, fail if that changed something; then ruff and import-linter
	$(BIN)/python .ci/generate.py
	$(BIN)/ruff check --no-cache
	$(BIN)/lint-imports --no-cache --no-logo

outputs: .venv/ready  ## run PAGE=nbs/…ipynb, and save outputs that have changed; ARGS=--all saves pictures and varying ones, too
	@test -n "$(PAGE)" || $(call stop,make outputs needs a page: say PAGE=nbs/howto/keep.ipynb)
	$(BIN)/python docs/outputs.py $(ARGS) $(PAGE)

docs: .venv/ready  ## the site, in _docs/index.html
	$(BIN)/python docs/pages.py pages
	$(BIN)/zensical build --strict --clean --config-file _proc/mkdocs.yml
	rm -rf _docs && mv _proc/site _docs && cp -R _proc/md/. _docs

.venv/bin/python:
	@command -v $(PYTHON) >/dev/null || $(call stop,make needs $(PYTHON): install Python $(OLDEST) or newer or say PYTHON=path/to/python)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < tuple(map(int, "$(OLDEST)".split("."))))' || \
		$(call stop,$(PYTHON) is older than Python $(OLDEST): install a newer one or say PYTHON=path/to/python)
ifeq ($(UV),$(BIN)/uv)
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		$(call stop,$(PYTHON) has no venv module: install it (on Debian and Ubuntu: apt install python3-venv) or install uv)
	$(PYTHON) -m venv .venv

$(UV): | .venv/bin/python
	$(BIN)/python -m pip install -q uv
else
	$(UV) venv -q --seed --python $(PYTHON) .venv
endif

# What the demo runs with, without what PyTorch and fastai bring along for other purposes
.venv/demo: settings.ini setup.py pyproject.toml .ci/not-for-demo.txt | .venv/bin/python $(UV)
	UV_EXCLUDE=.ci/not-for-demo.txt $(install) -e .
	@touch $@

.venv/ready: settings.ini setup.py pyproject.toml | .venv/bin/python $(UV)
	$(install) -e '.[dev,docs]'
	@touch $@

# Without what needs nbdev, which needs a newer fastcore. The first line of the file names the interpreter.
.sets/%/ready: tests/%.txt settings.ini setup.py pyproject.toml | $(UV)
	$(UV) venv -q --clear --python $$(sed -n '1s/^# Python \([0-9.]*\).*/\1/p' $<) .sets/$*
	UV_CONSTRAINT=$< $(UV) pip install --python .sets/$*/bin/python -e '.[test]'
	@touch $@

.PHONY: help demo test set check outputs docs
