"""The matrix: what it must contain, and its quick lines held equal to one process."""

import pytest
from sharp_lines import SHARP

from meshwright.data import Loader, RunningWindows, Stream
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.launch.worker import run_quietly
from meshwright.layout import ranks_of, require_layout, table_of
from meshwright.model.encoder import is_unused
from meshwright.pipeline import SCHEDULES, require_schedule
from meshwright.verify import LineResult, load_matrix, run_matrix
from meshwright.verify.check import reference
from meshwright.verify.documents import HELD_OUT, unequal_corpus
from meshwright.verify.formats import in_format

LINES = load_matrix("full")
QUICK = load_matrix("quick")
FEW = [line for line in QUICK if line.name in SHARP]
REST = [line for line in QUICK if line.name not in SHARP]


@pytest.fixture(scope="module")
def few() -> dict[str, LineResult]:
    """The lines of `make test`, run together as far as there are cores."""
    return {result.line.name: result for result in run_matrix(FEW, train=run_quietly)}


@pytest.fixture(scope="module")
def rest() -> dict[str, LineResult]:
    return {result.line.name: result for result in run_matrix(REST, train=run_quietly)}


def require_equal(result: LineResult) -> None:
    assert result.verdict is not None, result.error
    assert result.verdict.ok, result.verdict.first_wrong


@pytest.mark.parametrize("name", [line.name for line in FEW])
def test_layout_equals_one_process(name: str, few: dict[str, LineResult]) -> None:
    require_equal(few[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", [line.name for line in REST])
def test_each_other_layout_equals_one_process(name: str, rest: dict[str, LineResult]) -> None:
    require_equal(rest[name])


def test_every_sharp_line_is_a_quick_one() -> None:
    assert {line.name for line in FEW} == set(SHARP)


def test_every_message_of_every_block_is_part_of_a_product(few: dict[str, LineResult]) -> None:
    """Two projections' inputs are gathered and two's results scattered, forward and backward."""
    result = few["llama · compiled, asynchronous tp 2"]
    job = result.line.job
    assert result.verdict is not None, result.error
    trained = job.run.steps * job.accumulation * job.model.layers * (2 + 2)
    batches = min(job.evaluation.batches, -(-HELD_OUT // job.batch.micro_batch))
    held_out = 2 * batches * job.model.layers * 2
    calls = trained + held_out
    told = f"layout.async_tp: every rank ran at least {calls} gathers and {calls} scatters as part of a product"
    assert told in result.verdict.notes, result.verdict.notes


def test_every_line_is_a_layout_of_its_own() -> None:
    assert len({line.name for line in LINES}) == len(LINES) >= 80
    for line in LINES:
        job, _ = in_format(line.job, line.dtype) if line.dtype == "fp8" else (line.job, [])  # in sizes that fp8 takes
        require_layout(job, ranks_of(job.layout))
    assert {1, 2, 3, 4, 6, 8, 12, 16} == {ranks_of(line.job.layout) for line in LINES}


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


def test_the_matrix_holds_every_method_and_schedule() -> None:
    layouts = [line.job.layout for line in LINES]
    shared = {(layout.cp_method, layout.cp) for layout in layouts if layout.cp > 1}
    assert shared >= {(method, cp) for method in ("ring", "allgather", "ulysses") for cp in (2, 4)}
    runs = {(line.job.layout.schedule, line.job.layout.pp) for line in LINES if line.job.layout.pp > 1}
    assert runs >= {(schedule, pp) for schedule in SCHEDULES for pp in (2, 4)}
    for schedule in SCHEDULES:
        jobs = [line.job for line in LINES if line.job.layout.pp > 1 and line.job.layout.schedule == schedule]
        assert any(job.model.layers % table_of(job).stages for job in jobs)  # stages of unequal length
        if schedule == "pipedream":  # no ties, and each mini-batch an update of its own
            continue
        assert {job.model.tied for job in jobs} == {True, False}
        assert any(not _runs_with_fewer(job) for job in jobs) and any(_runs_with_fewer(job) for job in jobs)


def _runs_with_fewer(job: Job) -> bool:
    fewer = range(1, job.accumulation)
    return any(_runs(job, micro_batches) for micro_batches in fewer)


def _runs(job: Job, micro_batches: int) -> bool:
    try:
        require_schedule(job.layout.schedule, job.layout.pp, micro_batches, job.layout.virtual_stages)
    except UserError:
        return False
    return True


def test_every_parameter_has_a_gradient_worth_comparing() -> None:
    """Two tensors of noise would be compared otherwise; key biases are zero by mathematics without rotary positions."""
    clipped = set()
    for line in {line.name.split()[0]: line for line in QUICK}.values():
        seen = reference(line.job, "float64")
        sizes = {name: float(shard.values.abs().max()) for name, shard in seen.gradients.items()}
        least = 1e-4 * max(sizes.values())  # adapters: 2e-4
        small = [name for name, size in sizes.items() if size < least and not is_unused(line.job.model, name)]
        learned = "" if line.job.model.positions == "learned" else "vision."  # those of an encoder always are
        assert all(name.endswith("k.bias") and name.startswith(learned) for name in small)
        clipped |= {norm > line.job.optimizer.clip for norm in seen.norms}
    assert clipped == {True, False}


def test_ranks_count_unequal_numbers_of_tokens() -> None:
    job = next(line.job for line in QUICK if line.job.data_parallel == 2)
    text = unequal_corpus(job).train
    for_rank = [
        Loader(
            Stream([RunningWindows(text, job.batch.sequence_length, mask_documents=True)], job.run.seed),
            global_batch=job.batch.global_batch,
            rank=rank,
            ranks=2,
        )
        for rank in (0, 1)
    ]
    counts = [[next(loader).batch.valid_count() for _ in range(job.run.steps)] for loader in for_rank]
    assert all(first != second for first, second in zip(*counts, strict=True))
