# Two commands from a bare checkout: make demo, make test. Both set up .venv first.
.PHONY: setup demo test lint types unit wheel nightly site refresh-docs clean
SEED ?= $(shell date +%Y%m%d)

setup:
	@scripts/setup

demo: setup
	.venv/bin/meshwright train demo

test: setup
	$(MAKE) -j2 lint types wheel
	$(MAKE) unit

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: setup
	.venv/bin/mypy

unit: setup
	@scripts/slurm-packages
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -rs --no-fold-skipped -m "not alone" -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m alone $$(grep -rl --include='*.py' 'mark\.alone' tests)

# What takes hours: every layout of the matrix, jobs that were never drawn before (SEED=20260131 repeats a night's), and
# bugs planted on purpose.
nightly: setup
	status=0; \
	OMP_NUM_THREADS=1 .venv/bin/meshwright verify --matrix full || status=1; \
	OMP_NUM_THREADS=1 .venv/bin/meshwright verify --random 500 --seed $(SEED) || status=1; \
	.venv/bin/python scripts/planted-bugs || status=1; \
	exit $$status

wheel: setup
	scripts/check-wheel

site: setup
	.venv/bin/python scripts/build_site.py

refresh-docs: setup
	REFRESH=1 OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/docs

clean:
	rm -rf .venv build dist *.egg-info
