"""The [data] section: where the text comes from and how it becomes sequences."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from meshwright.job.section import Section


class Data(Section):
    """The text to train on; by default the Python standard library found on this machine."""

    sources: tuple[str, ...] = Field(default=("builtin:stdlib",), min_length=1)
    """Text files, JSONL files or folders of either; or `builtin:stdlib`, or `builtin:synthetic` alone."""
    weights: tuple[float, ...] | None = None
    """How often each source is drawn, in the order of sources; by its size when not given."""
    text_field: str = Field(default="text", min_length=1)
    """The key that holds the text in each line of a JSONL file."""
    tokenizer: str | None = None
    """A `tokenizer.json`; when not given, a byte-level BPE of model.vocab_size is trained on the sources."""
    packing: Literal["concatenate", "best-fit", "none"] = "concatenate"
    """How documents fill sequences: `concatenate` cuts the running text into equal windows."""
    mask_documents: bool = False
    """Attention and positions stay within a document."""
    validation_fraction: float = Field(default=0.01, ge=0.0, lt=0.5)
    """Share of the documents held out for validation; 0 holds out none."""
    workers: NonNegativeInt = 2
    """Processes that read ahead; 0 reads in the training process."""
    prefetch: PositiveInt = 4
    """Steps each worker reads ahead."""
    cache: str | None = None
    """Folder for prepared tokens; `$XDG_CACHE_HOME/meshwright` or `~/.cache/meshwright` when not given."""
