"""Measure this device: products, attention, copies, the loss, updates, launches and its link to the host; on a CPU the
operations between them too.

Operands are random and together larger than the device's caches, and times are medians. What does not fit in memory or
is not supported is skipped and listed; if time runs out, the coarse shapes are measured and the finer ones are not.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.cost import ADAMW_MOVED_BYTES
from meshwright.errors import UserError
from meshwright.hardware import Profile
from meshwright.hardware.profile import Attention, Copy, Decoder, Loss, Operation, Product, ProductKind, Update
from meshwright.measure.calibrate_shapes import AttentionShape, Shapes, Size, shapes_for
from meshwright.measure.collectives import collectives
from meshwright.measure.identity import device_words, identity, ranks_here
from meshwright.measure.operations import measured_decoders, measured_operation, update_call
from meshwright.measure.stopwatch import Stopwatch
from meshwright.measure.together import OtherRankFailed, Together
from meshwright.model import CausalAttend, attend
from meshwright.model.head import add_product, loss_of_logits
from meshwright.model.numbers import DTYPES
from meshwright.parallel.fp8 import FORWARD, GRADIENT
from meshwright.ranks import Place
from meshwright.torch_private.arithmetic import scaled_mm
from meshwright.torch_private.processes import give_gloo_one_thread
from meshwright.train.kernels import BACKENDS
from meshwright.train.memory_usage import resident_bytes

LIMIT_S = 100.0
QUICK_LIMIT_S = 25.0
_CACHE_BYTES = 256 * 2**20
"""Bytes of operands that calls cycle through: several times the cache of any GPU."""
_UPDATE_ENTRIES = 16 * 2**20
_CPU_LONGEST_S = 0.1
"""Limit on one call in a narrow format of a CPU: where it is emulated, calls take as long as their FLOPs."""
_CPU_TENSORS = 16
"""Tensors of an update on a CPU, where each costs some calls."""

Report = Callable[[str], None]


class Calibration:
    """One device, measured part by part."""

    def __init__(
        self, device: torch.device, quick: bool, report: Report, shapes: Shapes | None = None, ranks: int = 1
    ) -> None:
        self.device, self.report, self.together = device, report, Together(ranks)
        self.shapes = shapes or shapes_for(device)
        self.cuda = device.type == "cuda"
        goal_s = (0.02 if quick else 0.05) if self.cuda else (0.01 if quick else 0.03)
        self.watch = Stopwatch(device, goal_s, self.together)
        self.skipped: list[str] = []
        self._began = time.perf_counter()
        self._limit_s = QUICK_LIMIT_S if quick else LIMIT_S
        self._fastest: dict[str, float] = {}
        """FLOPs a second that narrow formats reached, by what was measured."""

    def profile(self) -> Profile:
        """Measure everything; about two minutes at most."""
        self.report("launches and copies")
        fields: dict[str, Any] = {"process_bytes": None if self.cuda else resident_bytes()}
        fields |= {"copies": tuple(self._copies()), "updates": tuple(self._updates())}
        fields |= self._launches() | self._host()
        # Each part may use the time left up to its own share; attention and the loss are few and come first.
        later = 0.0
        if not self.cuda:
            self.report("operations")
            later = 0.2
            fields["operations"] = tuple(self._until(0.30, self._operations(self.shapes.dtypes)))
            fields["decoders"] = tuple(self._decoders())
        self.report("attention")
        fields["attentions"] = tuple(self._until(0.30 + later, self._attentions(self.shapes.attentions)))
        self.report("loss")
        main: Iterable[tuple[None, int, int]] = ((None, *sizes) for sizes in self.shapes.losses)
        fields["losses"] = tuple(self._until(0.45 + later, self._losses(main)))
        self.report("products")
        fields["products"] = tuple(self._until(1.0, self._products(self.shapes.products())))
        if self.shapes.narrow:
            self.report("16-bit formats")
            for name, rows in self._narrow():
                fields[name] += rows
        if not fields["products"] or not fields["copies"]:
            raise UserError(
                f"nothing could be measured on {device_words(self.device)} ({'; '.join(self.skipped[:2])}); "
                "free its memory and retry"
            )
        return Profile(
            **identity(self.device),
            **fields,
            took_s=round(time.perf_counter() - self._began, 1),
            skipped=tuple(self.skipped),
        )

    def _narrow(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The same in narrow formats, after the main one, whose time they must not take."""
        shapes = self.shapes
        yield "operations", tuple(self._until(1.1, self._operations(shapes.narrow)))
        yield "attentions", tuple(self._until(1.18, self._attentions(shapes.narrow_attentions())))
        yield "losses", tuple(self._until(1.2, self._losses(shapes.narrow_losses())))
        yield "products", tuple(self._until(1.3, self._products(shapes.narrow_products())))

    def _until(self, share: float, results: Iterator[Any]) -> Iterator[Any]:
        """Yield results until a fraction of the total time is spent."""
        for result in results:
            yield result
            if self.together.most(time.perf_counter() - self._began) > share * self._limit_s:
                self.skipped.append("finer shapes: time ran out")
                return

    def _try(self, what: str, measure: Callable[..., Any], *arguments: Any) -> Any:
        """A measurement, or None with the reason recorded."""
        try:
            found = measure(*arguments)
            self.together.most()
            return found
        except OtherRankFailed:
            self.skipped.append(f"{what}: failed on another rank")
            return None
        except (RuntimeError, TypeError) as error:  # out of memory is the former, an unknown format either
            self.together.fail()
            if self.cuda:
                torch.cuda.empty_cache()
            first = (str(error).splitlines() or [""])[0]
            reason = "out of memory" if isinstance(error, torch.OutOfMemoryError) else first[:120]
            self.skipped.append(f"{what}: {reason}")
            return None

    def _copies(self) -> Iterator[Copy]:
        for size in self.shapes.copies:
            rounds = max(2, min(64, _CACHE_BYTES // size)) if self.cuda else 2
            found = self._try(f"a copy of {size} bytes", self._copy_s, size, rounds)
            if found is not None:
                yield Copy(moved_bytes=2 * size, seconds=found)

    def _copy_s(self, size: int, rounds: int) -> float:
        source = [torch.randn(size // 4, device=self.device) for _ in range(rounds)]
        target = [torch.empty_like(one) for one in source]
        return self.watch.median_s(lambda number: target[number % rounds].copy_(source[number % rounds]))

    def _updates(self) -> Iterator[Update]:
        for entries in self.shapes.updates:
            if self.cuda:
                found = self._try(f"an update of {entries}", self._update_s, entries, self.device)
                fields: dict[str, Any] = {}
            else:
                found = self._try(f"an update of {entries}", self._clipped_update_s, entries)
                fields = {"tensors": _CPU_TENSORS, "clipped": True}
            if found is not None:
                yield Update(parameters=entries, seconds=found, **fields)

    def _clipped_update_s(self, entries: int) -> float:
        return self.watch.median_s(update_call(entries, _CPU_TENSORS))

    def _update_s(self, entries: int, device: torch.device) -> float:
        masters = [torch.nn.Parameter(torch.randn(entries // 4, device=device)) for _ in range(4)]
        for master in masters:
            master.grad = torch.randn_like(master)
        optimizer = torch.optim.AdamW(masters, fused=True)
        watch = self.watch if device == self.device else Stopwatch(device, 0.3)
        return watch.median_s(lambda _: optimizer.step())

    def _launches(self) -> dict[str, float]:
        small = torch.zeros(16, device=self.device)
        launch = self._try("launches", self._launch_s, small)
        found = {} if launch is None else {"launch_s": launch}
        if self.cuda:
            kernel = self._try("kernels in a graph", self._graph_s, small)
            return found | ({} if kernel is None else {"kernel_s": kernel})
        return found | ({} if launch is None else {"kernel_s": launch})

    def _launch_s(self, small: torch.Tensor) -> float:
        """Host time only: calls return before the device is done."""
        times = []
        for _ in range(7):
            self.together.most()
            self.watch.wait()
            began = time.perf_counter()
            for _ in range(500):
                small.add_(1.0)
            times.append((time.perf_counter() - began) / 500)
        return self.together.most(sorted(times)[3])

    def _graph_s(self, small: torch.Tensor) -> float:
        calls, graph = 200, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                small.add_(1.0)
        return self.watch.median_s(lambda _: graph.replay()) / calls

    def _host(self) -> dict[str, float]:
        if not self.cuda:
            return {}
        found = {}
        host = self._try("page-locked memory", lambda: torch.empty(64 * 2**20, pin_memory=True))
        if host is not None:
            there = torch.empty_like(host, device=self.device)
            size = host.numel() * host.element_size()
            into = self.watch.median_s(lambda _: there.copy_(host, non_blocking=True))
            out = self.watch.median_s(lambda _: host.copy_(there, non_blocking=True))
            found = {"to_device_bytes_per_s": size / into, "to_host_bytes_per_s": size / out}
        update = self._try("an update on the host", self._update_s, _UPDATE_ENTRIES, torch.device("cpu"))
        return found | (
            {} if update is None else {"host_update_bytes_per_s": ADAMW_MOVED_BYTES * _UPDATE_ENTRIES / update}
        )

    def _operations(self, dtypes: Iterable[str]) -> Iterator[Operation]:
        for (name, rows, width), dtype in itertools.product(self.shapes.operations, dtypes):
            what = f"{name} of {rows} × {width} in {dtype}"
            found = self._try(what, measured_operation, name, dtype, rows, width, self.watch)
            if found is not None:
                yield found

    def _too_long(self, what: str, dtype: str, flops: float) -> bool:
        """Whether a call in a narrow format would take long, by the rate of those before it."""
        known = self._fastest.get(f"{what} in {dtype}") if dtype in self.shapes.narrow else None
        return known is not None and flops > _CPU_LONGEST_S * known

    def _took(self, what: str, dtype: str, flops: float, seconds: float) -> None:
        key = f"{what} in {dtype}"
        self._fastest[key] = max(flops / seconds, self._fastest.get(key, 0.0))

    def _decoders(self) -> Iterator[Decoder]:
        for group in self.shapes.decoder_groups(self.together.ranks):
            yield from measured_decoders(group, self.device, self.together)

    def _attentions(self, shapes: Iterable[AttentionShape]) -> Iterator[Attention]:
        for one in shapes:
            if not self.cuda:
                yield from self._cpu_attentions(one)
                continue
            for kernel, groups in [(name, groups) for name in BACKENDS for groups in _groups(one)]:
                what = f"{kernel} attention, {groups} groups, heads of {one.head_dim}, {one.sequence} tokens"
                found = self._try(what, self._attention_s, one, kernel, groups)
                if found is not None:
                    yield one.measured(f"{kernel}, {groups}", *found)

    def _attention_s(self, one: AttentionShape, kernel: str, groups: str) -> tuple[float, float]:
        from torch.nn.attention import sdpa_kernel

        dtype = DTYPES[one.dtype]

        def drawn(count: int) -> torch.Tensor:
            made = torch.randn(one.batch, one.sequence, count, one.head_dim, dtype=dtype, device=self.device)
            return made.transpose(1, 2).requires_grad_()

        q, k, v = drawn(one.heads), drawn(one.kv_heads), drawn(one.kv_heads)
        grad = torch.randn_like(q)

        def forward(_: int) -> torch.Tensor:
            keys, values = attend.expanded(k, v, one.heads) if groups == "expanded" else (k, v)
            grouped = keys.shape[1] != one.heads
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=grouped)

        with sdpa_kernel(BACKENDS[kernel]):
            ahead = self.watch.median_s(forward)
            out = forward(0)
            back = self.watch.median_s(lambda _: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
            return ahead, back

    def _cpu_attentions(self, one: AttentionShape) -> Iterator[Attention]:
        """The one kernel of a CPU as a model calls it, causal and with a mask, which costs it the whole square."""
        for kernel, window in (("cpu", None), ("cpu, masked", one.sequence // 2)):
            what = f"{kernel} attention in {one.dtype}, heads of {one.head_dim}, {one.sequence} tokens"
            if self._too_long(kernel, one.dtype, one.flops):
                continue
            found = self._try(what, self._cpu_attention_s, one, CausalAttend(window))
            if found is not None:
                self._took(kernel, one.dtype, one.flops, max(found))
                yield one.measured(kernel, *found)

    def _cpu_attention_s(self, one: AttentionShape, call: CausalAttend) -> tuple[float, float]:
        def drawn(count: int) -> torch.Tensor:
            made = torch.randn(one.batch, one.sequence, count, one.head_dim, dtype=DTYPES[one.dtype])
            return made.requires_grad_()

        q, k, v = drawn(one.heads), drawn(one.kv_heads), drawn(one.kv_heads)
        ahead = self.watch.median_s(lambda _: call(q, k, v, None, None))
        out, _ = call(q, k, v, None, None)
        grad = torch.randn_like(out)
        return ahead, self.watch.median_s(lambda _: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))

    def _losses(self, sizes: Iterable[tuple[str | None, int, int]]) -> Iterator[Loss]:
        for dtype, rows, vocabulary in sizes:
            what = f"a loss over {rows} × {vocabulary} logits" + (f" in {dtype}" if dtype else "")
            found = self._try(what, self._loss_s, dtype or self.shapes.dtypes[0], rows, vocabulary)
            if found is not None:
                fields = {"rows": rows, "vocabulary": vocabulary, "compiled": False, "seconds": found}
                yield Loss.model_validate(fields | ({"dtype": dtype} if dtype else {}))

    def _loss_s(self, dtype: str, rows: int, vocabulary: int) -> float:
        logits = [torch.randn(rows, vocabulary, dtype=DTYPES[dtype], device=self.device) for _ in range(2)]
        labels = torch.randint(vocabulary, (rows, 1), device=self.device)
        shares = torch.full((rows, 1), 1e-3, device=self.device)
        return self.watch.median_s(lambda number: loss_of_logits(logits[number % 2], labels, shares, True))

    def _products(self, sizes: Iterable[Size]) -> Iterator[Product]:
        warm = torch.randn(4096, 4096, dtype=torch.bfloat16, device=self.device) if self.cuda else None
        if warm is not None:
            self.watch.busy(lambda _: warm @ warm, 1.0)
        for dtype, kind, rows, columns, inner in sizes:
            if dtype == "fp8" and not self._has_fp8():
                continue
            flops = 2.0 * rows * columns * inner
            if self._too_long("products", dtype, flops):
                continue
            what = f"a {dtype} product ({kind}) of {rows} × {columns} × {inner}"
            found = self._try(what, self._product_s, dtype, kind, rows, columns, inner)
            if found is not None:
                self._took("products", dtype, flops, found)
                yield Product(dtype=dtype, kind=kind, rows=rows, columns=columns, inner=inner, seconds=found)

    def _has_fp8(self) -> bool:
        return self.cuda and torch.cuda.get_device_capability(self.device) >= (8, 9)

    def _product_s(self, dtype: str, kind: ProductKind, rows: int, columns: int, inner: int) -> float:
        if dtype == "fp8":
            return self._fp8_product_s(kind, rows, columns, inner)
        if self.cuda:
            torch.set_float32_matmul_precision("highest" if dtype == "fp32" else "high")
        form = DTYPES[dtype]
        rounds = self._rounds((rows * inner + inner * columns + rows * columns) * form.itemsize)

        def drawn(height: int, width: int) -> list[torch.Tensor]:
            return [torch.randn(height, width, dtype=form, device=self.device) for _ in range(rounds)]

        # As autograd calls them: x @ Wᵀ, dy @ W and dyᵀ @ x, all matrices stored by rows.
        if kind == "forward":
            left, right = drawn(rows, inner), drawn(columns, inner)
            return self.watch.median_s(lambda n: left[n % rounds] @ right[n % rounds].t())
        if kind == "input":
            left, right = drawn(rows, inner), drawn(inner, columns)
            return self.watch.median_s(lambda n: left[n % rounds] @ right[n % rounds])
        left, right = drawn(inner, rows), drawn(inner, columns)
        if kind == "weight":
            return self.watch.median_s(lambda n: left[n % rounds].t() @ right[n % rounds])
        total = torch.zeros(rows, columns, device=self.device)
        return self.watch.median_s(lambda n: add_product(total, left[n % rounds].t(), right[n % rounds]))

    def _fp8_product_s(self, kind: ProductKind, rows: int, columns: int, inner: int) -> float:
        """Operands with the summed dim last, as in the trainer; formats and accumulation as in its passes."""
        rounds = self._rounds(rows * inner + inner * columns + 2 * rows * columns)
        first = FORWARD if kind == "forward" else GRADIENT

        def drawn(height: int, form: torch.dtype) -> list[torch.Tensor]:
            return [torch.randn(height, inner, device=self.device).to(form) for _ in range(rounds)]

        left, right, scale = drawn(rows, first), drawn(columns, FORWARD), torch.ones((), device=self.device)
        fast = kind == "forward"

        def call(n: int) -> torch.Tensor:
            right_t = right[n % rounds].t()
            made: torch.Tensor = scaled_mm(
                left[n % rounds], right_t, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast
            )
            return made

        return self.watch.median_s(call)

    def _rounds(self, size: int) -> int:
        return max(2, min(64, -(-_CACHE_BYTES // size))) if self.cuda else 2


def _groups(one: AttentionShape) -> tuple[str, ...]:
    return ("native", "expanded") if one.heads != one.kv_heads else ("native",)


def measure_profile(device: torch.device, place: Place | None, *, quick: bool, report: Report) -> Profile | None:
    """The profile on rank 0 or in a single process; None on other ranks."""
    if place is None:
        return Calibration(device, quick, report).profile()
    give_gloo_one_thread()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    # Ranks on a CPU share its cores, caches and memory: what each reaches is measured while the others do the same.
    together = place.size if device.type == "cpu" else 1
    measures = place.rank == 0 or together > 1
    profile = Calibration(device, quick, report, ranks=together).profile() if measures else None
    dist.barrier()  # nothing else may run while links are measured
    local = ranks_here(place)
    report("collectives")
    found = collectives(device, lambda ranks: len({rank // local for rank in ranks}))
    dist.destroy_process_group()
    if profile is None or place.rank > 0:
        return None
    return profile.model_copy(update={"collectives": tuple(found)} | ({"ranks": local} if profile.on_cpu else {}))
