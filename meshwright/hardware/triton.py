"""Whether kernels written by hand can be compiled here."""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""It comes with torch for GPUs; a GPU is needed besides."""
