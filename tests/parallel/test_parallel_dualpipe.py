"""DualPipe's two copies of the model: transfers that cannot cross, copies that stay equal and are no masters."""

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.data import Loader, RunningWindows, Stream
from meshwright.job import Job
from meshwright.layout import table_of
from meshwright.parallel import build, join_world
from meshwright.parallel.pipelining.dualpipe import copies_of_chains, lower, torch_number
from meshwright.parallel.pipelining.weights import Copy, StagedWeights
from meshwright.pipeline import Table, build_table
from meshwright.train import build_optimizer
from meshwright.verify import Verdict, check, run_ranks
from meshwright.verify.documents import unequal_corpus


def dualpipe_job(*, tied: bool = False, steps: int = 2, micro_batches: int = 4, **layout: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"vocab_size": 31, "width": 16, "layers": 3, "heads": 2, "ffn_width": 20, "tied": tied},
            "batch": {"sequence_length": 8, "global_batch": micro_batches, "micro_batch": 1},
            "layout": {"pp": 2, "schedule": "dualpipe", **layout},
            "data": {"sources": ["builtin:synthetic"]},
            "optimizer": {"lr": 1e-3, "eps": 1e-3},
            "evaluation": {"every_steps": 0},
            "run": {"steps": steps},
        }
    )


def transfers(table: Table, rank: int) -> list[tuple[int, str, int, int | None]]:
    """What a rank sends and receives, in its order: other rank, direction, sending stage, micro-batch."""
    ranks = {torch_number(table, stage): holder for stage, holder in enumerate(table.stage_ranks)}
    found = []
    for action in lower(table)[rank]:
        name = action.computation_type.name
        if not name.startswith(("SEND", "RECV")):
            continue
        ahead = 1 if name.endswith("F") else -1
        other = action.stage_index + (ahead if name.startswith("SEND") else -ahead)
        sender = action.stage_index if name.startswith("SEND") else other
        found.append((ranks[other], name[-1], sender, action.microbatch_index))
    return found


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (2, 10), (4, 8), (4, 14), (8, 20)])
def test_two_ranks_meet_their_transfers_in_the_same_order(ranks: int, micro_batches: int) -> None:
    table = build_table("dualpipe", ranks, micro_batches)
    of_rank = [transfers(table, rank) for rank in range(ranks)]
    assert sum(len(found) for found in of_rank) == 2 * table.transfers
    for low, high in combinations(range(ranks), 2):
        here = [what for other, *what in of_rank[low] if other == high]
        there = [what for other, *what in of_rank[high] if other == low]
        assert here == there


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 10)])
def test_nothing_runs_before_it_has_arrived_and_gradients_are_reduced_once(ranks: int, micro_batches: int) -> None:
    table = build_table("dualpipe", ranks, micro_batches)
    firsts, lasts = ({torch_number(table, chain[end]) for chain in table.chains} for end in (0, -1))
    for rank, order in lower(table).items():
        seen: set[tuple[str, int, int | None]] = set()
        for stage, kind, micro_batch, *_ in order:
            if kind.name == "FORWARD" and stage not in firsts:
                assert ("RECV_F", stage, micro_batch) in seen
            if kind.name in ("FULL_BACKWARD", "BACKWARD_INPUT") and stage not in lasts:
                assert ("RECV_B", stage, micro_batch) in seen
            seen.add((kind.name, stage, micro_batch))
        counts = Counter(action.computation_type.name for action in order)
        assert counts["REDUCE_GRAD"] == counts["UNSHARD"] == counts["RESHARD"] == 2
        computing = [action for action in order if action.is_compute_op]
        assert [torch_number(table, action.stage) for action in table.orders[rank]] == [
            a.stage_index for a in computing
        ]


