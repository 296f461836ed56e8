"""8-bit states whose blocks a layout cuts: saved as they are, read by the same cut, refused by another."""

from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.checkpoint import Checkpoint, Facts
from meshwright.checkpoint.shares import seal, write_share
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.parallel import Piece
from meshwright.train import build_optimizer, states_of
from meshwright.train.optimizer import restore_states, saved_states

JOB = Job.model_validate({"precision": {"optimizer_states": "int8"}})


def shard(place: int, cuts: int) -> tuple[dict[str, nn.Parameter], dict[str, Piece]]:
    whole = torch.randn(6, 24, generator=torch.Generator().manual_seed(0))
    columns = torch.arange(24).chunk(cuts)[place]
    master = nn.Parameter(whole[:, columns].clone())
    master.grad = master.detach() * 0.1
    return {"w": master}, {"w": Piece(torch.arange(6), None if cuts == 1 else columns, (6, 24), 1)}


def save(path: Path, cuts: int) -> list[dict[str, torch.Tensor]]:
    path.mkdir()
    states = []
    for place in range(cuts):
        masters, pieces = shard(place, cuts)
        optimizer = build_optimizer(masters, JOB, pieces)
        optimizer.step()
        states.append(states_of(optimizer, masters)["w"])
        write_share(path, saved_states(optimizer, masters, pieces, ["w"]), place, cuts)
    seal(path, Facts(step=1, tokens=1, position=1), 0, cuts, {})
    return states


def restored(path: Path, place: int, cuts: int) -> dict[str, torch.Tensor]:
    masters, pieces = shard(place, cuts)
    optimizer = build_optimizer(masters, JOB, pieces)
    restore_states(optimizer, masters, pieces, Checkpoint.open(path))
    return states_of(optimizer, masters)["w"]


@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_the_same_cut_gets_its_bits_back(tmp_path: Path, cuts: int) -> None:
    path = tmp_path / "step-00000001"
    for place, state in enumerate(save(path, cuts)):
        again = restored(path, place, cuts)
        assert again.keys() == state.keys() == {"step", "first.codes", "first.scales", "root.codes", "root.scales"}
        assert all(torch.equal(again[key], state[key]) for key in state)


def test_blocks_that_are_not_cut_fit_every_layout_and_cut_ones_only_their_own(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    wholes = save(path, 1)[0]
    halves = [restored(path, place, 2) for place in range(2)]  # 12 columns are 4 blocks of 3
    assert torch.equal(torch.cat([half["root.scales"] for half in halves], 1), wholes["root.scales"])
    with pytest.raises(UserError, match=r"cut by layout\.tp = 1, which do not fit those of layout\.tp = 3"):
        restored(path, 0, 3)  # 8 columns are not
    third = tmp_path / "thirds" / "step-00000001"
    third.parent.mkdir()
    save(third, 3)
    with pytest.raises(UserError, match=r"cut by layout\.tp = 3, which do not fit those of layout\.tp = 1"):
        restored(third, 0, 1)
