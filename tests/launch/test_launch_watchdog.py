"""Who is named for a standstill, by beats and one's own clock; and when a run is worth another start."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.launch.heartbeat import Beat, beat_interval_s
from meshwright.launch.rank_failure import RankFailure
from meshwright.launch.restarts import Restarts, shrunk
from meshwright.launch.signals import exit_code
from meshwright.launch.stalls import COLDEST_S, VERDICT, Stall, StallDetector
from meshwright.launch.watchdog import LOOK
from meshwright.runs.folder import RunFolder
from meshwright.train import OutOfMemory
from meshwright.train.links import slow_groups

BEAT = Beat(1, 10, 7, "forward and backward", "meshwright/x.py:1", "all_reduce", True, 4711, "here")


class Court:
    """A judge of three ranks, and a clock that a test moves."""

    def __init__(self, *beats: Beat) -> None:
        self.now, self.beats = 100.0, dict(enumerate(beats or (BEAT, BEAT, BEAT)))
        self.detector = StallDetector(3, 10.0, lambda: self.now)

    def pass_time(self, seconds: float, *stands_still: int, silent: tuple[int, ...] = ()) -> Stall | None:
        """Half a second at a time; some main threads do not move, some processes do not even beat."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for rank, beat in self.beats.items():
                if rank not in silent:
                    moves = beat.moves + (rank not in stands_still)
                    self.beats[rank] = replace(beat, number=beat.number + 1, moves=moves)
            self.detector.see(self.beats)
        return self.detector.verdict()


def test_ranks_that_move_are_left_in_peace_and_the_verdict_comes_in_time() -> None:
    court = Court()
    assert court.pass_time(60.0) is None
    assert court.pass_time(6.0, 0, 1, 2, silent=(1,)) is None
    verdict = court.pass_time(2.5, 0, 1, 2, silent=(1,))
    assert verdict is not None and verdict.missing == (1,) and verdict.silent
    told = verdict.sentence(10.0)
    assert told.startswith(
        "rank 1 gave no sign of life for 8.5 s (run.watchdog_s = 10), last seen in step 7, forward and"
    )
    assert "others in step 7, forward and backward, in all_reduce at meshwright/x.py:1" in told


def test_a_rank_that_begins_to_look_when_it_hangs_sees_silence_before_its_verdict() -> None:
    """Under torchrun the ranks watch each other, and read the others' beats only while they hang themselves."""
    watchdog_s, interval_s = 4.0, beat_interval_s(4.0)
    now = LOOK * watchdog_s + interval_s  # the last look at which it did not yet count itself as hanging
    detector = StallDetector(2, watchdog_s, lambda: now)
    beats = {0: BEAT, 1: BEAT}
    now += 2 * interval_s  # the heartbeat's thread notices, and this one reads what it has read
    while now < VERDICT * watchdog_s:
        beats[0] = replace(beats[0], number=beats[0].number + 1)
        detector.see(beats)
        now += interval_s
    verdict = detector.accuse(now)
    assert verdict.missing == (1,) and verdict.silent


def test_of_ranks_that_all_beat_the_one_outside_of_collectives_is_named() -> None:
    reading = replace(BEAT, phase="reading data", collective=None)
    court = Court(BEAT, reading, BEAT)
    court.pass_time(1.0)
    verdict = court.pass_time(9.0, 0, 1, 2)
    assert verdict is not None and verdict.missing == (1,) and not verdict.silent
    assert "rank 1 made no progress" in verdict.sentence(10.0) and "reading data" in verdict.sentence(10.0)


def test_where_all_wait_in_collectives_those_behind_are_named() -> None:
    court = Court(BEAT, BEAT, replace(BEAT, step=6))
    court.pass_time(1.0)
    verdict = court.pass_time(9.0, 0, 1, 2)
    assert verdict is not None and verdict.missing == (2,)


def test_the_first_step_takes_its_time_and_a_rank_that_has_ended_is_no_matter() -> None:
    court = Court(*[replace(BEAT, warm=False)] * 3)
    court.pass_time(1.0)
    assert court.pass_time(COLDEST_S, 0, 1, 2) is None
    assert court.pass_time(30.0, 0, 1, 2, silent=(0,)) is not None
    court = Court(BEAT, BEAT, replace(BEAT, done=True))
    assert court.pass_time(60.0, 2, silent=(2,)) is None


def test_a_judge_that_could_not_look_blames_nobody_for_that_time() -> None:
    court = Court()
    court.pass_time(1.0)
    court.now += 30.0
    court.detector.see(court.beats)
    assert court.detector.verdict() is None
    assert court.pass_time(10.0, 1, silent=(1,)) is not None


def test_a_clock_that_others_set_changes_nothing() -> None:
    """A beat has no time in it: only whether it changed counts."""
    assert not any("time" in name or name.endswith("_at") for name in BEAT.__dataclass_fields__)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "", {"run": {}}, [])


