"""Tensors saved in any boxes are read in any other boxes; shares that do not make up the whole are no checkpoint."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from meshwright.checkpoint import Checkpoint, Facts, Part
from meshwright.checkpoint.records import PieceRecord, TensorRecord, is_whole
from meshwright.checkpoint.shares import Incomplete, seal, write_share

WHOLE = torch.arange(7 * 12 * 2, dtype=torch.float32).view(7, 12, 2)
CUTS: dict[str, list[tuple[slice, ...]]] = {
    "rows": [(slice(0, 3), slice(0, 12)), (slice(3, 7), slice(0, 12))],
    "columns": [(slice(0, 7), slice(0, 5)), (slice(0, 7), slice(5, 6)), (slice(0, 7), slice(6, 12))],
    "both": [(slice(r, r + 4 if r == 0 else 7), slice(c, c + 6)) for r in (0, 4) for c in (0, 6)],
    "whole": [(slice(0, 7), slice(0, 12))],
}


def save(folder: Path, name: str, values: torch.Tensor, boxes: list[tuple[slice, ...]]) -> None:
    folder.mkdir()
    for rank, box in enumerate(boxes):
        starts = (*(span.start for span in box), *[0] * (values.dim() - len(box)))
        part = Part(f"model/{name}", tuple(values.shape), starts, values[box])
        others = [Part(f"rng/{rank}", (3,), (0,), torch.full((3,), rank, dtype=torch.uint8))]
        write_share(folder, [part, *others], rank, len(boxes))
    seal(folder, Facts(step=5, tokens=1, position=1), 0, len(boxes), {})


@pytest.mark.parametrize("saved", CUTS)
@pytest.mark.parametrize("read", CUTS)
def test_any_boxes_read_any_boxes(tmp_path: Path, saved: str, read: str) -> None:
    save(tmp_path / "step-00000005", "w", WHOLE, CUTS[saved])
    with Checkpoint.open(tmp_path / "step-00000005") as checkpoint:
        checkpoint.verify()
        assert torch.equal(checkpoint.whole("model/w"), WHOLE)
        for rows, columns in CUTS[read]:
            values = checkpoint.read("model/w", (rows, columns, slice(0, 2)))
            assert torch.equal(values, WHOLE[rows, columns])
            assert values.is_contiguous()  # fused updates on the CPU take a state for one stretch of memory


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.float16])
def test_every_format_keeps_its_bits_and_other_programs_can_read_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "step-00000005"
    values = (torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    save(path, "w", values, [(slice(0, 6), slice(0, 5))])
    assert torch.equal(Checkpoint.open(path).whole("model/w"), values)
    assert torch.equal(load_file(path / "model.safetensors")["w"], values)


def test_scalars_and_large_shares_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.checkpoint.shares.FILE_BYTES", 100)
    path = tmp_path / "step-00000001"
    path.mkdir()
    parts = [Part(f"optimizer/{n}/step", (), (), torch.tensor(n)) for n in range(20)]
    parts += [Part(f"optimizer/{n}/first", (9,), (0,), torch.full((9,), float(n))) for n in range(5)]
    write_share(path, parts, 0, 1)
    seal(path, Facts(step=1, tokens=1, position=1), 0, 1, {})
    with Checkpoint.open(path) as checkpoint:
        assert all(int(checkpoint.whole(f"optimizer/{n}/step")) == n for n in range(20))
        assert all(checkpoint.whole(f"optimizer/{n}/first").unique().item() == n for n in range(5))
    assert len(list(path.glob("optimizer-*.safetensors"))) > 3


def test_a_missing_or_doubled_share_is_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    half = Part("model/w", (7, 12, 2), (0, 0, 0), WHOLE[:3])
    write_share(folder, [half], 0, 2)
    with pytest.raises(Incomplete, match="all ranks must see the same"):
        seal(folder, Facts(step=1, tokens=1, position=1), 0, 2, {})
    write_share(folder, [half], 1, 2)
    with pytest.raises(Incomplete, match="model/w has 168 entries, but 144 were written"):
        seal(folder, Facts(step=1, tokens=1, position=1), 0, 2, {})
    assert not (folder / "manifest.json").exists()


def test_a_tensor_that_no_rank_wrote_is_no_checkpoint(tmp_path: Path) -> None:
    part = Part("model/w", (7, 12, 2), (0, 0, 0), WHOLE)
    write_share(tmp_path, [part], 0, 2, held=["model/w", "optimizer/w/first"])
    write_share(tmp_path, [], 1, 2, held=["model/w", "optimizer/w/first"])
    with pytest.raises(Incomplete, match="optimizer/w/first was written by no rank"):
        seal(tmp_path, Facts(step=1, tokens=1, position=1), 0, 2, {})


def test_boxes_written_twice_do_not_make_up_for_one_that_is_missing(tmp_path: Path) -> None:
    for rank, first in enumerate((0, 0, 6)):
        part = Part("model/w", (7, 12, 2), (0, first, 0), WHOLE[:, first : first + 4])
        write_share(tmp_path, [part], rank, 3)
    with pytest.raises(Incomplete, match="model/w has 168 entries, but 168 were written, some of them twice"):
        seal(tmp_path, Facts(step=1, tokens=1, position=1), 0, 3, {})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_a_tensor_is_whole_when_every_entry_lies_in_one_box(
    rows: list[int], columns: list[int], moved: int, to: int
) -> None:
    """Boxes of a grid, one of which is put where another is."""
    starts = [[sum(sizes[:n]) for n in range(len(sizes))] for sizes in (rows, columns)]
    boxes = [
        ((r, c), (h, w)) for r, h in zip(starts[0], rows, strict=True) for c, w in zip(starts[1], columns, strict=True)
    ]
    boxes[moved % len(boxes)] = (boxes[to % len(boxes)][0], boxes[moved % len(boxes)][1])
    counted = torch.zeros(sum(rows), sum(columns))
    inside = all(
        at + size <= whole for at_, size_ in boxes for at, size, whole in zip(at_, size_, counted.shape, strict=True)
    )
    for (r, c), (h, w) in boxes:
        counted[r : r + h, c : c + w] += 1
    pieces = tuple(PieceRecord(file="model.safetensors", offsets=at, shape=size) for at, size in boxes)
    record = TensorRecord(shape=tuple(counted.shape), dtype="F32", pieces=pieces)
    assert is_whole(record) == (inside and bool((counted == 1).all()))
