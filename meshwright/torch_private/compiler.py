"""The compiler: what it imports, what it needs, shapes it gets wrong. torch 2.11 to 2.15."""

import hashlib
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import current_flash_attention_impl

_OURS = "|meshwright "
"""Where our part of the key of compiled code begins, after a user's own."""


def preload(compiles: bool = False) -> None:
    """Import what torch imports on first use, which every forked process would repeat: the compiler too if needed."""
    # Torch counts GPUs with NVML then: CUDA's own count, which these imports make, would leave forks without GPUs.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch._dynamo
    import torch._inductor.utils

    if compiles:
        import torch._inductor.compile_fx  # noqa: F401


def eagerly() -> AbstractContextManager[Any]:
    """Compiled functions run as they are written, and nothing is compiled, inside the context."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def start_compiler(traced: str, reuse: bool) -> None:
    """Import the compiler and start the processes that compile kernels, which take seconds to be ready.

    With `reuse`, later processes with the same code, that name the same as `traced`, reuse what it traced also for
    graphs with autograd functions, which torch does not do by default.
    """
    import torch._functorch.config
    import torch._inductor.compile_fx
    from torch._inductor.async_compile import maybe_warm_pool

    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = reuse
    # Torch's own key lacks what is decided after it was made: the gradients of our operations, of which it has the
    # names, what a sharded tensor does on this rank alone, and the kernel of attention.
    users, _, _ = torch.compiler.config.cache_key_tag.partition(_OURS)
    torch.compiler.config.cache_key_tag = f"{users}{_OURS}{_code()} {traced} {_attention()}"
    maybe_warm_pool()


def generate_plain_code() -> None:
    """In this process, compile CPU code that runs a few times: fast to compile and slow to run.

    Without vector instructions a kernel takes half as long to compile, and no test programs are compiled to find out
    what the CPU can do. This process compiles by itself: where there is Triton, torch would start processes for it,
    and each imports torch again.
    """
    from torch._inductor import config

    config.cpp.vec_isa_ok = False
    config.compile_threads = 1


def _attention() -> str:
    """Which kernels torch may choose for attention."""
    cuda: Any = torch.backends.cuda
    allowed = {"cudnn": cuda.cudnn_sdp_enabled(), "flash": cuda.flash_sdp_enabled(), "math": cuda.math_sdp_enabled()}
    allowed["efficient"] = cuda.mem_efficient_sdp_enabled()
    return f"{allowed} {current_flash_attention_impl()}"


@cache
def _code() -> str:
    """A hash of this package's code."""
    whole = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()


def given_cache() -> str | None:
    """The user's folder for compiled code; None where torch, when imported, has named its temporary one (2.13)."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return None if given and Path(given) == Path(default_cache_dir()).absolute() else given


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
