"""How a rank's process ends, and what is refused as its place. What follows from it: launch/test_launch_ranks.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.ranks import find_place

ROOT = Path(__file__).parents[1]
# Gloo's threads let go of tensors during all of the exit: of 3,000 sums nobody waits for any.
BUSY_AT_EXIT = """
import atexit, os, sys
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
sums = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(3000)]
sums[0].wait()
del sums
atexit.register(print, "atexit ran")
sys.argv = ["meshwright", "--no-such-option"]
from meshwright.__main__ import run
run()
"""


def test_a_rank_whose_work_is_done_ends_with_its_code(tmp_path: Path) -> None:
    """With Python's own exit, one of the two was aborted in each of six tries."""
    variables = {**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", BUSY_AT_EXIT, str(tmp_path / "store")],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [(rank.returncode, out) for rank in ranks for out, _ in [rank.communicate(timeout=120)]]
    assert ended == [(2, "atexit ran\n")] * 2


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_place_that_is_no_number_is_refused(name: str) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", name: "x"}
    with pytest.raises(UserError, match=f"^{name} = x is not a number; "):
        find_place(variables)
