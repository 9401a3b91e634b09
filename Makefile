# Everything a contributor types. `make` alone lists it.
#
# Paths are relative on purpose: a checkout may live under a name with spaces.

PYTHON ?= python3
WITH ?= numpy,torch
WORKERS ?= 2
PIP_FLAGS ?= --quiet

# The demo's layer: Qwen3-MoE geometry, every width scaled.
FAMILY ?= qwen3_moe
TOKENS ?= 256
SCALE ?= 1/8
DTYPE ?= float32
SEED ?= 0

MINUTES ?= 10

# Where pip puts things, and what it installs, is said here and not by the caller's environment.
# Indexes, certificates, proxies and constraints of the caller stay in force.
unexport PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PIP_DRY_RUN PIP_NO_DEPS PIP_REQUIREMENT
unexport PIP_EDITABLE PIP_UPGRADE PIP_NO_BUILD_ISOLATION PIP_GROUP PIP_ONLY_BINARY PIP_NO_BINARY
unexport PYTHONHOME PYTHONPATH

comma := ,
empty :=
space := $(empty) $(empty)
VPY := .venv/bin/python
PIP := $(VPY) -m pip
INSTALL := $(PIP) install $(PIP_FLAGS) --disable-pip-version-check -c constraints.txt
BACKENDS := $(strip $(subst $(comma), ,$(WITH)))
BACKEND_LIST := $(subst $(space),$(comma),$(BACKENDS))

# A stamp says what was installed, so a light install is never taken for a full one. Each is redone
# when what it was made from changes. A .venv that was moved here with the checkout is looked at again.
INPUTS := pyproject.toml constraints.txt
DEMO_STAMP := .venv/.installed-demo-$(subst $(space),-,$(BACKENDS))
MOVED := $(shell test "$$(cat .venv/.created 2>/dev/null)" = "$$(pwd -P)" || echo moved)

.PHONY: help demo test lint fuzz gpu-check clean distclean FORCE
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:
	@echo 'make demo         install, make a scaled Qwen3-MoE layer, run it backward and compare backends'
	@echo '                  WITH=numpy (light install), WITH=numpy,torch (default), WITH=numpy,cupy'
	@echo '                  TOKENS=$(TOKENS) SCALE=$(SCALE) DTYPE=$(DTYPE) SEED=$(SEED) FAMILY=$(FAMILY)'
	@echo 'make test         install everything the tests need and run them   ARGS="-k router" WORKERS=2'
	@echo 'make lint         ruff, mypy --strict, pyright, import-linter'
	@echo 'make fuzz         random layers on every backend until one fails   MINUTES=$(MINUTES) SEED=$(SEED)'
	@echo 'make gpu-check    on a machine with a GPU: its own python3, nothing installed'
	@echo 'make clean        remove results and caches; make distclean removes .venv as well'
	@echo
	@echo 'PYTHON=python3.12 chooses the Python (3.11 or newer) that .venv is made from.'

# --- the environment ---------------------------------------------------------------------------

.venv/.created: $(if $(MOVED),FORCE)
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "make: no '$(PYTHON)' found. Install Python 3.11 or newer, or: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1); ruda needs Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@if $(VPY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo "Using the .venv that is here ($$($(VPY) --version))"; \
	else \
	  echo "Making .venv with $$("$(PYTHON)" --version)"; \
	  "$(PYTHON)" -m venv --clear .venv || { \
	    echo "make: '$(PYTHON)' cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	fi
	@rm -f .venv/.installed-*
	@$(INSTALL) --upgrade pip
	@pwd -P > .venv/.created

$(DEMO_STAMP): .venv/.created $(INPUTS)
	@echo 'Installing ruda[cli,$(BACKEND_LIST)] into .venv (the first time may take minutes: PyTorch is large)'
	@$(INSTALL) --build-constraint constraints.txt -e '.[cli,$(BACKEND_LIST)]'
	@touch '$@'

.venv/.installed-test: .venv/.created $(INPUTS)
	@echo 'Installing what the tests need into .venv (the first time may take minutes: PyTorch is large)'
	@$(INSTALL) --build-constraint constraints.txt -e '.[all]' --group suite
	@touch '$@'

.venv/.installed-lint: .venv/.installed-test
	@echo 'Installing the linters and type checkers into .venv'
	@$(INSTALL) --group lint
	@touch '$@'

# --- what there is to do -----------------------------------------------------------------------

define demo_backward
	.venv/bin/ruda backward demo/layer.safetensors --backend $(1) -o demo/grads-$(1).safetensors

endef

demo: $(DEMO_STAMP)
	@mkdir -p demo
	@echo 'A $(FAMILY) layer at scale $(SCALE), $(TOKENS) tokens, $(DTYPE):'
	.venv/bin/ruda make-layer --family $(FAMILY) --tokens $(TOKENS) --scale $(SCALE) --dtype $(DTYPE) --seed $(SEED) -o demo/layer.safetensors
	@echo 'Its output and five gradients, on each backend:'
	$(foreach backend,$(BACKENDS),$(call demo_backward,$(backend)))
	@echo 'Each against the float64 reference:'
	.venv/bin/ruda parity demo/layer.safetensors --backends $(BACKEND_LIST) --plot parity.png --json demo/parity.json
	@echo
	@echo 'Results: demo/layer.safetensors, demo/grads-*.safetensors, demo/parity.json; the picture: parity.png'

# One thread a worker: two workers with a thread pool each would fight over the same cores.
test: .venv/.installed-test
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VPY) -m pytest -n $(WORKERS) $(ARGS)

# PYRIGHT_PYTHON_IGNORE_WARNINGS: the wrapper runs the pyright it ships and asks nobody for a newer one.
lint: .venv/.installed-lint
	$(VPY) -m ruff format --check .
	$(VPY) -m ruff check .
	$(VPY) -m mypy --strict
	env -u PYRIGHT_PYTHON_FORCE_VERSION -u PYRIGHT_PYTHON_PYLANCE_VERSION PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VPY) -m pyright
	.venv/bin/lint-imports --no-cache

fuzz: .venv/.installed-test
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 .venv/bin/ruda fuzz --minutes $(MINUTES) --seed $(SEED)

gpu-check:
	PYTHONPATH='.:backends$(if $(PYTHONPATH),:$(PYTHONPATH))' "$(PYTHON)" benchmarks/gpu_check.py

clean:
	rm -rf demo parity.png build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find ruda backends tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
