"""The planner process: requests as lines of JSON on standard input, answers on standard output.

It is started as `python -m meshwright.studio.worker` and exits when its input closes, so none is left behind.
"""

import gc
import json
import os
import sys
import threading
from queue import SimpleQueue
from typing import Any

from meshwright.studio.planner import Planner


def main() -> None:
    """Answer until the input ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # library output must not mix with the answers
    waiting: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    threading.Thread(target=_read, args=(waiting,), daemon=True).start()
    planner = Planner(interrupted=lambda: not waiting.empty())
    out.write(json.dumps({"ready": True}) + "\n")
    out.flush()
    while (line := waiting.get()) is not None:
        try:
            answer = planner.answer(line["question"])
        except Exception as error:
            answer = {"error": f"the planner failed ({type(error).__name__}: {error}); please report it", "bug": True}
        out.write(json.dumps({"id": line["id"], "answer": answer}) + "\n")
        out.flush()
        gc.freeze()  # the planner's tables stay: scanning them for garbage would delay an answer by 100 ms


def _read(waiting: "SimpleQueue[dict[str, Any] | None]") -> None:
    for line in sys.stdin:
        waiting.put(json.loads(line))
    waiting.put(None)


if __name__ == "__main__":
    main()
