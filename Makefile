# Two commands from a bare checkout: make demo, make test. Both set up .venv first, the demo without what only tests need.
# `make test TORCH=2.15.0` tests with another torch release, in an environment of its own.
.PHONY: setup demo test test-all lint types unit thorough wheel nightly site refresh-docs clean
export TORCH
VENV := .venv$(addprefix -torch-,$(TORCH))
SEED ?= $(shell date +%Y%m%d)
# More than cores: many tests wait, for ranks, servers and Slurm. More than six would only use more memory.
WORKERS ?= $(shell n=$$(( $$(nproc) * 3 / 2 )); echo $$(( n < 2 ? 2 : n > 6 ? 6 : n )))
# Where this is set, every process that a test starts would compile the package's source again.
unexport PYTHONDONTWRITEBYTECODE

setup:
	@scripts/setup --dev

demo:
	@scripts/setup
	$(VENV)/bin/meshwright train demo

test: setup
	$(MAKE) -j2 lint types wheel
	$(MAKE) unit

test-all: test
	$(MAKE) thorough

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup
	$(VENV)/bin/mypy

PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -rs --no-fold-skipped -n $(WORKERS) --dist loadfile --no-loadscope-reorder

unit: setup
	$(PYTEST) -m "not thorough"

# What `make test` leaves out: every quick layout, drawn jobs, Slurm, Ray, a browser, pages, faults, and a sample of the bugs
# that the nightly run plants.
thorough: setup
	@scripts/slurm-packages
	$(PYTEST) -m thorough
	$(VENV)/bin/python scripts/planted-bugs --sample 40

# What takes hours: every layout of the matrix, jobs that were never drawn before (SEED=20260131 repeats a night's), and
# bugs planted on purpose.
nightly: setup
	status=0; \
	OMP_NUM_THREADS=1 $(VENV)/bin/meshwright verify --matrix full || status=1; \
	OMP_NUM_THREADS=1 $(VENV)/bin/meshwright verify --random 500 --seed $(SEED) || status=1; \
	$(VENV)/bin/python scripts/planted-bugs || status=1; \
	exit $$status

wheel: setup
	scripts/check-wheel

site: setup
	$(VENV)/bin/python scripts/build_site.py

refresh-docs: setup
	REFRESH=1 OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest tests/docs

clean:
	rm -rf .venv .venv-torch-* build dist *.egg-info
