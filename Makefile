# Every target builds .venv when pyproject.toml or constraints.txt changed since it was last built, and only then.
# PYTHON picks the interpreter that it is made with, JOBS the test processes, DEMO_ARGS what the demo is passed,
# BASE the commit that the host times of the ops are compared with, ONLY a regular expression of kernels or counted
# calls, WRITE=1 that the committed counts are rewritten.

PYTHON ?= python3
JOBS ?= auto
DEMO_ARGS ?=
BASE ?=
ONLY ?=
WRITE ?=

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal

# Other versions of Triton that kernels must run on: each a venv that overlays .venv with tests/triton-VERSION.txt.
TRITONS := 3.6.0 3.9.0

.PHONY: help demo test test-full test-kernels lint bench kernels traffic test-triton
.SECONDARY: $(TRITONS:%=.venv-triton-%/.installed)
.DELETE_ON_ERROR:

help:
	@echo "make demo         decode held-out text with the tiny pair and compare the policies"
	@echo "make test         the tests, without the slow ones"
	@echo "make test-full    all tests"
	@echo "make test-kernels every configuration of every kernel compiled for every target, against docs/kernels.md"
	@echo "make lint         ruff and mypy"
	@echo "make bench        the benchmarks: host overhead of the ops, and their kernels where there is a GPU"
	@echo "make bench BASE=HEAD~  host time per call of every op, in turn with another commit's"
	@echo "make kernels      compile every kernel with no GPU; its registers, memory and instructions as a table"
	@echo "make traffic      count the bytes that the ops ask for, beside lower bounds and the committed counts"
	@echo "make traffic WRITE=1   the same, and rewrite the committed counts; ONLY=REGEX limits it, and make kernels"
	@echo "make test-triton  the kernels' tests on Triton $(TRITONS)"

demo: $(STAMP)
	$(PY) -m dspark ablate $(DEMO_ARGS)

test: $(STAMP)
	$(PYTEST) -m "not slow"

test-full: $(STAMP)
	HYPOTHESIS_PROFILE=full $(PYTEST)

test-kernels: $(STAMP)
	$(PYTEST) tests/gates/test_codegen.py

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(STAMP)
ifeq ($(BASE),)
	OMP_NUM_THREADS=1 $(PY) -m pytest --benchmark -q
	$(PY) -m benchmarks.host
else
	$(PY) -m benchmarks.host --against $(BASE)
endif

kernels: $(STAMP)
	$(PY) -m tests.gates.kernel_table $(if $(ONLY),'$(ONLY)')

traffic: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m tests.gates.traffic_table $(if $(ONLY),'$(ONLY)') $(if $(WRITE),--write)

test-triton: $(TRITONS:%=test-triton-%)

test-triton-%: .venv-triton-%/.installed
	OMP_NUM_THREADS=1 .venv-triton-$*/bin/python -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal tests \
	  -m "triton and not slow"

SITE_PACKAGES := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.venv-triton-%/.installed: tests/triton-%.txt $(STAMP)
	rm -rf $(@D)
	$(PY) -m venv --without-pip $(@D)
	$(PY) $(SITE_PACKAGES) > "$$($(@D)/bin/python $(SITE_PACKAGES))/below.pth"
	$(PY) -m pip --python $(@D)/bin/python install -q --no-deps --ignore-installed -r $<
	@touch $@

# A Python without ensurepip (Debian without python3-venv) gets a venv that its own pip fills.
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "dspark needs Python 3.10 or newer; '$(PYTHON)' says: $$($(PYTHON) --version 2>&1)." \
	    "Name another one, as in: make PYTHON=python3.12" >&2; exit 1; }
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	else $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(PY) install -q pip; \
	fi || { rm -rf $(VENV); echo "Could not make $(VENV): '$(PYTHON)' has neither ensurepip nor pip" \
	    "(on Debian: apt install python3-venv)." >&2; exit 1; }

$(STAMP): pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install -q -c constraints.txt hatchling
	$(PY) -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
