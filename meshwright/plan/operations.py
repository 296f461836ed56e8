"""What the operations between products and attention take on a CPU, each as its calibration measured it.

T tokens of a micro-batch, D width, F ffn width, H and K query and kv heads of this rank, E head size, V vocabulary.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware import Profile
from meshwright.hardware.profile import OperationName, Update
from meshwright.job import Job
from meshwright.layout import kv_heads_of

Seconds = tuple[float, float]
"""Of the forward and the backward."""
_NARROW = 0.1
"""Squared doublings within which measured sizes count about alike."""
_FLAT = 0.02
"""How much a slope between measured sizes must be needed."""


class Surface:
    """Seconds per entry over rows and width: between measured sizes the plane, in doublings, through the nearest."""

    def __init__(self, rows: Iterable[tuple[int, int, float]]) -> None:
        taken = [(height, width, seconds) for height, width, seconds in rows if seconds > 0]
        self._points = np.log2(np.array([one[:2] for one in taken], dtype=float).reshape(-1, 2))
        self._values = np.log(np.array([seconds / (height * width) for height, width, seconds in taken]))

    def seconds(self, rows: float, width: float) -> float:
        """Seconds at a size; beyond the measured ones as many per entry as there."""
        if not len(self._values):
            return 0.0
        low, high = self._points.min(axis=0), self._points.max(axis=0)
        away = self._points - np.clip(np.log2([rows, width]), low, high)
        weights = 1.0 / ((away**2).sum(axis=1) + _NARROW) ** 2
        columns = np.column_stack([np.ones(len(away)), away])
        normal: NDArray[np.float64] = columns.T @ (columns * weights[:, None])
        normal += np.diag([0.0, _FLAT, _FLAT]) * weights.sum()
        at, *_ = np.linalg.solve(normal, columns.T @ (weights * self._values))
        return float(np.exp(at)) * rows * width


class Operations:
    """A profile's operations and updates, at any size."""

    def __init__(self, profile: Profile) -> None:
        self._surfaces: dict[tuple[str, str], tuple[Surface, Surface]] = {}
        for key in {(one.name, one.dtype) for one in profile.operations}:
            rows = [one for one in profile.operations if (one.name, one.dtype) == key]
            self._surfaces[key] = (
                Surface((one.rows, one.width, one.forward_s) for one in rows),
                Surface((one.rows, one.width, one.backward_s) for one in rows),
            )
        self._updates = _Updates([one for one in profile.updates if one.clipped])

    def of(self, name: OperationName, dtype: str, rows: float, width: float) -> Seconds:
        """Forward and backward; in a format that was not measured as in fp32."""
        pair = self._surfaces.get((name, dtype)) or self._surfaces.get((name, "fp32"))
        return (0.0, 0.0) if pair is None else (pair[0].seconds(rows, width), pair[1].seconds(rows, width))

    def block(self, job: Job, tokens: int) -> Seconds:
        """Norms, rotation, activation, biases, dropout, residuals, and sums of gradients of what is used twice."""
        model, tp, dtype = job.model, job.layout.tp, job.precision.format
        stream = tokens / (tp if job.layout.sp else 1), model.width
        heads, kv_heads = tokens * (model.heads // tp), tokens * kv_heads_of(job)
        inner = tokens, model.ffn_width / tp
        parts = [self.of(model.norm, dtype, *stream)] * 2
        if model.positions == "rope":
            parts += [self.of("rotary", dtype, rows, model.head_dim) for rows in (heads, kv_heads)]
        if model.qk_norm:
            parts += [self.of("rmsnorm", dtype, rows, model.head_dim) for rows in (heads, kv_heads)]
        parts.append(self.of("swiglu" if model.activation == "swiglu" else "gelu", dtype, *inner))
        if model.dropout > 0:
            parts += [self.of("dropout", dtype, *stream)] * 2
        if model.qkv_bias:
            widths = (model.heads // tp, kv_heads_of(job), kv_heads_of(job))
            parts += [self.of("bias", dtype, tokens, width * model.head_dim) for width in widths]
        if model.linear_bias:
            parts += [self.of("bias", dtype, *stream)] * 2 + [self.of("bias", dtype, *inner)]
        forward, backward = _sum(parts)
        added = self.of("sum", dtype, *stream)[0]
        # Queries, keys and values share an input, and so do gate and up; the stream continues beside each half.
        again = 2 + 2 + (model.activation == "swiglu")
        return forward + 2 * added, backward + again * added

    def head(self, job: Job, tokens: int, vocabulary: int) -> Seconds:
        """The final norm, and the matrix's gradient, which starts as zeros and is scaled in the backward."""
        model, dtype = job.model, job.precision.format
        norm, norm_back = self.of(model.norm, dtype, tokens, model.width)
        zeros, _ = self.of("fill", "fp32", vocabulary, model.width)
        scaled = self.of("scale", dtype, vocabulary, model.width)[0] + self.of("scale", dtype, tokens, model.width)[0]
        return norm + zeros, norm_back + scaled

    def embedding(self, job: Job, tokens: int) -> Seconds:
        """Rows looked up; in the backward a table of zeros that they are added to, and to the head's if it is tied."""
        model, dtype = job.model, job.precision.format
        rows, rows_back = self.of("embedding", dtype, tokens, model.width)
        tables = [model.vocab_size / job.layout.tp]
        if model.positions == "learned":
            rows, rows_back = 2 * rows + self.of("sum", dtype, tokens, model.width)[0], 2 * rows_back
            tables.append(model.max_sequence_length)
        backward = rows_back + sum(self.of("fill", dtype, table, model.width)[0] for table in tables)
        if model.tied and job.layout.pp == 1:
            backward += self.of("sum", dtype, tables[0], model.width)[0]
        return rows, backward

    def update_s(self, parameters: float, tensors: int) -> float | None:
        """The norm of the gradients, clipping and AdamW; None where they were not measured together."""
        return self._updates.seconds(parameters, tensors)


class _Updates:
    """An update's calls for each tensor, and its entries by their number."""

    def __init__(self, rows: list[Update]) -> None:
        self._rows = sorted(rows, key=lambda one: one.parameters)

    def seconds(self, parameters: float, tensors: int) -> float | None:
        if not self._rows:
            return None
        smallest = self._rows[0]
        call_s = smallest.seconds / smallest.tensors
        sizes = np.array([one.parameters for one in self._rows])
        # Entries of the smallest take nothing beside its calls.
        each = [max(1e-12, one.seconds - call_s * one.tensors) / one.parameters for one in self._rows[1:]]
        rate = np.exp(np.interp(np.log(parameters), np.log(sizes[1:]), np.log(each))) if each else 0.0
        return call_s * tensors + float(rate) * parameters


def _sum(parts: list[Seconds]) -> Seconds:
    return sum(forward for forward, _ in parts), sum(backward for _, backward in parts)
