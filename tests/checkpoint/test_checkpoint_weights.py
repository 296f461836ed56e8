"""Weights go to disk whole or not at all, and come back bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshwright.checkpoint import load_weights, newest_weights, save_weights
from meshwright.errors import UserError
from meshwright.job import Model, model_preset
from meshwright.model import Decoder, initialise


def tiny(seed: int, **changes: object) -> Decoder:
    model = Decoder(Model(**{**model_preset("tiny-llama"), **changes}))
    initialise(model, seed)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_is_bit_equal_and_a_tied_table_is_saved_once(tmp_path: Path, tied: bool) -> None:
    saved, loaded = tiny(1, tied=tied), tiny(2, tied=tied)
    path = save_weights(tmp_path, 7, dict(saved.named_parameters()))
    assert load_weights(newest_weights(tmp_path), loaded) == 7
    assert all(torch.equal(p, q) for p, q in zip(saved.parameters(), loaded.parameters(), strict=True))
    elements = sum(p.numel() for p in saved.parameters())
    assert 4 * elements <= path.stat().st_size < 4 * elements + 10_000


def test_the_newest_step_is_taken(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save_weights(tmp_path, step, dict(tiny(step).named_parameters()))
    assert load_weights(newest_weights(tmp_path), tiny(0)) == 100


def test_what_does_not_fit_or_is_torn_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no weights"):
        newest_weights(tmp_path)
    path = save_weights(tmp_path, 1, dict(tiny(1).named_parameters()))
    with pytest.raises(UserError, match="on one side only"):
        load_weights(path, tiny(1, layers=1))
    with pytest.raises(UserError, match="has shape"):
        load_weights(path, tiny(1, ffn_width=96))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read"):
        load_weights(path, tiny(1))


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path, metadata: object) -> None:
        save_file({"half": torch.zeros(3)}, path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("meshwright.checkpoint.weights.save_file", full)
    with pytest.raises(UserError, match=r"run\.folder .* the disk is full"):
        save_weights(tmp_path, 1, dict(tiny(1).named_parameters()))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
