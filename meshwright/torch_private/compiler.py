"""The compiler: what it imports, what it needs, shapes it gets wrong. torch 2.11 to 2.15."""

import re
import sys
from collections.abc import Callable
from typing import Any


def preload() -> None:
    """Import what torch imports on first use, which every forked process would repeat."""
    import torch._dynamo
    import torch._inductor.utils  # noqa: F401


def find_cpp_compiler() -> str | None:
    """The C++ compiler that compiled CPU code needs; None if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(get_cpp_compiler())
    except InvalidCxxCompiler:
        return None


def set_shapes(operation: Any, results: Callable[..., Any]) -> None:
    """Tell the compiler the shapes and formats of what an operation returns."""
    from torch._C import DispatchKey

    operation.py_kernels[DispatchKey.Meta] = results
    operation._dispatch_cache.clear()


def graphs_and_stops() -> tuple[int, int]:
    """How many graphs the compiler has made in this process, and how often it stopped tracing one."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0, 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def where_it_stopped() -> str:
    """Why it stopped the last time, in its own words."""
    from torch._dynamo.utils import counters

    lines = [line.strip() for line in next(reversed(counters["graph_break"]), "").splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    words = next(iter([*explained, *lines]), "no reason given").rstrip(".")
    return re.sub(r" at 0x[0-9a-f]+", "", words)
