"""Muon: what it orthogonalises, in which pieces, and what it leaves to AdamW."""

from typing import Any

import pytest
import torch
from optimizer_cases import PROJECTIONS, give_gradients, make_job, random_masters, side_by_side
from torch import Tensor

from meshwright.train import build_optimizer, states_of
from meshwright.train.optimizer import elementwise, muon, set_learning_rate
from meshwright.train.optimizer.muon import COEFFICIENTS, ROUNDS, orthogonalise


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_orthogonalising_applies_the_polynomial_to_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(ROUNDS):
        s = sum(c * s ** (2 * i + 1) for i, c in enumerate(COEFFICIENTS))
    result = orthogonalise(matrix)
    assert torch.allclose(result, u @ torch.diag(s) @ vh, atol=1e-12)
    assert float(s.min()) > 0.6 and float(s.max()) < 1.3
    assert torch.allclose(orthogonalise(1e3 * matrix), result)


def test_matrices_of_one_shape_are_orthogonalised_together_as_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, packed = [(12, 20), (20, 12), (12, 20), (30, 8), (12, 20), (30, 8)], [1, 1, 1, 5, 1, 1]
    generator = torch.Generator().manual_seed(5)
    matrices = [10.0**i * torch.randn(size, dtype=torch.float64, generator=generator) for i, size in enumerate(sizes)]
    apart = [orthogonalise(matrix, count) for matrix, count in zip(matrices, packed, strict=True)]
    calls: list[int] = []

    def counted(matrix: Tensor, matrices: int = 1) -> Tensor:
        calls.append(matrices)
        return orthogonalise(matrix, matrices)

    monkeypatch.setattr(muon, "orthogonalise", counted)
    together = muon.orthogonalise_all(matrices, packed, torch.float64, torch.float64)
    assert calls == [3, 1, 5, 1]
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_muon_updates_many_matrices_as_one_at_a_time(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(entries: int) -> dict[str, Tensor]:
        monkeypatch.setattr(elementwise, "ENTRIES_AT_ONCE", entries)
        monkeypatch.setattr(muon, "AT_ONCE", entries)
        shapes: dict[str, Any] = {f"layers.{i}.ffn.{n}.weight": (16, 8) for i in range(5) for n in ("up", "gate")}
        shapes |= {f"layers.{i}.ffn.down.weight": (8, 16) for i in range(5)}
        masters = random_masters(**shapes)
        optimizer = build_optimizer(masters, make_job("muon", form, weight_decay=0.1))
        for step in range(3):
            give_gradients(masters, step)
            optimizer.step()
        return {name: master.detach() for name, master in masters.items()}

    alone = trained(16 * 8)
    for entries in (16 * 8 * 4, 2**24):
        for name, master in trained(entries).items():
            torch.testing.assert_close(master, alone[name], rtol=0, atol=1e-13)


def test_muon_is_torch_s_but_for_its_bf16() -> None:
    job = make_job("muon", weight_decay=0.1, momentum=0.95)
    masters = random_masters(torch.float32, ffn_up=(24, 16), ffn_down=(16, 24))
    theirs = lambda masters: torch.optim.Muon(  # noqa: E731
        masters.values(), lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    assert side_by_side(masters, lambda m: build_optimizer(m, job), theirs, steps=3) < 5e-3


def test_muon_takes_each_projection_apart_and_leaves_the_rest_to_adamw() -> None:
    job = make_job("muon", weight_decay=0.0)
    shapes: dict[str, Any] = {f"layers.0.attention.{n}.weight": (16, 16) for n in "qkvo"}
    shapes |= {f"layers.0.ffn.{n}.weight": (16, 16) for n in ("gate", "up", "down")}
    shapes |= {"embed.weight": (40, 16), "head.weight": (40, 16), "final_norm.weight": (16,)}
    masters = random_masters(**shapes)
    before = {name: master.detach().clone() for name, master in masters.items()}
    give_gradients(masters, 0)
    optimizer = build_optimizer(masters, job)
    optimizer.step()
    kept = states_of(optimizer, masters)
    for name, master in masters.items():
        change = (before[name] - master.detach()) / 1e-2
        if name.split(".")[-2] in PROJECTIONS:
            assert set(kept[name]) == {"step", "momentum"}
            values = torch.linalg.svdvals(change / (0.2 * 16**0.5))
            assert float(values.min()) > 0.3 and float(values.max()) < 1.3  # of this projection by itself
            assert float(change.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)
        else:
            assert set(kept[name]) == {"step", "exp_avg", "exp_avg_sq"}
            assert change.abs().allclose(torch.ones((), dtype=torch.float64), atol=1e-3)


@pytest.mark.parametrize("form", ["fp32", "int8"])
@pytest.mark.parametrize("schedule", [1.0, 0.25])
def test_beside_muon_adamw_may_have_its_own_rate(form: str, schedule: float) -> None:
    masters = random_masters(torch.float32, **{"embed.weight": (40, 16), "layers.0.ffn.up.weight": (16, 16)})
    before = {name: master.detach().clone() for name, master in masters.items()}
    optimizer = build_optimizer(masters, make_job("muon", form, lr=1e-2, adamw_lr=4e-2, weight_decay=0.0))
    set_learning_rate(optimizer, 1e-2 * schedule)
    give_gradients(masters, 0)
    optimizer.step()
    table, projection = ((before[name] - master.detach()).square().mean().sqrt() for name, master in masters.items())
    assert float(table) == pytest.approx(4e-2 * schedule, rel=0.02)
    assert float(projection) == pytest.approx(0.2 * 1e-2 * schedule, rel=0.2)
