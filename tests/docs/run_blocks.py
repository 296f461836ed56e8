"""Runs a page's Python blocks in order in one namespace, and writes down what each printed.

python run_blocks.py PAGE BLOCKS.json PRINTED.json
"""

import contextlib
import gc
import io
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    page, blocks, printed = sys.argv[1:]
    gc.set_threshold(50_000)  # as in a command
    sys.path.insert(0, "")  # as in a notebook: modules of the folder one works in
    namespace: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, block in enumerate(json.loads(Path(blocks).read_text(encoding="utf-8")), start=1):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(block, f"{page}, block {number}", "exec"), namespace)
        outputs.append(output.getvalue())
    Path(printed).write_text(json.dumps(outputs), encoding="utf-8")
    gc.freeze()
