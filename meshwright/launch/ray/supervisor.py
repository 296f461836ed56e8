"""The actor that keeps a run going in a Ray cluster: it reserves machines, starts attempts, shrinks and grows the run.

Why not Ray Train: its elastic worker groups take any size between two bounds, while a layout allows only some; its
FailureConfig does not tell a lost machine from an error of the user's; and its training function runs in a thread of
Ray's own process, where no signal can be handled and no data worker forked safely. With one trainer per attempt, none
of what it offers would be left in use.
"""

import threading
import time
from pathlib import Path
from typing import Any

from meshwright.atomic import write_atomic
from meshwright.errors import UserError
from meshwright.job import Job, changed_job
from meshwright.launch.rank_failure import RankFailure
from meshwright.launch.ray.attempt import Attempt, LostHost
from meshwright.launch.ray.layouts import layout_fields, splits
from meshwright.launch.ray.metrics import Reporter
from meshwright.launch.ray.placement import Split, room_of
from meshwright.launch.ray.record import FOLDER, OVER, State, Submission, over
from meshwright.launch.ray.status import STOP_FILE
from meshwright.launch.restarts import Restarts, cause_of, last_step
from meshwright.layout import ranks_of
from meshwright.plan import layout_words
from meshwright.runs import RunFolder
from meshwright.runs.change_job import change_job
from meshwright.version import VERSION

GROW = "more machines"
"""In the stop file: why an attempt is asked to save and end."""
_LOOK_S = 0.5
_RESERVE_S = 10.0
"""How long to wait for the machines of a larger layout before a smaller one is tried."""
_BARREN = 4
"""Attempts in a row that may end without a step before the run is given up, whatever ended them."""


class Supervisor:
    """Keeps one run going until it is done, cancelled or has failed too often; then it ends itself.

    It is a detached actor on the cluster's head: the submitting program may leave, and when this process dies, Ray
    starts it again and the run goes on from its last checkpoint.
    """

    def __init__(self, submission: Submission) -> None:
        import ray

        self._ray, self._asked = ray, submission
        self._run = Path(submission.run)
        if submission.version == VERSION:
            threading.Thread(target=self._main, name="supervisor", daemon=True).start()

    def version(self) -> str:
        """Meshwright's, on this machine; another than the submitter's starts nothing."""
        return VERSION

    def _main(self) -> None:
        try:
            word = over(self._run) or self._keep_running()
        except UserError as error:
            word = f"failed: {error}"
        except Exception as error:  # else the actor would wait for ever
            word = f"failed: {type(error).__name__}: {error}"
        if over(self._run) is None:
            write_atomic(self._run / OVER, f"{word}\n")
        self._ray.kill(self._ray.get_runtime_context().current_actor, no_restart=True)

    def _keep_running(self) -> str:
        """Attempt after attempt; returns how it all ended."""
        folder = RunFolder.open(self._run)
        job = changed_job(folder.resolved_job(trust=True), {**self._asked.overrides, "run.folder": self._asked.run})
        restarts = Restarts(job.model_copy(update={"run": job.run.model_copy(update={"may_shrink": False})}))
        barren, number = 0, sum(path.stem.count(".") == 0 for path in (self._run / FOLDER).glob("attempt-*.out"))
        while True:
            before = last_step(folder)
            (self._run / "logs").mkdir(exist_ok=True)
            for left in [*(self._run / "logs").glob("*.error.json"), self._run / STOP_FILE]:
                left.unlink(missing_ok=True)
            attempt = self._reserved(job)
            if attempt is None:
                return "cancelled"
            with attempt:
                self._change(folder, attempt.split)
                cause = self._attempted(attempt, number, _Growth(self._ray, self._asked, job, attempt.split))
            number += 1
            if over(self._run) is not None:
                return "cancelled"
            if cause is None and folder.state() == "done":
                return "done"
            barren = 0 if last_step(folder) > before else barren + 1
            if barren >= _BARREN:
                last = "it was asked to stop" if cause is None else cause_of(cause)
                return f"failed: {_BARREN} attempts in a row made no step, the last one because {last}"
            if cause is None:  # asked to save and end, to grow or because a machine is drained
                State("requeued", f"continues from step {last_step(folder)}").write(self._run)
                continue
            if not isinstance(cause, LostHost) and not restarts.allows(cause, folder):
                return f"failed: {cause_of(cause)}"
            self._wait_after(cause, restarts, folder, attempt.split)

    def _wait_after(self, cause: Exception, restarts: Restarts, folder: RunFolder, split: Split) -> None:
        """Record a restart, and wait as long as it asks for; a lost machine is not the run's fault."""
        if isinstance(cause, LostHost):
            wait_s, step = 0.0, max(0, last_step(folder))
            folder.event("restart", cause=cause_of(cause), step=step, wait_s=0.0)
        else:
            wait_s, _ = restarts.next(cause, folder, ranks_of(split.job.layout))
        folder.close()
        State("requeued", cause_of(cause)).write(self._run)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and over(self._run) is None:
            time.sleep(_LOOK_S)

    def _reserved(self, job: Job) -> Attempt | None:
        """The machines for the next attempt, of the largest layout they can be had for; None once it is cancelled."""
        room: list[int] = []

        def changed() -> bool:
            return over(self._run) is not None or self._room() != room

        too_small: list[int] | None = None
        while over(self._run) is None:
            room, split = self._room(), None
            for split in splits(job, room, self._asked.min_ranks, self._asked.device) if room != too_small else ():
                attempt = Attempt(self._ray, self._asked, split)
                if attempt.reserve(_RESERVE_S, changed):
                    return attempt
                if changed():  # Ray notices a lost machine seconds after its processes have ended
                    break
            too_small = room if split is None else None  # a search may take seconds
            again = last_step(RunFolder.open(self._run)) >= 0
            why = f"no machines are free for {self._asked.min_ranks} ranks"
            State("requeued" if again else "pending", why).write(self._run)
            time.sleep(_LOOK_S)
        return None

    def _room(self) -> list[int]:
        return room_of(self._ray.nodes(), self._asked.gpus)

    def _change(self, folder: RunFolder, split: Split) -> None:
        """Put the run folder's job into the layout of the next attempt, and record what was decided."""
        before, step = folder.resolved_job(trust=True), max(0, last_step(folder))
        changed = change_job(folder, split.job)
        if layout_fields(before) != layout_fields(split.job):
            words = {"before": layout_words(before), "after": layout_words(split.job), "why": split.why}
            folder.event("replan", step=step, ranks=ranks_of(split.job.layout), **words, changed=changed)
        elif changed.keys() - {"run.folder"}:
            folder.event("change", step=step, changed=changed)
        folder.close()

    def _attempted(self, attempt: Attempt, number: int, growth: "_Growth") -> Exception | None:
        """Run the ranks once; returns what made them fail, if they did."""
        split = attempt.split
        ranks = ranks_of(split.job.layout)
        reporter = Reporter(self._run)
        try:
            nodes = attempt.start(number)
            shown = f"{ranks} rank{'s' * (ranks > 1)}, {layout_words(split.job)}: {split.why}"
            State("running", shown, nodes).write(self._run)
            while (left := attempt.running(lambda: RunFolder.open(self._run).state() != "running")) is True:
                reporter.look()
                growth.look()
                time.sleep(_LOOK_S)
            reporter.look()
        except (LostHost, UserError) as error:
            return error
        return _cause(left, RunFolder.open(self._run))