def job(**sections: dict) -> Job:
    base = {"data": {"sources": ["builtin:synthetic"]}, "batch": {"global_batch": 12, "micro_batch": 1}}
    return Job.model_validate(base | sections)


def test_restarts_wait_longer_while_no_step_is_made(folder: RunFolder) -> None:
    restarts, cause = Restarts(job(run={"max_restarts": 6})), RankFailure("rank 1 fell", 1, "")
    folder.metric({"step": 1, "loss": 1.0, "attempt": 0})
    waits = []
    for made in (0, 0, 0, 0, 9, 0):
        if made:
            folder.metric({"step": made, "loss": 1.0, "attempt": 0})
        assert restarts.allows(cause, folder)
        waits.append(restarts.next(cause, folder, 1)[0])
    assert waits == [0.0, 1.0, 2.0, 4.0, 0.0, 1.0]
    assert not restarts.allows(cause, folder), "six were allowed"
    events = [event for event in folder.events() if event["kind"] == "restart"]
    assert [event["restart"] for event in events] == [1, 2, 3, 4, 5, 6]
    assert events[4]["cause"] == "rank 1 fell" and events[4]["rank"] == 1 and events[4]["step"] == 9


def test_a_mistake_is_not_tried_again_and_a_lack_of_memory_once(folder: RunFolder) -> None:
    assert not Restarts(job(run={"max_restarts": 9})).allows(UserError("lower optimizer.lr"), folder)
    assert not Restarts(job()).allows(RankFailure("rank 0 fell", 0, ""), folder), "none was allowed"
    restarts = Restarts(job(run={"max_restarts": 9}))
    folder.metric({"step": 1, "loss": 1.0, "attempt": 0})
    assert [restarts.allows(OutOfMemory("too little"), folder) for _ in range(3)] == [True, True, False]


def test_a_restart_that_is_refused_is_tried_again(folder: RunFolder) -> None:
    restarts, locked = Restarts(job(run={"max_restarts": 9})), UserError("run.folder cannot be written")
    assert not Restarts(job(run={"max_restarts": 9})).allows(locked, folder), "at the start it is a mistake"
    folder.metric({"step": 1, "loss": 1.0, "attempt": 0})
    assert restarts.allows(RankFailure("rank 1 fell", 1, ""), folder)
    restarts.next(RankFailure("rank 1 fell", 1, ""), folder, 1)
    assert restarts.allows(locked, folder) and restarts.next(locked, folder, 1)[0] == 1.0
    folder.metric({"step": 1, "loss": 1.0, "attempt": 1})
    assert not restarts.allows(UserError("step 2 has loss nan"), folder), "it had begun"


def test_only_data_parallel_axes_shrink_to_what_the_batch_can_be_cut_by() -> None:
    wide = job(layout={"dp_replicate": 4, "tp": 2})
    assert (found := shrunk(wide, 7)) is not None and (found.layout.dp_replicate, found.layout.tp) == (3, 2)
    assert (found := shrunk(wide, 5)) is not None and found.layout.dp_replicate == 2
    assert shrunk(job(layout={"tp": 2, "pp": 2}), 3) is None
    odd = job(layout={"dp_shard": 4, "zero": 3}, batch={"global_batch": 8, "micro_batch": 1})
    assert (found := shrunk(odd, 3)) is not None and found.layout.dp_shard == 2, "8 sequences are not cut by 3"


def test_a_rank_that_never_comes_up_is_left_out_where_that_is_allowed(folder: RunFolder) -> None:
    restarts = Restarts(job(run={"max_restarts": 9, "may_shrink": True, "device": "cpu"}, layout={"dp_replicate": 4}))
    cause = RankFailure("rank 3 fell", 3, "")
    found = [restarts.next(cause, folder, 4)[1] for _ in range(3) if restarts.allows(cause, folder)]
    assert found[0] == [] and found[1] == ["layout.dp_replicate=3", "layout.dp_shard=1"]
    assert [event["ranks"] for event in folder.events()] == [4, 3, 3]


@pytest.mark.parametrize(
    ("layout", "most", "shards", "degree"),
    [
        ({"dp_shard": 8, "ep": 8}, 7, 7, 1),
        ({"dp_shard": 4, "ep": 4}, 3, 3, 3),
        ({"dp_shard": 4, "ep": 2}, 3, 3, 1),
        ({"dp_shard": 2, "ep": 2}, 1, 1, 1),
        ({"dp_shard": 4, "ep": 8, "tp": 2}, 7, 3, 6),
        ({"dp_shard": 4, "ep": 2, "tp": 2}, 7, 3, 2),
    ],
)
def test_expert_parallelism_shrinks_with_the_ranks_that_share_experts(
    layout: dict[str, int], most: int, shards: int, degree: int
) -> None:
    experts = {"count": 24, "top_k": 2, "ffn_width": 8}
    whole = job(layout={"zero": 3, **layout}, model={"experts": experts}, batch={"global_batch": 840, "micro_batch": 1})
    smaller = shrunk(whole, most)
    assert smaller is not None and (smaller.layout.dp_shard, smaller.layout.ep) == (shards, degree)


