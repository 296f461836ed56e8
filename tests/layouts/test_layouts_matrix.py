"""The matrix: what it must contain, and its quick lines held equal to one process."""

import pytest

from meshwright.data import Loader
from meshwright.parallel import ranks_of, require_layout
from meshwright.verify import LineResult, load_matrix, run_matrix
from meshwright.verify.check import reference
from meshwright.verify.documents import unequal_corpus

LINES = load_matrix("full")
QUICK = load_matrix("quick")


@pytest.fixture(scope="module")
def results() -> dict[str, LineResult]:
    """All quick lines, run together as far as there are cores."""
    return {result.line.name: result for result in run_matrix(QUICK)}


@pytest.mark.parametrize("name", [line.name for line in QUICK])
def test_layout_equals_one_process(name: str, results: dict[str, LineResult]) -> None:
    result = results[name]
    assert result.verdict is not None, result.error
    assert result.verdict.ok, result.verdict.first_wrong


def test_every_line_is_a_layout_of_its_own_that_fits_eight_processes() -> None:
    assert len({line.name for line in LINES}) == len(LINES) >= 30
    for line in LINES:
        require_layout(line.job, ranks_of(line.job.layout))
        assert 2 <= ranks_of(line.job.layout) <= 8


def test_the_matrix_holds_what_breaks_layouts() -> None:
    jobs = [line.job for line in LINES]
    cut = [job for job in jobs if job.layout.tp > 1]
    assert {job.accumulation for job in jobs} >= {1, 3}
    assert {job.model.tied for job in cut} == {True, False}
    assert {job.layout.zero_stage for job in cut} == {0, 1, 2, 3}
    assert {job.layout.sp for job in cut} == {True, False}
    assert any(job.model.layers % 2 for job in cut)
    assert any(job.model.vocab_size % job.layout.tp for job in cut)
    assert any(job.model.heads == 3 * job.model.kv_heads for job in cut)
    assert any(job.model.kv_heads % job.layout.tp for job in cut)
    assert {job.data.mask_documents for job in jobs} == {True, False}
    assert any(job.model.dropout for job in cut)
    assert {job.optimizer.clip for job in jobs} >= {0.0, 0.05, 100.0}


def test_every_parameter_has_a_gradient_worth_comparing() -> None:
    """Two tensors of noise would be compared otherwise; key biases are zero by mathematics without rotary positions."""
    clipped = set()
    for line in {line.name.split()[0]: line for line in QUICK}.values():
        seen = reference(line.job, "float64")
        sizes = {name: float(shard.values.abs().max()) for name, shard in seen.gradients.items()}
        small = [name for name, size in sizes.items() if size < 1e-3 * max(sizes.values())]
        assert all(name.endswith("k.bias") and line.job.model.positions == "learned" for name in small)
        clipped |= {norm > line.job.optimizer.clip for norm in seen.norms}
    assert clipped == {True, False}


def test_ranks_count_unequal_numbers_of_tokens() -> None:
    job = next(line.job for line in QUICK if line.job.data_parallel == 2)
    text = unequal_corpus(job).train
    for_rank = [
        Loader(
            text,
            seed=job.run.seed,
            sequence_length=job.batch.sequence_length,
            global_batch=job.batch.global_batch,
            mask_documents=True,
            rank=rank,
            ranks=2,
        )
        for rank in (0, 1)
    ]
    counts = [[next(loader).batch.valid_count() for _ in range(job.run.steps)] for loader in for_rank]
    assert all(first != second for first, second in zip(*counts, strict=True))
