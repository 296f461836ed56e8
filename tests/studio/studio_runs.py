"""Small run folders for the studio's tests, where its pictures go, and when a plan is on the page."""

from pathlib import Path
from typing import Any

from meshwright.runs import RunFolder

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"


def make_run(
    path: Path, steps: int = 60, ended: str | None = "finished", raw: str = "[run]\nsteps = 60\n"
) -> RunFolder:
    """A small run with everything the page shows."""
    run = RunFolder.create(path, raw, {"run": {"steps": steps}, "model": {"width": 64}}, ["meshwright"])
    run.event("start", device="CPU", parameters=1_000_000, gpu=None, ranks=2, attempt=0, step=0)
    for step in range(1, steps + 1):
        run.metric(metric(step))
    run.metric({"step": steps, "val_loss": 2.5, "attempt": 0})
    run.event("checkpoint", step=steps, bytes=100)
    run.sample(steps, "Once upon a time")
    (path / "logs").mkdir()
    (path / "logs" / "rank-1.err").write_text("warming up\n")
    if ended:
        run.event("stop", reason=ended, step=steps)
    return run


def metric(step: int, **fields: object) -> dict[str, object]:
    """One row of numbers."""
    plain = {"loss": 2.0 + 6.0 / step, "grad_norm": 1.0, "lr": 1e-4, "tokens": 4096 * step, "tokens_per_s": 5000.0}
    more = {"mfu": 0.4, "step_s": 0.8, "memory_bytes": 2**30, "data_wait_s": 1e-3, "attempt": 0}
    return {"step": step, **plain, **more, **fields}


def planned(page: Any) -> str:
    """Wait until the whole search and the pictures of its best are there; return the pictures."""
    page.wait_for_function(
        "() => /predicted in \\d+ ms$/.test(document.getElementById('plan-status').textContent)"
        " && document.querySelector('#pictures svg')"
        " && JSON.parse(document.getElementById('chosen').dataset.shown || '[{}]')[0].gpu === "
        "document.querySelector('[name=gpu]').value"
    )
    page.wait_for_function(
        "() => document.getElementById('chosen-title').textContent === "
        "document.querySelector('#layouts [aria-pressed=true]').textContent"
    )
    return str(page.inner_html("#pictures"))
