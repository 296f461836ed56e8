"""8-bit states: saved by any cut of the columns and read by any other, bit for bit; older files are read too."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright.checkpoint import Checkpoint, Facts, Part
from meshwright.checkpoint.shares import seal, write_share
from meshwright.job import Job
from meshwright.parallel import ShardIndex
from meshwright.train import build_optimizer, states_of
from meshwright.train.optimizer import restore_states, saved_states
from meshwright.train.optimizer.states import Blocks, encode

MODEL = {"vocab_size": 40, "width": 24, "layers": 1, "heads": 6, "kv_heads": 6, "ffn_width": 48}
JOB = Job.model_validate({"precision": {"optimizer_states": "int8"}, "model": MODEL})
NAME = "layers.0.attention.o.weight"
KEYS = {"step", "first.codes", "first.scales", "root.codes", "root.scales"}


def shard(place: int, cuts: int) -> tuple[dict[str, nn.Parameter], dict[str, ShardIndex]]:
    whole = torch.randn(6, 24, generator=torch.Generator().manual_seed(0))
    columns = torch.arange(24).chunk(cuts)[place]
    master = nn.Parameter(whole[:, columns].clone())
    master.grad = master.detach() * 0.1
    return {NAME: master}, {NAME: ShardIndex(torch.arange(6), None if cuts == 1 else columns, (6, 24), 1)}


def save(path: Path, cuts: int) -> list[dict[str, Tensor]]:
    path.mkdir()
    states = []
    for place in range(cuts):
        masters, shards = shard(place, cuts)
        optimizer = build_optimizer(masters, JOB, shards)
        optimizer.step()
        states.append(states_of(optimizer, masters)[NAME])
        write_share(path, saved_states(optimizer, masters, shards), place, cuts)
    seal(path, Facts(step=1, tokens=1, position=1), 0, cuts, {})
    return states


def restored(path: Path, place: int, cuts: int) -> dict[str, Tensor]:
    masters, shards = shard(place, cuts)
    optimizer = build_optimizer(masters, JOB, shards)
    restore_states(optimizer, masters, shards, Checkpoint.open(path))
    return states_of(optimizer, masters)[NAME]


def joined(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([state[key] for state in states], 1) for key in KEYS - {"step"}}


@pytest.mark.parametrize("cuts", [1, 2, 3, 6])
def test_every_cut_keeps_the_same_and_reads_every_other(tmp_path: Path, cuts: int) -> None:
    one, path = tmp_path / "one", tmp_path / "step-00000001"
    [whole] = save(one, 1)
    assert whole.keys() == KEYS
    parts = joined(save(path, cuts))
    assert all(torch.equal(parts[key], whole[key]) for key in parts)
    for others in (1, 2, 3, 6):
        again = [restored(path, place, others) for place in range(others)]
        assert all(state["step"] == 1 and state.keys() == KEYS for state in again)
        assert all(torch.equal(values, whole[key]) for key, values in joined(again).items())


# Blocks as they once were: of 3 columns from the row's beginning, or from that of each of three or four ranks' columns.
@pytest.mark.parametrize(("tag", "unit"), [("", 24), ("@3", 8), ("@4", 6)])
@pytest.mark.parametrize("cuts", [1, 3])
def test_states_with_the_blocks_of_older_files_are_rounded_anew(tmp_path: Path, tag: str, unit: int, cuts: int) -> None:
    values = torch.randn(6, 24, generator=torch.Generator().manual_seed(1)).abs()
    old, full = Blocks.within(unit, 3), f"optimizer/{NAME}"
    codes, scales = torch.empty(6, 24, dtype=torch.uint8), torch.empty(6, old.count(24))
    encode(values, old, 0.5, codes, scales)
    path = tmp_path / "step-00000001"
    path.mkdir()
    write_share(path, [Part(f"{full}/root.codes", (6, 24), (0, 0), codes),
                       Part(f"{full}/root.scales{tag}", tuple(scales.shape), (0, 0), scales)], 0, 1)  # fmt: skip
    seal(path, Facts(step=1, tokens=1, position=1), 0, 1, {})
    states = [restored(path, place, cuts) for place in range(cuts)]
    new = Blocks.of(24, 6)
    assert old != new and all(state.keys() == {"root.codes", "root.scales"} for state in states)
    read = torch.cat([state["root.codes"] * new.spread(state["root.scales"]) for state in states], 1)
    was = codes * old.spread(scales)
    assert torch.all((read - was).abs() <= new.spread(new.maxima(was)) / 255 * 0.5001)
