"""Every optimizer does what its paper says, keeps what it says it keeps, and sees whole matrices through shards."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from optimizer_cases import PROJECTIONS, give_gradients, make_job, random_masters, side_by_side
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.job.experts import Experts
from meshwright.layout import ranks_of, require_layout
from meshwright.parallel import ShardIndex
from meshwright.train import build_optimizer, states_of
from meshwright.train.optimizer import elementwise, holders, set_learning_rate, states
from meshwright.verify import check
from meshwright.verify.check import reference
from meshwright.verify.shrink import shrink

NAMES = ("adamw", "sgd", "lion", "adafactor", "muon")


def test_sgd_is_torch_s_with_decay_apart_from_the_gradient() -> None:
    job = make_job("sgd", momentum=0.9, weight_decay=0.0)
    theirs = lambda masters: torch.optim.SGD(masters.values(), lr=1e-2, momentum=0.9)  # noqa: E731
    masters = random_masters(ffn_up=(6, 4), ffn_norm=(4,))
    assert side_by_side(masters, lambda m: build_optimizer(m, job), theirs) < 1e-14
    plain = build_optimizer(masters, make_job("sgd", momentum=0.0))
    give_gradients(masters, 0)
    plain.step()
    assert all(set(kept) == {"step"} for kept in states_of(plain, masters).values())


def test_lion_is_its_paper_s_two_lines() -> None:
    job = make_job("lion", betas=(0.9, 0.99), weight_decay=0.1)
    masters = random_masters(ffn_up=(6, 4))
    [master] = masters.values()
    optimizer = build_optimizer(masters, job)
    expected, momentum = master.detach().clone(), torch.zeros(6, 4, dtype=torch.float64)
    for step in range(4):
        give_gradients(masters, step)
        assert master.grad is not None
        expected -= 1e-2 * ((0.9 * momentum + 0.1 * master.grad).sign() + 0.1 * expected)
        momentum = 0.99 * momentum + 0.01 * master.grad
        optimizer.step()
    assert torch.allclose(master, expected, rtol=0, atol=1e-14)


def test_adafactor_is_torch_s() -> None:
    job = make_job("adafactor", eps=1e-16, weight_decay=0.1)

    def theirs(masters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        matrices, vectors = [p for p in masters.values() if p.dim() > 1], [p for p in masters.values() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.Adafactor(groups, lr=1e-2, eps=(1e-16, 1e-3))

    masters = random_masters(ffn_up=(9, 5), ffn_down=(5, 9), ffn_norm=(5,))
    assert side_by_side(masters, lambda m: build_optimizer(m, job), theirs) < 1e-12


@pytest.mark.parametrize("entries", [2**24, 7 * 5, 3 * 5], ids=["whole", "several at once", "in parts"])
def test_adafactor_treats_every_expert_as_a_matrix_of_its_own(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed experts move as the same experts in parameters of their own do, gates apart from ups, biases too."""
    monkeypatch.setattr(elementwise, "ENTRIES_AT_ONCE", entries)
    job = make_job("adafactor", weight_decay=0.1)
    shape = job.model.model_copy(update={"experts": Experts(count=3, top_k=1, ffn_width=3)})
    sizes = {"gate_up.weight": (18, 5), "gate_up.bias": (18,), "down.weight": (15, 3)}
    shapes: dict[str, Any] = {f"layers.0.moe.experts.{name}": size for name, size in sizes.items()}
    masters = random_masters(**shapes)
    parts = dict(zip(masters, (6, 6, 3), strict=True))

    def differ(tensor: Tensor, count: int) -> None:
        """Give every expert a scale of its own, which the mean of all would not fit."""
        tensor.view(count, -1).mul_(10.0 ** torch.arange(count, dtype=tensor.dtype).unsqueeze(1))

    apart = {}
    for name, master in masters.items():
        differ(master.data, parts[name])
        apart |= {f"{name}.{i}": nn.Parameter(one.clone()) for i, one in enumerate(master.data.chunk(parts[name]))}
    ours, theirs = build_optimizer(masters, job.model_copy(update={"model": shape})), build_optimizer(apart, job)
    for step in range(4):
        give_gradients(masters, step)
        for name, master in masters.items():
            assert master.grad is not None
            differ(master.grad, parts[name])
            for i, one in enumerate(master.grad.chunk(parts[name])):
                apart[f"{name}.{i}"].grad = one.clone()
        ours.step()
        theirs.step()
    for name, master in masters.items():
        expected = torch.cat([apart[f"{name}.{i}"].data for i in range(parts[name])])
        torch.testing.assert_close(master.data, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_only_matrices_decay_and_apart_from_the_gradient(name: str, form: str) -> None:
    if name == "adafactor" and form != "fp32":
        return
    masters = random_masters(torch.float32, ffn_up=(6, 8), ffn_norm=(8,), **{"embed.weight": (40, 8)})
    before = {key: master.detach().clone() for key, master in masters.items()}
    optimizer = build_optimizer(masters, make_job(name, form, weight_decay=0.5))
    set_learning_rate(optimizer, 0.1)
    for master in masters.values():
        master.grad = torch.zeros_like(master)
    optimizer.step()
    for key, master in masters.items():
        assert torch.allclose(master, before[key] * (0.95 if master.dim() > 1 else 1.0))


BYTES = {
    ("adamw", "fp32"): 8, ("adamw", "bf16"): 4, ("adamw", "int8"): 2 + 2 * 4 / 128,
    ("lion", "fp32"): 4, ("lion", "bf16"): 2, ("lion", "int8"): 1 + 4 / 128,
    ("sgd", "int8"): 1 + 4 / 128, ("muon", "fp32"): 4, ("muon", "int8"): 1 + 4 / 128,
}  # fmt: skip


@pytest.mark.parametrize(("name", "form"), BYTES)
def test_bytes_kept_for_an_entry_of_a_matrix(name: str, form: str) -> None:
    masters = random_masters(torch.float32, ffn_up=(16, 1024))
    optimizer = build_optimizer(masters, make_job(name, form))
    give_gradients(masters, 0)
    optimizer.step()
    [kept] = states_of(optimizer, masters).values()
    kept.pop("step")
    assert sum(tensor.nbytes for tensor in kept.values()) == BYTES[name, form] * 16 * 1024


def test_adafactor_keeps_a_row_and_a_column() -> None:
    masters = random_masters(torch.float32, ffn_up=(16, 1024), ffn_norm=(16,))
    optimizer = build_optimizer(masters, make_job("adafactor"))
    give_gradients(masters, 0)
    optimizer.step()
    matrix, vector = states_of(optimizer, masters).values()
    assert {name: tensor.numel() for name, tensor in matrix.items()} == {"step": 1, "rows": 16, "columns": 1024}
    assert {name: tensor.numel() for name, tensor in vector.items()} == {"step": 1, "second": 16}


@pytest.mark.parametrize(("form", "close"), [("bf16", 3e-3), ("int8", 3e-2)])
def test_adamw_with_small_states_goes_nearly_where_torch_s_goes(form: str, close: float) -> None:
    job, exact = make_job("adamw", form, weight_decay=0.1), make_job("adamw", weight_decay=0.1)
    masters = random_masters(ffn_up=(16, 256), ffn_norm=(16,))
    first = random_masters(ffn_up=(16, 256), ffn_norm=(16,))
    build = lambda job: lambda masters: build_optimizer(masters, job)  # noqa: E731
    assert side_by_side(first, build(job), build(exact), steps=1) < 1e-14  # what a step computes is not rounded
    error = side_by_side(masters, build(job), build(exact), steps=20)
    assert 1e-6 < error < close


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_small_states_forget_old_gradients_as_fast_as_exact_ones(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def decay_of_the_second_moment() -> float:
        """What 250 steps without gradients leave of it (one entry keeps its block's scale up), by mean."""
        masters = random_masters(torch.float32, ffn_up=(2, 1024))
        [master] = masters.values()
        optimizer = build_optimizer(masters, make_job("adamw", form, betas=(0.9, 0.995), weight_decay=0.0))
        for step in range(251):
            master.grad = torch.full_like(master, 0.0 if step else 1.0)
            master.grad[:, ::128] = 1.0
            optimizer.step()
        [kept] = optimizer.state.values()
        moment = states.Moment("root", signed=False)
        shard = ShardIndex(torch.arange(2), None, (2, 1024), 1)
        rule = states.format_of(form, shard, master.device)
        roots = rule.read(kept, moment, slice(None), torch.float32)
        return float(roots[:, 1::2].mean() / roots[:, ::128].mean())

    # v decays by 0.995 a step from its first value to 0.995^250 of it; the kept-up entries' v goes to 1 - 0.995^251.
    expected = ((1 - 0.995) * 0.995**250 / (1 - 0.995**251)) ** 0.5
    assert decay_of_the_second_moment() == pytest.approx(expected, rel=0.1)
    monkeypatch.setattr(states.Dither, "at", lambda self, step, rows, turn: torch.tensor(0.5))
    assert decay_of_the_second_moment() != pytest.approx(expected, rel=0.5)  # rounded to the nearest it stays high


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_piece_is_rounded_as_the_same_place_of_the_whole(form: str) -> None:
    whole_shard = ShardIndex(torch.arange(12), None, (12, 1024), 1)
    values = torch.randn(12, 1024, generator=torch.Generator().manual_seed(0)).abs()
    moment = states.Moment("root", signed=False, turn=0.5)

    def kept(shard: ShardIndex, given: Tensor) -> Tensor:
        state: dict[str, Tensor] = {"step": torch.tensor(7)}
        rule = states.format_of(form, shard, given.device)
        rule.make(state, moment, given)
        rule.write(state, moment, slice(0, 2), given[:2])
        rule.write(state, moment, slice(2, None), given[2:])
        return rule.read(state, moment, slice(None), torch.float32)

    whole = kept(whole_shard, values)
    assert 0 < float((whole - values).abs().max()) < float(values.max()) / 128
    shard = ShardIndex(torch.arange(5, 9), torch.arange(256, 512), (12, 1024), 1)
    assert torch.equal(kept(shard, values[5:9, 256:512]), whole[5:9, 256:512])


@pytest.mark.parametrize(("columns", "length"), [(2048, 128), (14336, 112), (36, 9), (53, 53), (1601, 128)])
def test_blocks_are_halves_as_far_as_they_go(columns: int, length: int) -> None:
    assert states.Blocks.of(columns, 1) == states.Blocks.within(columns, length)


@pytest.mark.parametrize(
    ("columns", "cuts", "unit", "length"),
    [(4096, 32, 128, 128), (2048, 32, 64, 64), (3072, 12, 256, 128), (393, 3, 131, 128), (24, 12, 2, 2)],
)
def test_no_layout_cuts_within_a_block(columns: int, cuts: int, unit: int, length: int) -> None:
    blocks = states.Blocks.of(columns, cuts)
    assert blocks == states.Blocks.within(unit, length)
    of_column = blocks.spread(torch.arange(blocks.count(columns)).unsqueeze(0))[0]
    for ranks in (ranks for ranks in range(1, cuts + 1) if cuts % ranks == 0):
        shares = [share.unique() for share in of_column.chunk(ranks)]
        assert len(torch.cat(shares)) == blocks.count(columns)  # none is in two shares
    rows = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    for block, largest in enumerate(blocks.maxima(rows).T):
        assert torch.equal(rows[:, of_column == block].abs().amax(1), largest)


def test_a_cut_within_a_block_is_refused() -> None:
    shard = ShardIndex(torch.arange(4), torch.arange(16), (4, 24), 1)
    with pytest.raises(UserError, match=r'int8" has columns that share a scale in every 2 .* columns 3 to 20; lower'):
        states.format_of("int8", replace(shard, columns=torch.arange(3, 20)), torch.device("cpu"), 3)
    states.format_of("int8", shard, torch.device("cpu"), 3)


def test_a_large_table_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(entries: int) -> list[Tensor]:
        monkeypatch.setattr(elementwise, "ENTRIES_AT_ONCE", entries)
        results = []
        for name, form in (("adamw", "int8"), ("adafactor", "fp32"), ("muon", "bf16")):
            masters = random_masters(torch.float32, ffn_up=(10, 32))
            optimizer = build_optimizer(masters, make_job(name, form))
            for step in range(3):
                give_gradients(masters, step)
                optimizer.step()
            results += [master.detach() for master in masters.values()]
        return results

    for whole, parts in zip(trained(2**24), trained(3 * 32), strict=True):
        assert torch.allclose(whole, parts, rtol=1e-6)


def test_adafactor_with_small_states_is_refused() -> None:
    job = make_job("adafactor", "int8")
    with pytest.raises(UserError, match=r'precision\.optimizer_states = "int8" has nothing to shrink.*"fp32"'):
        require_layout(job, 1)


LAYOUTS = [
    ("muon", "fp32", {"dp_shard": 2, "zero": 3}),
    ("muon", "int8", {"dp_shard": 2, "zero": 1}),
    ("adafactor", "fp32", {"dp_shard": 2, "zero": 2}),
    ("adamw", "int8", {"pp": 2}),
    ("lion", "bf16", {"dp_replicate": 2}),
]


def parity_job(name: str, form: str, layout: dict[str, int]) -> Job:
    job = make_job(name, form, layout, lr=1e-3, eps=1e-3)
    return job.model_copy(update={"model": job.model.model_copy(update={"vocab_size": 41, "layers": 3})})


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "form", "layout"), LAYOUTS)
def test_layouts_update_as_one_process_does(name: str, form: str, layout: dict[str, int]) -> None:
    verdict = check(parity_job(name, form, layout))
    assert verdict.ok, verdict.first_wrong


