"""The load of experts over a step, and the preferences that follow it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.job import Job
from meshwright.model import routers
from meshwright.parallel import World, build
from meshwright.train import LossScale, Silent, make_trainer
from meshwright.train.expert_load import ExpertLoad, Load
from meshwright.verify import run_ranks
from meshwright.verify.documents import unequal_corpus

ALONE = World(torch.device("cpu"))


def job(**experts: Any) -> Job:
    return Job.model_validate(
        {
            "model": {
                "vocab_size": 53,
                "width": 16,
                "layers": 3,
                "heads": 2,
                "max_sequence_length": 16,
                "experts": {"count": 4, "top_k": 2, "ffn_width": 8, "first_dense": 1, **experts},
            },
            "batch": {"sequence_length": 16, "global_batch": 4, "micro_batch": 2},
            "data": {"sources": ("builtin:synthetic",), "workers": 0},
            "evaluation": {"every_steps": 0},
            "run": {"steps": 2, "device": "cpu"},
        }
    )


class Rows(Silent):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def metric(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def trained(job: Job, loss_scale: float = 1.0) -> tuple[Any, Rows]:
    engine, weights = build(job, ALONE, torch.float64)
    rows = Rows()
    trainer = make_trainer(job, unequal_corpus(job), engine, weights, rows, rows, ALONE)
    if loss_scale != 1.0:
        trainer.scaling = LossScale(loss_scale)
    trainer.run()
    return trainer, rows


def test_an_expert_with_fewer_tokens_than_the_mean_is_preferred_more() -> None:
    engine, _ = build(job(balance_rate=0.5), ALONE)
    load = ExpertLoad(job(balance_rate=0.5), engine.modules, ALONE)
    for layer, router in routers(engine.modules[0]):
        router.load.copy_(torch.tensor([10, 6, 8, 8]) * layer)
    assert load.settle(updated=True).tokens_LN.tolist() == [[10, 6, 8, 8], [20, 12, 16, 16]]
    for _, router in routers(engine.modules[0]):
        assert router.preference.tolist() == [-0.5, 0.5, 0.0, 0.0]
        assert router.load.sum() == 0
    assert load.preference_LN[0].tolist() == [0.0] * 4  # a dense layer


def test_nothing_is_preferred_more_where_no_router_is_trained() -> None:
    """As where only the projector of an encoder is: the decoder stays as it is."""
    sizes = {"seconds": 0.5, "width": 24, "layers": 1, "heads": 2, "ffn_width": 48}

    def preferred(*parts: str) -> list[float]:
        plain = job(balance_rate=0.5)
        shape = plain.model.model_dump() | {"max_sequence_length": 64, "audio": {**sizes, "train": parts}}
        batch = {"sequence_length": 64, "global_batch": 4, "micro_batch": 2}
        heard = Job.model_validate(plain.model_dump() | {"model": shape, "batch": batch})
        engine, _ = build(heard, ALONE)
        load = ExpertLoad(heard, engine.modules, ALONE)
        for _, router in routers(engine.modules[0]):
            router.load.copy_(torch.tensor([10, 6, 8, 8]))
        load.settle(updated=True)
        return load.preference_LN[1].tolist()

    assert preferred("projector") == preferred("encoder", "projector") == [0.0] * 4
    assert preferred("projector", "decoder") == [-0.5, 0.5, 0.0, 0.0]


LOADS = {
    "all equal": ([5, 5, 5, 5], [0.0, 0.0, 0.0, 0.0]),
    "a mean between two numbers": ([3, 4, 3, 4], [0.5, -0.5, 0.5, -0.5]),
    "one apart in a trillion": ([10**12 + 1, 10**12 - 1, 10**12, 10**12], [-0.5, 0.5, 0.0, 0.0]),
    "no tokens": ([0, 0, 0, 0], [0.0, 0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("case", LOADS)
def test_an_expert_with_as_many_tokens_as_the_mean_stays_as_it_is(case: str) -> None:
    tokens, expected = LOADS[case]
    engine, _ = build(job(balance_rate=0.5), ALONE)
    load = ExpertLoad(job(balance_rate=0.5), engine.modules, ALONE)
    [(_, router), _] = routers(engine.modules[0])
    router.load.copy_(torch.tensor(tokens))
    load.settle(updated=True)
    assert router.preference.tolist() == expected


def preferences_of_unequal_ranks() -> list[float]:
    engine, _ = build(job(balance_rate=0.5), ALONE)
    rank = dist.get_rank()
    load = ExpertLoad(job(balance_rate=0.5), engine.modules, World(torch.device("cpu"), rank=rank, size=2))
    [(_, router), _] = routers(engine.modules[0])
    router.load.copy_(torch.tensor([[6, 2, 5, 3], [2, 6, 4, 4]][rank]))
    load.settle(updated=True)
    found: list[float] = router.preference.tolist()
    return found


def test_loads_that_are_equal_over_all_ranks_change_nothing_on_any() -> None:
    """Experts 0 and 1 have the mean's 8 tokens together; 2 has one more and 3 one less."""
    assert run_ranks(preferences_of_unequal_ranks, 2) == [[0.0, 0.0, -0.5, 0.5]] * 2


