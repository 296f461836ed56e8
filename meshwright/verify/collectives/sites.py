"""Where in the code an operation was issued, and through which torch call."""

import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_PACKAGES = str(Path(__file__).parents[3])
_STANDARD = sysconfig.get_path("stdlib")
_C10D = dist.distributed_c10d.__file__
# Layers that every operation passes through: a frame there says nothing about the caller.
_PLUMBING = ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py", "_ops.py", "_contextlib.py")


class Site(NamedTuple):
    """The call that led to an operation."""

    place: str
    """file:line of the nearest frame outside torch, and torch's own nearest in brackets where that is in between."""
    call: str
    """The function of torch.distributed that was called; empty where none was in Python."""
    objects: bool
    batch: FrameType | None
    """The frame of batch_isend_irecv where it is part of one."""


def call_site() -> Site:
    """The call site of the operation being issued; for a process group's methods."""
    frame: FrameType | None = sys._getframe(1)
    call, objects, batch, torchs = "", False, None, ""
    while frame is not None:
        code = frame.f_code
        where = _kind(code)
        if where == "outside":
            place = f"{_shown(code.co_filename)}:{frame.f_lineno}"
            return Site(f"{place} ({torchs})" if torchs else place, call, objects, batch)
        if where == "c10d":
            call = call or code.co_name
            objects = objects or "object" in code.co_name
            batch = frame if code.co_name == "batch_isend_irecv" else batch
        elif where == "torch" and not torchs:
            torchs = f"{_shown(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return Site(torchs or "torch", call, objects, batch)  # one of autograd's threads


_kinds: dict[CodeType, str] = {}


def _kind(code: CodeType) -> str:
    kind = _kinds.get(code)
    if kind is None:
        kind = _kinds[code] = _kind_of(code.co_filename)
    return kind


def _kind_of(path: str) -> str:
    if path == _C10D:
        return "c10d"
    if path.startswith(_TORCH):
        return "passed" if path.endswith(_PLUMBING) else "torch"
    if path.startswith((_HERE, "<")) or (path.startswith(_STANDARD) and "site-packages" not in path):
        return "passed"
    return "outside"


def _shown(path: str) -> str:
    if path.startswith(_TORCH):
        return "torch" + path.removeprefix(_TORCH)
    return path.removeprefix(_PACKAGES + "/")
