"""How a rank's process ends, and what is refused as its place. What follows from it: launch/test_launch_ranks.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.ranks import find_place, require_master

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


@pytest.mark.thorough
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


VARIABLES = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["x", "-1", "", "1.5", "9" * 5000])
def test_a_place_that_is_no_number_is_refused(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"^{name} = {value[:40]} is not a number from 0 on; unset it"):
        find_place({**VARIABLES, name: value})


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"RANK": "2"}, "RANK = 2 is not below WORLD_SIZE = 2;"),
        ({"WORLD_SIZE": "0"}, "RANK = 0 is not below WORLD_SIZE = 0;"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK = 1 is not below WORLD_SIZE = 1;"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK = 2 is not below LOCAL_WORLD_SIZE = 2;"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": None}, "LOCAL_RANK = 2 is not below WORLD_SIZE = 2;"),
        ({"RANK": None}, "WORLD_SIZE is set but RANK is not;"),
        ({"WORLD_SIZE": None}, "RANK is set but WORLD_SIZE is not;"),
        (dict.fromkeys(("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")), "RANK is set but WORLD_SIZE is not;"),
    ],
)
def test_a_contradictory_place_is_refused(changes: dict[str, str | None], refusal: str) -> None:
    variables = {name: value for name, value in {**VARIABLES, **changes}.items() if value is not None}
    with pytest.raises(UserError, match=f"^{refusal}"):
        find_place(variables)


@pytest.mark.parametrize("port", ["0", "99999", "-1", "http", "", None])
def test_an_impossible_rendezvous_is_refused(port: str | None) -> None:
    variables = {"MASTER_ADDR": "host"} | ({} if port is None else {"MASTER_PORT": port})
    with pytest.raises(UserError, match="MASTER_PORT"):
        require_master(variables)
    require_master({"MASTER_ADDR": "host", "MASTER_PORT": "65535"})
