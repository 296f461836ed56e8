"""A process group that records what passes through it and leaves the work to the group it stands in for.

Everything passes through here, however it is issued: `dist.*`, functional collectives and DTensor, `fully_shard`,
pipelines' messages, objects. A TorchDispatchMode would miss calls from other threads and from C++.
"""

# mypy: disable-error-code="override, assignment"

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import get_ident, get_native_id
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.torch_private.processes import gloo_group, remember_group, replace_group_maker
from meshwright.verify import staged
from meshwright.verify.collectives.record import Writer
from meshwright.verify.collectives.sites import call_site

NAME = "recorded"


@dataclass(frozen=True)
class _Form:
    """How a method of a group is called: the meaning of its arguments."""

    kind: str
    inputs: int | None = None
    outputs: int | None = None
    peer: int | None = None
    splits: int | None = None
    """The first of two: rows from each rank and rows to each rank."""


_GATHER = _Form("all_gather_into_tensor", inputs=1, outputs=0)
_SCATTER = _Form("reduce_scatter_tensor", inputs=1, outputs=0)
_GATHER_COALESCED = _Form("all_gather_into_tensor_coalesced", inputs=1, outputs=0)
_SCATTER_COALESCED = _Form("reduce_scatter_tensor_coalesced", inputs=1, outputs=0)
_EXCHANGE = _Form("all_to_all_single", inputs=1, outputs=0, splits=2)
_GATHER_ONE = _Form("gather_into_tensor", inputs=1, outputs=0)

FORMS = {
    "allreduce": _Form("all_reduce", inputs=0),
    "allreduce_coalesced": _Form("all_reduce_coalesced", inputs=0),
    "broadcast": _Form("broadcast", inputs=0),
    "reduce": _Form("reduce", inputs=0),
    "allgather": _Form("all_gather", inputs=1, outputs=0),
    "allgather_coalesced": _Form("all_gather_coalesced", inputs=1, outputs=0),
    "_allgather_base": _GATHER,
    "all_gather_single": _GATHER,
    "allgather_into_tensor_coalesced": _GATHER_COALESCED,
    "all_gather_single_coalesced": _GATHER_COALESCED,
    "reduce_scatter": _Form("reduce_scatter", inputs=1, outputs=0),
    "_reduce_scatter_base": _SCATTER,
    "reduce_scatter_single": _SCATTER,
    "reduce_scatter_tensor_coalesced": _SCATTER_COALESCED,
    "reduce_scatter_single_coalesced": _SCATTER_COALESCED,
    "alltoall": _Form("all_to_all", inputs=1, outputs=0),
    "alltoall_base": _EXCHANGE,
    "all_to_all_single": _EXCHANGE,
    "gather": _Form("gather", inputs=1, outputs=0),
    "gather_single": _GATHER_ONE,
    "gather_into_tensor": _GATHER_ONE,
    "scatter": _Form("scatter", inputs=1, outputs=0),
    "barrier": _Form("barrier"),
    "monitored_barrier": _Form("monitored_barrier"),
    "send": _Form("send", inputs=0, peer=1),
    "recv": _Form("recv", outputs=0, peer=1),
    "recv_anysource": _Form("recv_anysource", outputs=0),
}
"""Every method that communicates, under all the names that torch versions give it."""


Makers = Mapping[str, Callable[..., Any]]
"""How groups are created, by the name of their backend."""