@pytest.mark.thorough
def test_what_a_rank_does_with_its_own_piece_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {name: parity_job(name, "fp32", {"dp_shard": 2}) for name in ("muon", "adafactor")}
    for job in jobs.values():
        reference(job, "float64")
    init = holders.Holders.__init__

    def alone(self: holders.Holders, world: Any) -> None:
        init(self, world)
        self._size = 1

    monkeypatch.setattr(holders.Holders, "__init__", alone)
    for name, job in jobs.items():
        verdict = check(job)
        wrong = {row.name.split(".")[-2] for row in verdict.rows if row.ok is False and row.kind == "update"}
        assert wrong >= PROJECTIONS, name


def test_the_shrunk_job_keeps_its_8_bit_states_whatever_the_cut() -> None:
    odd = make_job("adamw", "int8").model_dump()
    odd["model"] |= {"heads": 3, "kv_heads": 3, "width": 36, "head_dim": 12, "ffn_width": 48}
    odd["layout"]["tp"], odd["layout"]["sp"] = 3, False
    for job in (make_job("adamw", "int8", {"tp": 2}), Job.model_validate(odd)):
        small, notes = shrink(job)
        assert small.precision.optimizer_states == "int8" and not [n for n in notes if "int8" in n.text]
        assert small.optimizer.name == "adamw" and ranks_of(small.layout) == job.layout.tp


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_updates_as_the_cpu_does(name: str, form: str) -> None:
    if name == "adafactor" and form != "fp32":
        return
    ends = []
    for device in ("cpu", "cuda"):
        masters = random_masters(torch.float32, ffn_up=(64, 256), ffn_norm=(64,))
        masters = {key: nn.Parameter(master.detach().to(device)) for key, master in masters.items()}
        optimizer = build_optimizer(masters, make_job(name, form))
        for step in range(3):
            give = random_masters(torch.float32, ffn_up=(64, 256), ffn_norm=(64,))
            give_gradients(give, step)
            for key, master in masters.items():
                master.grad = give[key].grad.to(device)
            optimizer.step()
        ends.append({key: master.detach().cpu() for key, master in masters.items()})
    for key, there in ends[1].items():
        assert torch.allclose(there, ends[0][key], rtol=0, atol=2e-3 if name == "muon" else 2e-4)
