"""Layout parity from Python, of things of a user's own too; what is wrong with them is found."""

from pathlib import Path

import pytest
from api_fixtures import registered  # noqa: F401

import meshwright
from meshwright.errors import UserError

SHARDED = {"layout.dp_shard": 2, "layout.tp": 2}


def test_a_layout_is_equal_and_the_report_says_how(tiny_job: Path) -> None:
    report = meshwright.verify(meshwright.load_job(tiny_job, set={"layout.dp_shard": 2}))
    assert report.equal and report.ok and report.ranks == 2 and report.first_wrong is None
    assert report.worst.error <= 1e-9 and {row.kind for row in report.rows} >= {"loss", "gradient", "update"}
    assert any(note.startswith("model shrunk") for note in report.notes) and report.not_checked == []
    assert str(report).startswith("equal: 2 ranks compute what one process computes, worst error ")


@pytest.mark.thorough
def test_things_of_one_s_own_are_equal_in_a_sharded_layout(own: None, tiny_job: Path) -> None:
    names = {"optimizer.name": "nesterov", "schedule.name": "inverse-root", "model.loss": "z-loss"}
    job = meshwright.load_job(tiny_job, set={**SHARDED, **names, "optimizer.settings": {"damping": 0.25}})
    plain = meshwright.verify(meshwright.load_job(tiny_job, set=SHARDED), steps=2)
    report = meshwright.verify(job, steps=2)
    assert plain.equal and report.equal, str(report)


def test_an_optimizer_that_is_not_what_it_says_is_found(own: None, tiny_job: Path) -> None:
    report = meshwright.verify(
        meshwright.load_job(tiny_job, set={"layout.dp_shard": 2, "optimizer.name": "normalised"}), steps=1
    )
    assert not report.equal and report.first_wrong is not None and report.first_wrong.kind == "update"
    assert str(report).startswith("not equal: first diverging is the update of ")


def test_one_that_needs_whole_matrices_is_refused_where_there_are_none(own: None, tiny_job: Path) -> None:
    for cut in ({"layout.dp_shard": 2}, {"layout.tp": 2}):
        with pytest.raises(
            UserError, match=r'optimizer.name = "whole" needs whole matrices, and layout\.(zero|tp) = 2'
        ):
            meshwright.verify(meshwright.load_job(tiny_job, set={"optimizer.name": "whole", **cut}))
    copies = meshwright.load_job(tiny_job, set={"optimizer.name": "whole", "layout.dp_replicate": 2})
    assert meshwright.verify(copies, steps=1).equal


@pytest.mark.thorough
def test_the_run_itself_reads_a_source_of_one_s_own(own: None, tiny_job: Path) -> None:
    job = meshwright.load_job(
        tiny_job, set={"data.sources": ["counted:60"], "layout.dp_shard": 2, "optimizer.name": "nesterov"}
    )
    report = meshwright.verify(job, run=True, steps=4)
    assert report.equal, str(report)
    assert len(report.legs) == 4 and any("counted:60 as it is" in note for note in report.notes)


@pytest.mark.thorough
def test_a_replaced_optimizer_is_verified_anew(own: None, tiny_job: Path) -> None:
    """The single process's run is kept between checks, but not over a change of what it ran."""
    job = meshwright.load_job(tiny_job, set={"layout.dp_replicate": 2, "optimizer.name": "nesterov"})
    assert meshwright.verify(job, steps=1).equal
    import own_things

    meshwright.register_optimizer("nesterov")(own_things.Normalised)
    assert meshwright.verify(job, steps=1).equal
