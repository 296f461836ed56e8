"""The weights of a checkpoint come back into a model bit for bit, or are refused by name."""

from pathlib import Path

import pytest
import torch
from checkpoint_states import save_model, tiny

from meshwright.checkpoint import load_weights, newest
from meshwright.errors import UserError


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_is_bit_equal_and_a_tied_table_is_saved_once(tmp_path: Path, tied: bool) -> None:
    saved, loaded = tiny(1, tied=tied), tiny(2, tied=tied)
    path = save_model(tmp_path, 7, saved)
    assert load_weights(newest(tmp_path), loaded) == 7
    assert all(torch.equal(p, q) for p, q in zip(saved.parameters(), loaded.parameters(), strict=True))
    elements = sum(p.numel() for p in saved.parameters())
    assert 4 * elements <= (path / "model.safetensors").stat().st_size < 4 * elements + 10_000


def test_the_newest_step_is_taken(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save_model(tmp_path, step, tiny(step))
    assert load_weights(newest(tmp_path), tiny(0)) == 100


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        newest(tmp_path)
    save_model(tmp_path, 1, tiny(1))
    with pytest.raises(UserError, match="only one of them has"):
        load_weights(newest(tmp_path), tiny(1, layers=1))
    with pytest.raises(UserError, match="has shape"):
        load_weights(newest(tmp_path), tiny(1, ffn_width=96))
