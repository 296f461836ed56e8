"""Compiled blocks in the layouts where they have gone wrong, against one eager process.

Here the compiler's own backend is left out (`aot_eager`: graphs, autograd and collectives as compiled, operations as
they are), so that a check takes seconds. The matrix has every axis with the whole compiler.
"""

from functools import partialmethod
from typing import Any

import pytest
from torch import nn

from meshwright.job import Job
from meshwright.verify import check, load_matrix

BASE = next(line.job for line in load_matrix() if line.name == "llama · tp 2").model_dump()
UNMASKED: dict[str, Any] = {"data": {"mask_documents": False}}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp 2 without sp, dropout": ({"tp": 2, "sp": False}, {"model": {"dropout": 0.1}, "batch": {"global_batch": 2}}),
    "pp 2 · tp 2": ({"pp": 2, "tp": 2}, UNMASKED),
    "pp 2, selective recompute": ({"pp": 2}, {"memory": {"recompute": "selective"}}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_equals_one_eager_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, changes = LAYOUTS[name]
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    job = {**BASE, "layout": layout, "run": BASE["run"] | {"compile": True, "steps": 2}}
    job["model"] = {**job["model"], "layers": 2}
    for section, fields in changes.items():
        job[section] = {**job[section], **fields}
    verdict = check(Job.model_validate(job))
    assert verdict.ok, verdict.first_wrong
