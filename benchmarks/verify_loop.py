"""How often a rank of `verify` dies: small layouts of the matrix, one after the other, until so many have run.

python benchmarks/verify_loop.py --runs 300        exit code 1 if a rank died; its stack is printed

To have a core dump of a death, `ulimit -c unlimited` first.
"""

import argparse
import sys
from itertools import cycle

import torch

from meshwright.errors import UserError
from meshwright.layout import ranks_of
from meshwright.verify import RankError
from meshwright.verify.check import check
from meshwright.verify.matrix import load_matrix

MOST_RANKS = 4


def main() -> int:
    """Run, print what came out, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    runs = parser.parse_args().runs
    lines = [
        line
        for line in load_matrix("quick")
        if 1 < ranks_of(line.job.layout) <= MOST_RANKS and not line.through_train and not line.job.run.compiles
    ]
    outcomes = {"equal": 0, "different": 0, "refused": 0, "failed": 0, "died": 0}
    for line, number in zip(cycle(lines), range(runs), strict=False):
        try:
            verdict = check(line.job, line.dtype or "float64", collectives=True)
            outcomes["equal" if verdict.ok else "different"] += 1
        except UserError:  # what this release of torch cannot do
            outcomes["refused"] += 1
        except RankError as error:
            outcomes["died" if "died without reporting" in str(error) else "failed"] += 1
            print(f"run {number}, {line.name}: {error}", flush=True)
    print(f"torch {torch.__version__}: {outcomes} in {runs} runs of {len(lines)} layouts")
    return 1 if outcomes["died"] else 0


if __name__ == "__main__":
    sys.exit(main())
