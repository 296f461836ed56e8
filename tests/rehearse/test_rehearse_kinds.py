"""Which ranks are alike, and which of them is rehearsed."""

from typing import Any

from meshwright.job import Job
from meshwright.rehearse.kinds import kind_of, kinds_of_ranks, place_in_pipeline


def job(micro_batches: int = 8, layers: int = 10, vocab_size: int = 256, **layout: Any) -> Job:
    shards = layout.get("dp_shard", 1)
    return Job.model_validate(
        {
            "model": {"layers": layers, "vocab_size": vocab_size},
            "batch": {"sequence_length": 32, "global_batch": micro_batches * shards, "micro_batch": 1},
            "layout": layout,
        }
    )


def test_without_a_pipeline_all_are_alike() -> None:
    [kind] = kinds_of_ranks(job(dp_shard=4, tp=2))
    assert (kind.rank, kind.alike, kind.name) == (0, 8, "")


def test_first_middle_and_last_stages_differ_and_the_fullest_stands_for_its_kind() -> None:
    pipeline = job(pp=4, dp_shard=2, split=[3, 3, 3, 1])
    first, middle, last = kinds_of_ranks(pipeline)
    assert [first.name, middle.name, last.name] == ["first stage", "stage 1", "last stage"]
    assert (middle.rank, middle.pipeline_rank, middle.alike) == (2, 1, 4)
    assert middle.fewer == (2,)  # under 1f1b it holds one micro-batch less
    assert (first.rank, first.alike, last.rank, last.alike) == (0, 2, 6, 2)


def test_an_odd_split_makes_more_kinds() -> None:
    assert [kind.pipeline_rank for kind in kinds_of_ranks(job(pp=4, split=[3, 2, 3, 2]))] == [0, 1, 2, 3]


def test_all_hold_the_same_number_of_micro_batches_under_gpipe() -> None:
    kinds = kinds_of_ranks(job(pp=4, schedule="gpipe", split=[3, 3, 3, 1]))
    assert [kind.fewer for kind in kinds] == [(), (), ()]


def test_a_v_has_its_ends_on_one_rank() -> None:
    pipeline = job(pp=2, schedule="zb-v")
    assert place_in_pipeline(pipeline, 0) == "first and last stage"


def test_a_rank_is_found_in_its_pipeline_however_ranks_are_numbered() -> None:
    inside, outside = job(pp=2, dp_shard=2), job(pp=2, dp_shard=2, order="dp-outside")
    assert [kind_of(inside, rank).pipeline_rank for rank in range(4)] == [0, 0, 1, 1]
    assert [kind_of(outside, rank).pipeline_rank for rank in range(4)] == [0, 1, 0, 1]
    assert kind_of(inside, 3).alike == 2


def test_ranks_with_a_shorter_part_of_the_vocabulary_are_of_another_kind() -> None:
    kinds = kinds_of_ranks(job(tp=4, dp_shard=2, vocab_size=253))
    assert [(kind.rank, kind.alike, kind.name) for kind in kinds] == [
        (0, 6, ""),
        (3, 2, "3 rows of its vocabulary are padding"),
    ]
    assert [kind.alike for kind in kinds_of_ranks(job(tp=4, vocab_size=9))] == [3, 1], "the last one has no row at all"
    assert [kind_of(job(tp=4, vocab_size=253), rank).alike for rank in range(4)] == [3, 3, 3, 1]


def test_only_stages_with_a_table_have_a_part_of_the_vocabulary() -> None:
    kinds = kinds_of_ranks(job(tp=2, pp=4, split=[3, 3, 3, 1], vocab_size=255))
    assert [(kind.rank, kind.alike, kind.name) for kind in kinds] == [
        (0, 1, "first stage"),
        (1, 1, "first stage, a row of its vocabulary is padding"),
        (2, 4, "stage 1"),
        (6, 1, "last stage"),
        (7, 1, "last stage, a row of its vocabulary is padding"),
    ]
    assert kind_of(job(tp=2, pp=4, split=[3, 3, 3, 1], vocab_size=255), 5).alike == 4
