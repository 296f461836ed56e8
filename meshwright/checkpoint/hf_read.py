"""The weights of a Hugging Face folder as our parameters, any rows of them at a time; only safetensors are opened."""

import json
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.streamed import DTYPES, Entry, read_header, read_window
from meshwright.errors import UserError
from meshwright.job import Model
from meshwright.model import Decoder, full_hf_names, hf_place, hf_tensors, require_hf_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_ROWS_COMPARED = 512


class HfWeights:
    """A folder's weights under our names; opening one reads no tensor."""

    def __init__(self, folder: Path, shape: Model) -> None:
        self.folder, self._shape = folder, shape
        files = _files(folder)
        self._found = full_hf_names(shape, files)
        self._files = {full: files[found] for full, found in self._found.items()}

    def rows(self, name: str, size: tuple[int, ...], rows: slice) -> Tensor:
        """Some rows of our parameter `name`, whose full size is `size`, as they are stored."""
        place = hf_place(self._shape, name)
        if place.name not in self._files:
            raise UserError(f"{self.folder} lacks {place.name}, which {name} comes from; give a whole model's folder")
        path = self._files[place.name]
        return read_window(path, self._found[place.name], lambda stored: place.read(stored, size, rows))

    def require(self) -> None:
        """Refuse by name a tensor that is missing, without use, of another size or format, or a torn file."""
        entries: dict[str, Entry] = {}
        for path in sorted(set(self._files.values())):
            entries |= read_header(path)[0]
        if torn := [found for found in self._found.values() if found not in entries]:
            raise UserError(f"{self.folder}: {INDEX} names {torn[0]}, which is not in its file; download it again")
        # what the files hold beyond the index is looked at too, under its full name
        named = {full: entries[found] for full, found in full_hf_names(self._shape, entries).items()}
        sizes = parameter_sizes(self._shape)
        try:
            require_hf_tensors(self._shape, sizes, {name: entry.size for name, entry in named.items()})
        except UserError as error:
            raise UserError(f"{self.folder}: {error}") from None
        for tensor in hf_tensors(self._shape, sizes):
            if (dtype := named[tensor.name].dtype) not in DTYPES:
                raise UserError(
                    f"{self.folder}: {tensor.name} is stored as {dtype}; use weights in F32, BF16 or F16, which fp32 "
                    "holds exactly"
                )
        if self._shape.tied and "lm_head.weight" in named:
            self._require_tied(named["lm_head.weight"])

    def _require_tied(self, head: Entry) -> None:
        """A tied model whose files hold a head all the same: it must be the table."""
        table = parameter_sizes(self._shape)["embed.weight"]
        path = self._files["lm_head.weight"]
        equal = head.size == table
        for start in range(0, table[0], _ROWS_COMPARED):
            rows = slice(start, min(start + _ROWS_COMPARED, table[0]))
            equal = equal and torch.equal(
                read_window(path, self._found["lm_head.weight"], lambda stored, rows=rows: stored[rows]),
                self.rows("embed.weight", table, rows),
            )
        if not equal:
            raise UserError(
                f"{self.folder}: lm_head.weight is not the embedding table, though config.json has "
                "tie_word_embeddings = true; set that to false"
            )


def parameter_sizes(shape: Model) -> dict[str, tuple[int, ...]]:
    """The names and sizes of our parameters, a tied table once."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Decoder(shape).named_parameters()}


def _files(folder: Path) -> dict[str, Path]:
    """Stored tensor name → its file."""
    if (folder / SINGLE).is_file():
        return dict.fromkeys(read_header(folder / SINGLE)[0], folder / SINGLE)
    if (folder / INDEX).is_file():
        return {name: folder / file for name, file in _index(folder).items()}
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLES)
    if pickles:
        raise UserError(
            f"{folder} holds weights only as a pickle ({pickles[0]}), which can run code when it is opened; use the "
            f"model's safetensors files, or convert it to {SINGLE} where you trust it"
        )
    raise UserError(f"{folder} holds neither {SINGLE} nor {INDEX}; give the folder of a whole model")


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no index of tensors ({type(error).__name__}: {error}); download it again") from None
    for file in sorted(set(files.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(
                f"{path} names {file!r}, and only safetensors files of the same folder are opened; get the model's "
                "safetensors files"
            )
        if not (folder / file).is_file():
            raise UserError(f"{path} names {file}, which is not there; download it too")
    return files