def test_a_restart_tells_the_ranks_their_degree_of_expert_parallelism(folder: RunFolder) -> None:
    model = {"experts": {"count": 8, "top_k": 2, "ffn_width": 8}}
    run = {"max_restarts": 9, "may_shrink": True, "device": "cpu"}
    restarts = Restarts(job(run=run, model=model, layout={"dp_shard": 4, "ep": 4}))
    cause = RankFailure("rank 3 fell", 3, "")
    changes = [restarts.next(cause, folder, 4)[1] for _ in range(2) if restarts.allows(cause, folder)]
    assert changes == [[], ["layout.dp_replicate=1", "layout.dp_shard=3", "layout.ep=1"]]
    assert not any("why_not_smaller" in event for event in folder.events())


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"layout": {"pp": 4}}, "layout.dp_shard = 1, and 3 ranks are fewer than the 4 of the other axes"),
        (
            {"layout": {"dp_replicate": 2, "pp": 2, "compress": "int8"}},
            'has no layout for 3 ranks; with 2: layout.compress = "int8" compresses gradients between replicas, but',
        ),
    ],
)
def test_a_restart_says_why_it_has_as_many_ranks_as_before(folder: RunFolder, sections: dict, sentence: str) -> None:
    restarts = Restarts(job(run={"max_restarts": 9, "may_shrink": True, "device": "cpu"}, **sections))
    cause = RankFailure("rank 3 fell", 3, "")
    for _ in range(2):
        assert restarts.allows(cause, folder)
        restarts.next(cause, folder, 4)
    first, second = folder.events()
    assert "why_not_smaller" not in first
    assert second["why_not_smaller"] == restarts.why_not_smaller and sentence in second["why_not_smaller"]


def test_what_is_no_ranks_fault_leaves_no_rank_out(folder: RunFolder) -> None:
    restarts = Restarts(job(run={"max_restarts": 9, "may_shrink": True, "device": "cpu"}, layout={"dp_replicate": 4}))
    for _ in range(3):
        cause = ValueError("the ranks' meeting point could not be opened")
        assert restarts.allows(cause, folder) and restarts.next(cause, folder, 4)[1] == []


def test_the_gpu_of_a_rank_that_never_comes_up_is_left_out(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    restarts = Restarts(job(run={"max_restarts": 9, "may_shrink": True}, layout={"dp_replicate": 4}))
    found = []
    for rank in (1, 1, 0, 0):
        cause = RankFailure(f"rank {rank} fell", rank, "")
        assert restarts.allows(cause, folder)
        found.append((restarts.next(cause, folder, 4)[1], restarts.variables().get("CUDA_VISIBLE_DEVICES")))
    three = ["layout.dp_replicate=3", "layout.dp_shard=1"]
    assert found == [([], None), ([], "0,2,3,4"), ([], "0,2,3,4"), (three, "2,3,4")], (
        "a spare one takes its place first"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e")
    assert restarts.variables() == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d,GPU-e"}


def test_a_gpu_that_the_driver_lost_is_left_out_at_once(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [4, 3, 3]
    monkeypatch.setattr("torch.cuda.device_count", lambda: shown.pop(0))
    restarts = Restarts(job(run={"max_restarts": 9, "may_shrink": True}, layout={"dp_replicate": 4}))
    cause, ranks = RankFailure("rank 3 fell", 3, ""), [4, 4, 3]
    changes = [restarts.next(cause, folder, number)[1] for number in ranks if restarts.allows(cause, folder)]
    assert changes == [[], ["layout.dp_replicate=3", "layout.dp_shard=1"], []] and restarts.variables() == {}


def test_a_slow_link_is_named_by_its_ranks() -> None:
    times = {0: (0, 0.001), 1: (0, 0.001), 2: (2, 0.001), 3: (2, 0.020), 4: (4, 0.0012), 5: (4, 0.001)}
    [told] = slow_groups("shards", times)
    assert told.startswith("the link between ranks 2, 3 (axis shards) takes 20.0 ms for 256 KiB, others 1.1 ms")
    assert slow_groups("shards", {rank: (rank // 2, 0.001) for rank in range(6)}) == []


def test_the_signal_decides_the_exit_code() -> None:
    assert [exit_code(name) for name in ("SIGINT", "SIGTERM", "SIGUSR1")] == [130, 85, 85]