class _Growth:
    """Whether a run on fewer ranks than it could have is asked to save and end, so that it continues on more."""

    def __init__(self, ray: Any, asked: Submission, job: Job, split: Split) -> None:
        self._ray, self._asked, self._run = ray, asked, Path(asked.run)
        self._job, self._ranks = job, ranks_of(split.job.layout)
        self._full = self._ranks == ranks_of(job.layout)
        self._found: tuple[list[int], int] = ([], 0)
        """How many ranks were last found for which machines."""
        self._known = self._cluster()
        self._saved: str | None = None
        """The newest checkpoint when more machines were first seen."""

    def _cluster(self) -> frozenset[str]:
        return frozenset(node["NodeID"] for node in self._ray.nodes() if node["Alive"])

    def look(self) -> None:
        """Ask for the end of the attempt once a checkpoint was saved after machines were added; nothing is lost then,
        and a machine that comes and goes costs at most one restart per checkpoint."""
        if self._full or not self._larger():
            return
        names = (path.name for path in (self._run / "checkpoints").glob("step-*"))
        newest = max(names, key=lambda name: (len(name), name), default="")
        if self._saved is None:
            self._saved = newest
        elif newest != self._saved and not (self._run / STOP_FILE).exists():
            write_atomic(self._run / STOP_FILE, GROW)

    def _larger(self) -> bool:
        """Whether machines were added that allow more ranks, and are free."""
        if not self._cluster() - self._known:
            return False
        room = room_of(self._ray.nodes(), self._asked.gpus)
        if room != self._found[0]:  # a search may take seconds
            chosen = next(splits(self._job, room, self._asked.min_ranks, self._asked.device), None)
            self._found = room, 0 if chosen is None else ranks_of(chosen.job.layout)
        free = int(self._ray.available_resources().get("GPU" if self._asked.gpus else "CPU", 0))
        return 0 < self._found[1] - self._ranks <= free


def _cause(codes: list[int], folder: RunFolder) -> Exception | None:
    """Why ranks ended that should have gone on; None after a normal end or a requested stop."""
    if folder.state() in ("done", "stopped") and not any(code not in (0, 85) for code in codes):
        return None
    stops = folder.events("stop")
    report = str(stops[-1].get("error") or "") if stops and folder.state() == "failed" else ""
    report = report or f"ranks exited with codes {sorted(set(codes))} and no error message"
    return UserError(report) if 2 in codes else RankFailure(report, None, "")
