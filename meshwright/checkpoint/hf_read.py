"""The weights of a Hugging Face folder as our parameters, any rows of them at a time; only safetensors are opened."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import bitsandbytes
from meshwright.checkpoint.mxfp4 import BLOCKS, FORMAT, SCALES, Unpacked, unpacked_size
from meshwright.checkpoint.tensorfile import read_header, read_window
from meshwright.errors import UserError
from meshwright.job import Model
from meshwright.job.hub import INDEX, PICKLES, SINGLE
from meshwright.model import Decoder, full_hf_names, hf_head, hf_rows, hf_tensors, preference_sizes, require_hf_tensors
from meshwright.model.hf_places import spans_of
from meshwright.model.quantised import Packed

_ROWS_COMPARED = 512


@dataclass(frozen=True)
class _Stored:
    """A tensor and the file that contains it."""

    path: Path
    name: str
    size: tuple[int, ...]
    dtype: str
    scales: "_Stored | None" = None
    """Of a tensor in MXFP4, which is two in the file."""
    parts: "Mapping[str, _Stored] | None" = None
    """Of a tensor in a format of bitsandbytes, which is several."""
    offset: float = 0.0
    """Of such a tensor's scales."""


class HfWeights:
    """A folder's weights under our names; opening it reads only headers."""

    def __init__(self, folder: Path, shape: Model) -> None:
        shape = shape.base  # adapters have files of their own
        if shape.audio is not None:
            shape = shape.decoder  # so has an encoder of sound
        self.folder, self._shape = folder, shape
        stored = _with_codes(_with_unpacked(stored_tensors(folder)))
        self._tensors = {full: stored[found] for full, found in full_hf_names(shape, stored).items()}

    def rows(self, name: str, size: tuple[int, ...], rows: slice) -> Tensor:
        """Some rows of our parameter `name`, whose full size is `size`, as they are stored."""
        return hf_rows(self._shape, name, size, rows, self._tensors, self._read)

    def packed(self, name: str, size: tuple[int, ...], format_: str) -> Packed | None:
        """Our parameter `name` as codes, if the folder has it in this format."""
        [span, *more] = spans_of(self._shape, name, size, self._tensors)
        stored = self._tensors.get(span.tensor)
        if more or stored is None or stored.size != size or bitsandbytes.FORMATS.get(stored.dtype) != format_:
            return None
        found: list[Packed] = []

        def take(codes: bitsandbytes.Codes) -> Tensor:
            found.append(codes.packed())
            return found[0].codes

        self._read(span.tensor, take)
        return found[0]

    def preferences(self) -> Tensor | None:
        """The routers' preferences of all layers (layers, experts), zero if the folder has none; none without
        experts."""
        if (experts := self._shape.experts) is None:
            return None
        found = torch.zeros(self._shape.blocks, experts.count)
        for layer, (name, size) in enumerate(preference_sizes(self._shape).items(), experts.first_dense):
            found[layer] = self.rows(name, size, slice(None))
        return found

    def fingerprint(self) -> str:
        """A hash that tells these weights from others."""
        return stored_fingerprint(self._tensors, self._read)

    def require(self) -> None:
        """Refuse by name a tensor that is missing, unused, or has the wrong size or number format."""
        sizes = parameter_sizes(self._shape) | preference_sizes(self._shape)
        try:
            require_hf_tensors(self._shape, sizes, {name: stored.size for name, stored in self._tensors.items()})
        except UserError as error:
            raise UserError(f"{self.folder}: {error}") from None
        for tensor in hf_tensors(self._shape, sizes, self._tensors):
            if (dtype := self._tensors[tensor.name].dtype) not in ("F32", "BF16", "F16", FORMAT, *bitsandbytes.FORMATS):
                raise UserError(
                    f"{self.folder}: {tensor.name} is stored as {dtype}; use weights in F32, BF16 or F16, which fp32 "
                    "represents exactly"
                )
        head = hf_head(self._shape)
        if self._shape.tied and head in self._tensors and not self._head_is_table(sizes["embed.weight"]):
            raise UserError(
                f"{self.folder}: {head} differs from the embedding table, but config.json has "
                "tie_word_embeddings = true; set that to false"
            )

    def _head_is_table(self, size: tuple[int, ...]) -> bool:
        """Whether the head that a tied model's files contain anyway equals the embedding."""
        head = hf_head(self._shape)
        if self._tensors[head].size != size:
            return False
        blocks = [slice(start, min(start + _ROWS_COMPARED, size[0])) for start in range(0, size[0], _ROWS_COMPARED)]
        return all(
            torch.equal(self.rows("embed.weight", size, rows), self._read(head, itemgetter(rows))) for rows in blocks
        )

    def _read(self, name: str, take: Callable[..., Tensor]) -> Tensor:
        if name not in self._tensors:
            raise UserError(f"{self.folder} lacks {name}; give the folder of a complete model")
        stored = self._tensors[name]
        if (parts := stored.parts) is not None:
            made = bitsandbytes.Codes
            about = (stored.dtype, stored.size, stored.offset)
            return _together(list(parts.items()), lambda slices: take(made(*about, slices)))
        if (scales := stored.scales) is None:
            return read_window(stored.path, stored.name, take)
        return read_window(
            stored.path,
            stored.name,
            lambda blocks: read_window(scales.path, scales.name, lambda powers: take(Unpacked(blocks, powers))),
        )


