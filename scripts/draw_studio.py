"""The guide's pictures of the studio: a plan, and three small trainings that differ in their learning rate.

    python scripts/draw_studio.py [FOLDER]

It trains them on the CPU first (minutes, kept in build/studio-runs), and needs Chromium as the browser tests do.
"""

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from meshwright.studio import Studio

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "build" / "studio-runs"
RATES = ("1e-3", "3e-3", "1e-2")
NOTE = "the lowest loss of the three\n"
PLAN = "#plan?model=llama-2-13b&gpu=rtx-3090&nodes=4&gpus=8&seq=1024&batch=65536&tokens=20B&price=0.4"
WHOLE = (
    "() => /predicted in \\d+ ms$/.test(document.getElementById('plan-status').textContent)"
    " && document.getElementById('chosen-title').textContent === "
    "document.querySelector('#layouts [aria-pressed=true]').textContent"
)
"""The whole search, and the pictures of its best."""


def main() -> None:
    """Train what is missing, and take both pictures."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    for rate in RATES:
        _train(rate)
    (RUNS / "lr-3e-3" / "notes.txt").write_text(NOTE, encoding="utf-8")
    server = Studio(RUNS)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        plan = _page(chromium, server.address + PLAN, 1190)
        plan.wait_for_function(WHOLE)
        plan.screenshot(path=out / "studio-plan.png")
        runs = _page(chromium, server.address + "#runs?smooth=3", 900)
        runs.wait_for_selector("[data-field=loss] path.smooth")
        runs.screenshot(path=out / "studio-runs.png")
        chromium.close()
    server.shutdown()
    server.close()


def _train(rate: str) -> None:
    """300 steps of a tiny model, once."""
    folder = RUNS / f"lr-{rate}"
    if folder.exists():
        return
    settings = [f"optimizer.lr={rate}", "run.steps=300", f"run.folder={folder}", "evaluation.every_steps=50"]
    settings += ["model.layers=2", "batch.sequence_length=64", "batch.global_batch=8"]  # small enough for two cores
    command = [sys.executable, "-m", "meshwright", "train", "demo", *(f"--set={each}" for each in settings)]
    subprocess.run(command, check=True)


def _page(chromium: Any, address: str, height: int) -> Any:
    page = chromium.new_page(viewport={"width": 1360, "height": height}, color_scheme="light")
    page.set_default_timeout(120_000)
    page.goto(address)
    return page


if __name__ == "__main__":
    main()
