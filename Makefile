# Two commands from a bare checkout: make demo, make test. Both set up .venv first.
.PHONY: setup demo test lint types unit wheel clean

setup:
	@scripts/setup

demo: setup
	.venv/bin/meshwright train demo

test: setup lint types unit wheel

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: setup
	.venv/bin/mypy

unit: setup
	@scripts/slurm-packages
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -rs --no-fold-skipped -m "not alone" -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m alone

wheel: setup
	scripts/check-wheel

clean:
	rm -rf .venv build dist *.egg-info