def test_a_step_that_was_not_made_leaves_preferences_alone() -> None:
    engine, _ = build(job(balance_rate=0.5), ALONE)
    load = ExpertLoad(job(balance_rate=0.5), engine.modules, ALONE)
    routers(engine.modules[0])[0][1].load[0] = 7
    load.settle(updated=False)
    assert load.preference_LN.abs().max() == 0
    assert routers(engine.modules[0])[0][1].load.sum() == 0


def test_every_step_reports_its_load() -> None:
    _, rows = trained(job())
    assert len(rows.rows) == 2
    for row in rows.rows:
        assert 1.0 <= row["expert_imbalance"] <= 2.0 and 0.5 <= row["expert_entropy"] <= 1.0
        assert row["idle_experts"] == 0


def test_the_numbers_of_a_load() -> None:
    even, one = Load(torch.tensor([[5, 5]])).row(), Load(torch.tensor([[10, 0]])).row()
    assert even == {"expert_imbalance": 1.0, "expert_entropy": 1.0, "idle_experts": 0}
    assert one == {"expert_imbalance": 2.0, "expert_entropy": 0.0, "idle_experts": 1}


def test_dropped_tokens_are_reported_as_a_share_however_the_batch_is_split() -> None:
    """With less than a full share for every expert some are dropped in any case."""

    def shares(micro_batch: int) -> list[float]:
        given = job(capacity=0.75)
        batch = given.batch.model_copy(update={"micro_batch": micro_batch})
        _, rows = trained(given.model_copy(update={"batch": batch}))
        return [row["expert_dropped"] for row in rows.rows]

    assert shares(1) == shares(4) and all(0.25 <= share < 0.6 for share in shares(1))
    load = Load(torch.tensor([[10, 6], [8, 8]]), torch.tensor([3, 1]))
    assert load.row()["expert_dropped"] == 0.125
    assert load.event() == {"tokens": [[10, 6], [8, 8]], "dropped": [3, 1]}


def test_every_step_counts_its_tokens_anew() -> None:
    limited = job(capacity=0.75)
    engine, _ = build(limited, ALONE, torch.float64)
    load = ExpertLoad(limited, engine.modules, ALONE)
    [model] = engine.modules
    tokens = torch.arange(64).remainder(53).view(4, 16)
    first, second = (_counted(load, model, tokens) for _ in range(2))
    assert first.dropped_L is not None and int(first.dropped_L.sum()) > 0
    assert first.event() == second.event()


def _counted(load: ExpertLoad, model: torch.nn.Module, tokens: torch.Tensor) -> Load:
    model(tokens)
    return load.settle(updated=False)


def test_a_steps_losses_are_a_mean_over_its_sequences() -> None:
    """The same sequences twice are the same mean, so the routers' gradients stay."""

    def gradient(global_batch: int) -> torch.Tensor:
        given = job(balance_loss=0.5)
        given = given.model_copy(update={"batch": given.batch.model_copy(update={"global_batch": global_batch})})
        engine, _ = build(given, ALONE, torch.float64)
        load = ExpertLoad(given, engine.modules, ALONE)
        load.scale_losses(1.0)
        [model] = engine.modules
        tokens = torch.arange(64).remainder(53).view(4, 16)
        for _ in range(global_batch // 4):
            (0.0 * model(tokens)).sum().backward()
        found = routers(model)[0][1].linear.weight.grad
        assert found is not None
        return found

    torch.testing.assert_close(gradient(4), gradient(8), rtol=1e-12, atol=1e-15)


def test_the_loss_scale_applies_to_the_losses_of_routers_too() -> None:
    """A power of two changes no bit of a gradient that it multiplies and divides."""
    losses = job(balance_loss=0.5, z_loss=0.1)
    plain, scaled = (trained(losses, scale)[0].weights.masters for scale in (1.0, 1024.0))
    for name, weight in plain.items():
        torch.testing.assert_close(scaled[name], weight, rtol=1e-9, atol=1e-12, msg=name)


def test_preferences_are_part_of_a_checkpoint() -> None:
    trainer, _ = trained(job(balance_rate=0.1))
    [saved] = [part.values for part in trainer.capture().parts if part.name == "routing/preference"]
    assert saved[0].abs().max() == 0 and saved[1:].abs().max() > 0