def test_the_second_chain_is_copies_alone_of_what_the_first_one_owns() -> None:
    table = build_table("dualpipe", 2, 4)
    tied = [Copy(0, "embed.weight", 1, "head.weight")]
    of_rank = [
        copies_of_chains(table, {0: ["embed.weight"], 3: ["norm.weight", "head.weight"]}, tied),
        copies_of_chains(table, {1: ["norm.weight", "head.weight"], 2: ["embed.weight"]}, tied),
    ]
    assert of_rank[0] == of_rank[1]
    assert of_rank[0] == [
        Copy(0, "embed.weight", 2, "embed.weight"),
        Copy(1, "norm.weight", 3, "norm.weight"),
        Copy(0, "embed.weight", 3, "head.weight"),
    ]
    assert copies_of_chains(build_table("1f1b", 2, 4), {0: ["embed.weight"]}, tied) == []


def train(job: Job) -> tuple[list[dict[str, Tensor]], set[str], int]:
    """After some steps: the shards of this rank's two stages, its masters, and how many values its optimizer keeps."""
    world = join_world(job, torch.device("cpu"))
    engine, weights = build(job, world)
    optimizer = build_optimizer(weights.masters, job)
    data = iter(
        Loader(Stream([RunningWindows(unequal_corpus(job).train, 8)], seed=0), global_batch=job.batch.global_batch)
    )
    before = {name: master.detach().clone() for name, master in weights.masters.items()}
    for step in range(1, job.run.steps + 1):
        engine.accumulate(next(data), step)
        optimizer.step()
        weights.refresh()
        weights.zero_gradients()
    assert all(not torch.equal(master, before[name]) for name, master in weights.masters.items())
    stages = [{name: p.to_local().detach() for name, p in m.named_parameters()} for m in engine.modules]
    states = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    return stages, set(weights.masters), states


@pytest.mark.parametrize("tied", [False, True])
def test_copies_are_equal_after_steps_and_have_no_optimizer_states(tied: bool) -> None:
    job = dualpipe_job(tied=tied)
    assert table_of(job).stage_ranks == (0, 1, 1, 0)
    (low, low_masters, low_states), (high, high_masters, high_states) = run_ranks(train, 2, job)
    for owner, copy in ((low[0], high[1]), (high[0], low[1])):
        assert list(owner) == list(copy)
        assert all(torch.equal(owner[name], copy[name]) for name in owner)
    assert low_masters == set(low[0])
    assert high_masters == set(high[0]) - ({"head.weight"} if tied else set())
    if tied:
        assert torch.equal(low[0]["embed.weight"], high[0]["head.weight"])
    assert low_states == sum(values.numel() for values in low[0].values())
    assert high_states == sum(high[0][name].numel() for name in high_masters)


def wrong(verdict: Verdict) -> set[str]:
    return {row.kind for row in verdict.rows if row.ok is False}


@pytest.mark.thorough
def test_the_gradient_of_one_copy_left_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    job = dualpipe_job(tied=True)
    assert check(job).ok
    collect = StagedWeights.collect_gradients

    def all_but_one(self: StagedWeights) -> None:
        copies = self._copies
        self._copies = [copy for copy in copies if (copy.stage, copy.name) != (3, "final_norm.weight")]
        collect(self)
        self._copies = copies

    monkeypatch.setattr(StagedWeights, "collect_gradients", all_but_one)
    verdict = check(job)
    assert wrong(verdict) >= {"norm", "gradient", "update"}
    assert [row.name for row in verdict.rows if row.ok is False and row.kind == "gradient"] == ["final_norm.weight"]


@pytest.mark.thorough
def test_new_values_that_do_not_come_back_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    job = dualpipe_job(steps=3)
    refresh = StagedWeights.refresh
    calls = []

    def only_before_training(self: StagedWeights) -> None:
        calls.append(self)
        if len(calls) <= 2:  # the first weights, and those that verify puts in their place
            refresh(self)

    monkeypatch.setattr(StagedWeights, "refresh", only_before_training)
    verdict = check(job)
    assert {"loss", "norm", "update"} <= wrong(verdict) and "gradient" not in wrong(verdict)
