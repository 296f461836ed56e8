"""`meshwright.open_run`: a run folder as an object, while it trains or after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.checkpoints import Checkpoint
from meshwright.runs import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from meshwright.data import Shown
    from meshwright.job import Job
    from meshwright.reading import Row
    from meshwright.runs.chat import Chat
    from meshwright.runs.folder import State


class Run:
    """A run: its rows, its job, its checkpoints and what they can be used for. Every question reads the folder anew."""

    def __init__(self, path: Path | str) -> None:
        self._folder = RunFolder.open(Path(path))
        self.path = self._folder.path

    def __repr__(self) -> str:
        last = self._folder.newest().last()
        return f"Run({str(self.path)!r}, {self.state}, step {0 if last is None else last['step']})"

    @property
    def job(self) -> Job:
        """The job as it was last run; nothing of it is run here."""
        return self._folder.resolved_job(trust=True)

    @property
    def state(self) -> State:
        """running, done, stopped or failed."""
        return self._folder.state()

    @property
    def rows(self) -> list[Row]:
        """The numbers of every step: step, loss, grad_norm, lr, tokens, step_s, tokens_per_s, memory_bytes …; of a very
        long run the extremes of every stretch."""
        return [row for row in self._folder.metrics() if "loss" in row]

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [row["loss"] for row in self.rows]

    @property
    def evaluations(self) -> list[Row]:
        """What evaluations found: val_loss, or set and set_loss, by step."""
        return [row for row in self._folder.metrics() if "loss" not in row]

    @property
    def samples(self) -> dict[int, str]:
        """Texts the model wrote on the way, by step."""
        return self._folder.samples()

    @property
    def traces(self) -> list[Path]:
        """The profiles it wrote, by attempt, step and rank: gzipped JSON for Perfetto."""
        from meshwright.runs.traces import traces_of

        return list(traces_of(self.path))

    def events(self, *kinds: str) -> list[Row]:
        """What happened: start, checkpoint, stop and so on, or some kinds of it."""
        return self._folder.events(*kinds)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Its complete checkpoints, the newest first."""
        from meshwright.checkpoint import Damaged, checkpoints

        return [Checkpoint(found.path) for found in checkpoints(self.path) if not isinstance(found, Damaged)]

    @property
    def checkpoint(self) -> Checkpoint:
        """The newest complete one."""
        return Checkpoint(self.path)

    def weights(self) -> dict[str, Tensor]:
        """The newest checkpoint's parameters, whole and in fp32, whatever layout saved them."""
        newest = self.checkpoint
        return {name.removeprefix("model/"): newest[name] for name in newest.names("model/")}

    def generate(
        self,
        prompt: str,
        tokens: int = 128,
        *,
        images: Sequence[Path | str] = (),
        videos: Sequence[Path | str] = (),
        audio: Sequence[Path | str] = (),
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
        device: str = "auto",
    ) -> str:
        """The prompt and its continuation by the newest weights; a temperature of 0 takes the likeliest token.

        Images and videos are for a model that reads pictures, audio is for one that listens: at `<image>`, `<video>`
        and `<audio>` in the prompt or before it.
        """
        from meshwright.runs.generate import generate_from_run

        shown = _shown(images, videos, audio)
        return generate_from_run(self.path, prompt, tokens, temperature, top_p, seed, device, shown)[0]

    def chat(
        self,
        system: str | None = None,
        *,
        images: Sequence[Path | str] = (),
        videos: Sequence[Path | str] = (),
        audio: Sequence[Path | str] = (),
        tokens: int = 512,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
        device: str = "auto",
    ) -> Chat:
        """A conversation with the newest weights, which stay loaded: `ask(question)` is the answer, `stream(question)`
        gives it part by part, `messages` is all that was said. Files are part of the first question."""
        from meshwright.runs.chat import open_chat

        shown = _shown(images, videos, audio)
        return open_chat(
            self.path, device, system, shown, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed
        )

    def report(self) -> Path:
        """Write the run's page and return its path."""
        from meshwright.studio import write_report

        write_report(self.path)
        return self.path / "report.html"

    def export(self, out: Path | str, dtype: str = "fp32") -> Path:
        """Write the newest weights as a Hugging Face folder."""
        return self.checkpoint.export(out, dtype)

    def column(self, name: str) -> list[Any]:
        """One of the numbers of every step, as `step_s`; None where a row lacks it."""
        return [row.get(name) for row in self.rows]


def _shown(*kinds: Sequence[Path | str]) -> Shown:
    from meshwright.data import Shown

    return Shown(*([Path(file) for file in files] for files in kinds))


def open_run(folder: Path | str) -> Run:
    """A run folder that `train` made, here or elsewhere; no code that it names is run."""
    return Run(folder)
