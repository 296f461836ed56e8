"""What NCCL, or torch's group over it, refuses although gloo accepts it; checked as if every tensor were on a GPU.

Objects are left out: a job's groups are created for "cpu:gloo,cuda:nccl", and torch keeps pickled objects on the CPU.
"""

from collections.abc import Iterator, Sequence

from meshwright.verify.collectives.record import Operation, Record

DTYPES = {
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
}  # fmt: skip
"""Number formats that torch passes to NCCL; complex tensors reach a group as real ones."""

MISSING = {"recv_anysource", "all_gather_coalesced", "monitored_barrier"}
"""Operations that NCCL's group does not support."""

BITWISE = {"BAND", "BOR", "BXOR"}
FLOATS = {"float64", "float32", "float16", "bfloat16"}


def refused(records: Sequence[Record]) -> list[str]:
    """A sentence for each operation that a GPU job could not issue."""
    return [
        f"rank {operation.rank} issues {operation.what}: {reason}"
        for record in records
        for operation in record.operations
        for reason in _reasons(operation)
    ]


def _reasons(operation: Operation) -> Iterator[str]:
    if operation.is_message and operation.peer == operation.rank:
        yield "a rank cannot send to itself"
    if operation.objects:
        return
    if operation.kind in MISSING:
        yield f"NCCL has no {operation.kind}"
    devices = sorted({spec.device for spec in operation.tensors})
    if len(devices) > 1:
        yield f"its tensors are on {' and '.join(devices)}"
    if any(not spec.contiguous for spec in operation.tensors):
        yield "NCCL takes contiguous tensors only"
    for dtype in sorted({spec.dtype for spec in operation.tensors} - DTYPES):
        yield f"NCCL has no {dtype}"
    yield from _reduction(operation)
    yield from _uneven(operation)


def _reduction(operation: Operation) -> Iterator[str]:
    reduce, dtypes = operation.reduce, {spec.dtype for spec in operation.tensors}
    if reduce is None:
        return
    if reduce in BITWISE:
        yield f"NCCL has no {reduce}"
    if any(dtype.startswith("float8") for dtype in dtypes):
        yield "NCCL's group does not reduce 8-bit floats"
    if reduce == "AVG" and "bool" in dtypes:
        yield "NCCL's group does not average booleans"
    elif reduce == "AVG" and not dtypes <= FLOATS:
        yield "NCCL rounds an average of integers down"
    if reduce == "PREMUL_SUM" and not dtypes <= FLOATS:
        yield "NCCL scales floats only"


def _uneven(operation: Operation) -> Iterator[str]:
    size, inputs, outputs = len(operation.ranks), operation.inputs, operation.outputs
    if operation.kind.startswith("all_gather_into_tensor"):
        if any(source.numel * size != whole.numel for source, whole in zip(inputs, outputs, strict=True)):
            yield f"uneven: the output must be {size} times the input, but is {_list(outputs)}"
    elif operation.kind.startswith("reduce_scatter_tensor"):
        if any(whole.numel != size * part.numel for whole, part in zip(inputs, outputs, strict=True)):
            yield f"uneven: the input must be {size} times the output, but the output is {_list(outputs)}"
    elif operation.kind == "all_gather" and inputs[0].shape != outputs[_place(operation)].shape:
        yield f"its place in the output is {outputs[_place(operation)]}"
    elif operation.kind == "reduce_scatter" and outputs[0].shape != inputs[_place(operation)].shape:
        yield f"its output is {outputs[0]}"
    elif operation.kind == "all_to_all_single" and operation.splits is not None:
        for rows, spec in zip(operation.splits, (inputs[0], outputs[0]), strict=True):
            if (sum(rows) != spec.shape[0]) if rows else spec.shape[0] % size:
                yield f"uneven: its rows {list(rows) or f'in {size} equal parts'} are not the {spec.shape[0]} of {spec}"


def _place(operation: Operation) -> int:
    return operation.ranks.index(operation.rank)


def _list(specs: Sequence[object]) -> str:
    return ", ".join(map(str, specs))
