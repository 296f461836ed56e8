"""The compiler: what it imports, what it needs, shapes it gets wrong. torch 2.11 to 2.15."""

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
