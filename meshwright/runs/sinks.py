"""Other places to send a run's metrics to: W&B, TensorBoard, MLflow, users' own; each off unless log.sinks names it.

Each gets what the run folder gets: every row, every event, and the attempt's job, code and environment. A resumed run
continues its run in W&B and MLflow: `run_id` of the attempt is the same for all attempts.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.registries import SINKS
from meshwright.runs.folder import RunFolder

_LONGEST_PARAMETER = 500
"""The longest value MLflow stores, in characters."""
_MLFLOW_TAG = "meshwright.run"
"""By which a resumed run finds its run in MLflow, which chooses its ids itself."""


class Sink(Protocol):
    """One place to send metrics to."""

    def metric(self, row: dict[str, Any]) -> None:
        """Send the finite numbers of a step."""

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Send an event."""

    def close(self, finished: bool) -> None:
        """The attempt is over."""


def require_sinks(job: Job) -> None:
    """Reject a sink whose package is not installed."""
    for name in job.log.sinks:
        if name not in SINKS.built_in:
            SINKS.find(name)
        elif find_spec(name) is None:
            raise UserError(f'log.sinks has "{name}", which is not installed; pip install {name} or leave it out')


@contextmanager
def recorded_everywhere(folder: RunFolder, job: Job, attempt: int) -> "Iterator[Everywhere]":
    """A recorder for the run folder and every sink; a sink that fails is reported once and dropped."""
    recorder = Everywhere(folder)
    for name in job.log.sinks:
        recorder.open(name, job, attempt)
    finished = False
    try:
        yield recorder
        finished = True
    finally:
        recorder.close(finished)


class Everywhere:
    """Records to the run folder first, then to the sinks."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._sinks: dict[str, Sink] = {}

    def open(self, name: str, job: Job, attempt: int) -> None:
        """Start one sink with the attempt's description."""
        try:
            opened = _OPEN[name] if name in _OPEN else SINKS.find(name)
            description = {**self._folder.attempt(attempt), "run_id": self._folder.id()}
            self._sinks[name] = opened(self._folder.path, job, description)
        except Exception as error:
            self._leave_out(name, error)

    def metric(self, row: dict[str, Any]) -> None:
        """One row of numbers."""
        self._folder.metric(row)
        numbers = {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
        finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
        for name, sink in list(self._sinks.items()):
            try:
                sink.metric({**finite, "step": row["step"]})
            except Exception as error:
                self._leave_out(name, error)

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened."""
        self._folder.event(kind, **fields)
        for name, sink in list(self._sinks.items()):
            try:
                sink.event(kind, fields)
            except Exception as error:
                self._leave_out(name, error)

    def sample(self, step: int, text: str) -> None:
        """Save a text sample; only in the run folder."""
        self._folder.sample(step, text)

    def flush(self) -> None:
        """Write what the run folder's disk has not accepted yet."""
        self._folder.written()

    def close(self, finished: bool) -> None:
        """Flush what the sinks still buffer."""
        for sink in self._sinks.values():
            with suppress(Exception):  # the run folder has it all
                sink.close(finished)

    def _leave_out(self, name: str, error: Exception) -> None:
        """Training must not fail because a service does."""
        self._sinks.pop(name, None)
        self._folder.event("sink_failed", sink=name, error=f"{type(error).__name__}: {error}")


class _Wandb:
    """Writes to RUN/wandb, to be sent by `wandb sync`; WANDB_MODE=online streams instead."""

    def __init__(self, run: Path, job: Job, attempt: dict[str, Any]) -> None:
        wandb = import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "meshwright"),
            id=os.environ.get("WANDB_RUN_ID", attempt["run_id"]),
            resume="allow",
            name=run.name,
            group=run.name,
            dir=str(run),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config={**job.model_dump(mode="json"), **{key: attempt[key] for key in ("attempt", "code", "environment")}},
            # The attempt's own record of the code is sent; W&B would run what a checkout's git settings name.
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        # Not W&B's own count of rows, which drops the steps that a resumed or rewound run repeats.
        self._run.define_metric("*", step_metric="step")
        for name in attempt["files"]:
            self._run.save(str(run / name), base_path=str(run), policy="now")

    def metric(self, row: dict[str, Any]) -> None:
        self._run.log(row)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        self._run.summary.update({f"event/{kind}": json.dumps(fields, default=str)})

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class _TensorBoard:
    """Into RUN/tensorboard."""

    def __init__(self, run: Path, job: Job, attempt: dict[str, Any]) -> None:
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(run / "tensorboard"))
        self._writer.add_text("attempt", _indented(attempt), attempt["attempt"])

    def metric(self, row: dict[str, Any]) -> None:
        step = int(row.pop("step"))
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        self._writer.add_text(f"event/{kind}", _indented(fields), int(fields.get("step") or 0))

    def close(self, finished: bool) -> None:
        self._writer.close()


class _Mlflow:
    """Writes to RUN/mlflow, or wherever MLFLOW_TRACKING_URI points."""

    def __init__(self, run: Path, job: Job, attempt: dict[str, Any]) -> None:
        self._mlflow = mlflow = import_module("mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            # Newer releases want a database, which does not work on the shared file systems of clusters.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            mlflow.set_tracking_uri((run / "mlflow").absolute().as_uri())
        experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "meshwright"))
        tag = f"tags.`{_MLFLOW_TAG}` = '{attempt['run_id']}'"
        earlier = mlflow.search_runs([experiment.experiment_id], tag, max_results=1, output_format="list")
        if earlier:
            mlflow_run = mlflow.start_run(run_id=earlier[0].info.run_id)
        else:
            mlflow_run = mlflow.start_run(run_name=run.name, tags={_MLFLOW_TAG: attempt["run_id"]})
        fields = job.model_dump(mode="json")
        parameters = {f"{section}.{name}": value for section, part in fields.items() for name, value in part.items()}
        # MLflow refuses to change one; what a resumed run changed is in the attempt's file.
        new = {name: value for name, value in parameters.items() if name not in mlflow_run.data.params}
        mlflow.log_params({name: str(value)[:_LONGEST_PARAMETER] for name, value in new.items()})
        for name in attempt["files"]:
            mlflow.log_artifact(str(run / name))

    def metric(self, row: dict[str, Any]) -> None:
        step = int(row.pop("step"))
        self._mlflow.log_metrics(row, step=step)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        self._mlflow.set_tag(f"event.{kind}", json.dumps(fields, default=str))

    def close(self, finished: bool) -> None:
        self._mlflow.end_run("FINISHED" if finished else "FAILED")


_OPEN: dict[str, Callable[[Path, Job, dict[str, Any]], Sink]] = {
    "wandb": _Wandb,
    "tensorboard": _TensorBoard,
    "mlflow": _Mlflow,
}


def _indented(value: dict[str, Any]) -> str:
    """Indented so that a page shows it unwrapped."""
    return "\n".join(f"    {line}" for line in json.dumps(value, indent=2, default=str).splitlines())