def stored_fingerprint(tensors: Mapping[str, _Stored], read: Callable[[str, Callable[..., Tensor]], Tensor]) -> str:
    """A hash of every tensor's name, size and format, and of three rows of each: enough to tell two models, or two
    states of one, apart without reading all of them."""
    seen = hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        seen.update(f"{name} {stored.size} {stored.dtype}\n".encode())
        for row in sorted({0, stored.size[0] // 2, stored.size[0] - 1}) if stored.size else ():
            seen.update(read(name, itemgetter(slice(row, row + 1))).float().numpy().tobytes())
    return seen.hexdigest()


def parameter_sizes(shape: Model) -> dict[str, tuple[int, ...]]:
    """The names and sizes of our parameters, a tied table once."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Decoder(shape).named_parameters()}


def stored_tensors(folder: Path) -> dict[str, _Stored]:
    """Every tensor in the folder's safetensors files, by its name there."""
    if (folder / SINGLE).is_file():
        return _tensors_of(folder / SINGLE)
    if (folder / INDEX).is_file():
        listed = _index(folder)
        stored: dict[str, _Stored] = {}
        for file in sorted(set(listed.values())):
            stored |= _tensors_of(folder / file)
        if lost := [name for name in listed if name not in stored]:
            raise UserError(f"{folder / INDEX} lists {lost[0]}, which none of its files contains; download them again")
        return stored
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
    if pickles:
        raise UserError(
            f"{folder} has weights only as a pickle ({pickles[0]}), which can run code when opened; use the "
            f"model's safetensors files, or convert it to {SINGLE} if you trust it"
        )
    raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}; give the folder of a complete model")


def _with_unpacked(stored: dict[str, _Stored]) -> dict[str, _Stored]:
    """The same with every pair of blocks and scales as the one tensor that it stands for."""
    pairs = {name.removesuffix(BLOCKS): name for name in stored if name.endswith(BLOCKS)}
    found = dict(stored)
    for name, packed in pairs.items():
        blocks, scales = stored[packed], stored.get(name + SCALES)
        if scales is None or len(blocks.size) != 4 or scales.size != blocks.size[:-1]:
            raise UserError(f"{blocks.path}: {packed} has no {name + SCALES} of the same groups; download it again")
        if {blocks.dtype, scales.dtype} != {"U8"}:
            raise UserError(f"{blocks.path}: {packed} is stored as {blocks.dtype}, not as bytes; download it again")
        del found[packed], found[name + SCALES]
        found[name] = _Stored(blocks.path, packed, unpacked_size(blocks.size), FORMAT, scales)
    return found


def _with_codes(stored: dict[str, _Stored]) -> dict[str, _Stored]:
    """The same with everything that bitsandbytes keeps of a matrix as the one tensor that it stands for."""
    found, kind = dict(stored), bitsandbytes
    for name, one in stored.items():
        if name.endswith(kind.STATE):
            weight = name.removesuffix(kind.STATE)
            ends = {"": weight, kind.ABSMAX: weight + kind.ABSMAX, kind.NESTED: weight + kind.NESTED, kind.STATE: name}
            dtype, maps = kind.NF4, [weight + end for end in kind.MAPS]
        elif name.endswith(f".{kind.ROW_SCALES}"):
            module = name.removesuffix(kind.ROW_SCALES)
            weight, ends = f"{module}weight", {"": f"{module}weight", kind.ROW_SCALES: name}
            dtype, maps = kind.INT8, [module + kind.ROW_FORMAT]
        else:
            continue
        if lost := [each for each in ends.values() if each not in stored]:
            raise UserError(f"{one.path}: {name} belongs to {lost[0]}, which is missing; download the folder again")
        parts = {end: stored[each] for end, each in ends.items()}
        size, offset = stored[weight].size, 0.0
        if dtype == kind.NF4:
            state = kind.state_of(read_window(one.path, name, itemgetter(slice(None))), weight)
            size, offset = state["shape"], state["offset"]
        kind.require_parts(dtype, size, {end: (part.size, part.dtype) for end, part in parts.items()}, weight)
        for each in (*ends.values(), *maps):
            found.pop(each, None)
        found[weight] = _Stored(stored[weight].path, weight, size, dtype, parts=parts, offset=offset)
    return found


def _together(parts: Sequence[tuple[str, _Stored]], take: Callable[[dict[str, Any]], Tensor]) -> Tensor:
    """What is taken from several tensors of files at once."""
    if not parts:
        return take({})
    [(end, one), *rest] = parts
    return read_window(one.path, one.name, lambda own: _together(rest, lambda others: take({end: own, **others})))


def _tensors_of(path: Path) -> dict[str, _Stored]:
    return {name: _Stored(path, name, entry.size, entry.dtype) for name, entry in read_header(path)[0].items()}


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is not an index of tensors ({type(error).__name__}: {error}); download it again"
        ) from None
    for file in sorted(set(files.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(
                f"{path} lists {file!r}, but only safetensors files in the same folder are opened; get the model's "
                "safetensors files"
            )
        if not (folder / file).is_file():
            raise UserError(f"{path} lists {file}, which is missing; download it too")
    return files
