# The commands that README.md names, in a virtual environment of their own (.venv, made on first use).
# PYTHON=python3.12 chooses the interpreter it is made with, UV= installs with pip even where uv is there.
PYTHON ?= python3
ARGS   ?=
FLAGS  ?=
UV     := $(shell command -v uv 2>/dev/null)
BIN    := .venv/bin
OLDEST := $(shell sed -n 's/^pythons *= *\([0-9.]*\).*/\1/p' settings.ini)
stop    = { echo "$(1)" >&2; exit 1; }

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /make \1	/p' Makefile

demo: .venv/ready  ## try every precision on this machine; make demo ARGS="--help" for its options
	$(BIN)/python -m mp_callbacks $(ARGS)

test: check  ## everything that can be tested here; FLAGS="cuda slow" adds those cells and tests
	$(BIN)/nbdev-test --flags "$(FLAGS)" --skip-folder-re "."
	$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder --flags "$(FLAGS)"

check: .venv/ready  ## make modules and README again from the notebooks, and fail if that changed something
	$(BIN)/python .ci/generate.py

docs: .venv/ready  ## the site, in _docs/index.html
	$(BIN)/python docs/pages.py pages
	$(BIN)/zensical build --strict --clean --config-file _proc/mkdocs.yml
	rm -rf _docs && mv _proc/site _docs && cp -R _proc/md/. _docs

.venv/ready: settings.ini setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || $(call stop,make needs $(PYTHON): install Python $(OLDEST) or newer or say PYTHON=path/to/python)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < tuple(map(int, "$(OLDEST)".split("."))))' || \
		$(call stop,$(PYTHON) is older than Python $(OLDEST): install a newer one or say PYTHON=path/to/python)
ifeq ($(UV),)
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		$(call stop,$(PYTHON) has no venv module: install it (on Debian and Ubuntu: apt install python3-venv) or install uv)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -e '.[dev,docs]'
else
	test -x $(BIN)/python || $(UV) venv -q --seed --python $(PYTHON) .venv
	$(UV) pip install -q --python $(BIN)/python -e '.[dev,docs]'
endif
	@touch $@

.PHONY: help demo test check docs