def record_groups(folder: Path, rank: int, makers: Makers | None = None) -> Writer:
    """Make all process groups that this process creates from now on record in the folder, while the writer is on.

    Torch still calls them by the name of the requested backend. NCCL's are left as they are. `makers` are of further
    backends.
    """
    writer, wanted = Writer(folder, rank), list[str]()
    inner: Makers = {"gloo": gloo_group, staged.NAME: staged.StagedGroup, **(makers or {})}

    def create(options: Any, backend_options: Any) -> dist.ProcessGroup:
        under = inner[wanted[-1]](options.store, options.group_rank, options.group_size, options.timeout)
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return RecordingGroup(under, str(options.group_id), ranks, writer)

    def recording(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_recording(
            size: int, place: int, ranks: list[int], backend: Any, store: Any, name: Any, **rest: Any
        ) -> Any:
            writer.created(str(name), ranks or range(size), call_site().place)
            if str(backend) not in inner:
                return make(size, place, ranks, backend, store, name, **rest)
            wanted.append(str(backend))
            group, its_store = make(size, place, ranks, dist.Backend(NAME), store, name, **rest)
            wanted.pop()
            if isinstance(group, RecordingGroup):
                remember_group(group, str(backend), its_store)
            return group, its_store

        return make_recording

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    replace_group_maker(recording)
    return writer


class RecordingGroup(staged.PythonGroup):
    """Records every call and forwards it; its methods are generated from FORMS below."""

    def __init__(self, inner: dist.ProcessGroup, name: str, ranks: tuple[int, ...], writer: Writer) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner, self._name, self._ranks, self._writer = inner, name, ranks, writer

    def getBackendName(self) -> str:
        """As torch expects it."""
        return NAME

    def _get_backend(self, device: torch.device) -> Any:
        return self._inner._get_backend(device)

    def _issued(self, form: _Form, arguments: tuple[Any, ...], options: Any) -> int:
        site = call_site()
        fields: dict[str, Any] = {"group": self._name, "kind": form.kind, "site": site.place}
        if form.inputs is not None:
            fields["inputs"] = _specs(arguments[form.inputs])
        if form.outputs is not None:
            fields["outputs"] = _specs(arguments[form.outputs])
        if form.peer is not None:
            fields |= {"peer": self._ranks[arguments[form.peer]], "tag": arguments[2] if len(arguments) > 2 else 0}
        if form.splits is not None:
            received, sent = arguments[form.splits : form.splits + 2]
            fields["splits"] = (tuple(sent), tuple(received))
        if (root := getattr(options, "rootRank", None)) is not None:
            fields["peer"] = self._ranks[root]
        if (reduce := getattr(options, "reduceOp", None)) is not None:
            fields["reduce"] = str(reduce.op).rpartition(".")[2]
        if getattr(options, "asyncOp", False) or site.call in ("isend", "irecv"):
            fields["asynchronous"] = True
        if site.objects:
            fields["objects"] = True
        if (thread := get_native_id()) != os.getpid():
            fields["thread"] = thread
        if (stream := _stream(arguments)) is not None:
            fields["stream"] = stream
        return self._writer.issued(tuple(fields.items()), None if site.batch is None else _batches.number(site.batch))


def _recorded(name: str, form: _Form) -> Callable[..., Any]:
    def method(self: RecordingGroup, *arguments: Any, **named: Any) -> Any:
        if not self._writer.on:
            return getattr(self._inner, name)(*arguments, **named)
        given = (*arguments, *named.values())
        number = self._issued(form, given, given[-1] if given else None)
        return _Watched(getattr(self._inner, name)(*arguments, **named), self._writer, number)

    return method


for _name, _form in FORMS.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(RecordingGroup, _name, _recorded(_name, _form))


class _Watched(dist.Work):
    """The handle of an operation, whose first wait is recorded."""

    def __init__(self, work: Any, writer: Writer, number: int) -> None:
        super().__init__()
        self._work, self._writer, self._number, self._waited = work, writer, number, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._waited:
            self._waited = True
            self._writer.waited(self._number)
        done: bool = self._work.wait(timeout) if timeout else self._work.wait()
        return done

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        done: bool = self._work.is_completed()
        return done

    def is_success(self) -> bool:
        good: bool = self._work.is_success()
        return good

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def source_rank(self) -> int:
        source: int = self._work.source_rank()
        return source

    def get_future(self) -> Any:
        return self._work.get_future()


class _Batches:
    """Numbers the calls of batch_isend_irecv, each thread's by the frame it runs in."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: dict[int, tuple[int, int, int]] = {}
        """By thread: the frame, the batch's number and how many of its operations remain."""

    def number(self, frame: FrameType) -> int:
        """The batch whose next operation is being issued."""
        begun, number, left = self._open.get(get_ident(), (0, 0, 0))
        if begun != id(frame) or not left:
            number, left = next(self._numbers), len(frame.f_locals["p2p_op_list"])
        self._open[get_ident()] = (id(frame), number, left - 1)
        return number


_batches = _Batches()


def _specs(given: Any) -> tuple[tuple[str, tuple[int, ...], bool, str], ...]:
    return tuple(
        (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.is_contiguous(), tensor.device.type)
        for tensor in _tensors(given)
    )


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    else:
        for each in given:
            yield from _tensors(each)


def _stream(arguments: tuple[Any, ...]) -> str | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    tensors = arguments[0] if arguments else None
    first = next(_tensors(tensors), None) if isinstance(tensors, Tensor | list | tuple) else None
    if first is None or not first.is_cuda:
        return None
    own = torch.cuda.current_stream(first.device) == torch.cuda.default_stream(first.device)
    return "default" if own else "side"
