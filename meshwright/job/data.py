"""The [data] section: where the text comes from and how it becomes sequences."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from meshwright.errors import UserError
from meshwright.job.fields import MediaField, require_fields
from meshwright.job.section import Section
from meshwright.job.tokens import TokenCount

Weight = Annotated[float, Field(le=1e12)]


class Stage(Section):
    """Weights that apply from some point of the run on."""

    tokens: TokenCount
    """Tokens of the stream (sequences × batch.sequence_length) after which the stage begins; `"1.5T"` works, too."""
    weights: tuple[Weight, ...]
    """How often each source is sampled from there on."""


class Data(Section):
    """The text to train on, which a training has to name; what only plans, verifies or measures takes Python's standard
    library where it is not named."""

    sources: tuple[str, ...] = Field(default=("builtin:stdlib",), min_length=1)
    """Files, folders or addresses of text, JSONL, CSV, Parquet, Arrow or tar, plain or compressed; folders that `data
    prepare` made; `builtin:stdlib`; `builtin:synthetic`, `builtin:shapes` or `builtin:tones` alone;
    or `NAME:ARGUMENT` with a source of your own."""
    weights: tuple[Weight, ...] | None = None
    """How often each source is sampled, in the order of sources; by size when not given."""
    stages: tuple[Stage, ...] = ()
    """Weights that change after a number of tokens, as `{tokens = 1000000, weights = [1, 2]}`; ascending."""
    text_field: str = Field(default="text", min_length=1)
    """The field or column that holds the text in each line of JSONL or row of a table."""
    join: str | None = Field(default=None, min_length=1)
    """A field or column: each document of the first source is followed by the other sources' documents with the
    same value there."""
    format: Literal["text", "conversations", "preferences"] = "text"
    """`conversations`: every line of JSONL or row of a table is one; only the assistant's tokens count in the loss.
    `preferences`: every line or row is a chosen and a rejected answer, and the loss is that of [preference]."""
    chat_template: str | None = None
    """A Jinja file that formats conversations as text; by default the one that comes with data.tokenizer."""
    tokenizer: str | None = None
    """A `tokenizer.json`; by default a byte-level BPE of model.vocab_size is trained on the sources."""
    fields: dict[str, MediaField] = Field(default_factory=dict)
    """Pictures, film and sound of a sample by name, as `[data.fields.image] kind = "image"`; `<image>` in the text is
    where one stands, and without it they come first."""
    items_per_sequence: PositiveInt | None = Field(default=None, le=1 << 20)
    """fields only: slots for pictures, frames and windows of sound in a sequence; by default as many as could fit."""
    oversize: Literal["leave-out", "refuse", "split"] = "leave-out"
    """fields only: what becomes of a sample with more tokens or items than a sequence holds: left out and counted,
    refused, or split between items."""
    check: Literal["decode", "header"] = "decode"
    """fields only: how pictures, film and sound are checked when they are prepared: decoded once, or only the beginning
    of each; what is damaged is left out and counted, up to --max-bad."""
    damaged: Literal["refuse", "blank"] = "refuse"
    """fields only: what training does with an item that cannot be decoded after all: stop and name it, or go on with a
    black picture or silence in its place and count it."""
    decode: Literal["cpu", "gpu", "dali"] = "cpu"
    """fields only: where pictures and film are decoded: by the data workers, on the GPU (JPEG and film), or pictures by
    NVIDIA DALI in the process that trains, on its device."""
    encoder: str | None = Field(default=None, min_length=1)
    """fields only: `file.py:Class` with your own `cook(record)` or `items(field, raw, random)`; its code is run."""
    packing: Literal["concatenate", "best-fit", "none"] = "concatenate"
    """How documents fill sequences: `concatenate` cuts the concatenated text into equal windows, `best-fit` packs whole
    documents and pads the rest, `none` gives each document its own sequence, in groups of similar length.
    `best-fit` is the default of conversations, of data.fields, and of preferences, whose two answers stay together."""
    mask_documents: bool = False
    """Attention and positions do not cross document boundaries; true is the default of conversations, preferences and
    data.fields."""
    validation_fraction: float = Field(default=0.01, ge=0.0, lt=0.5)
    """Fraction of the documents held out for validation (with fewer than twenty, the end of each); 0 for none."""
    stream: bool = False
    """Read and tokenise the sources while training, without preparing them; from any source `data prepare` reads."""
    virtual_shards: PositiveInt = Field(default=64, le=10**6)
    """stream only: input shards, each with a cursor; a multiple of the data-parallel ranks reads nothing twice."""
    shuffle_buffer: PositiveInt = Field(default=64, le=10**7)
    """stream only: sequences per shuffle buffer of a virtual shard."""
    workers: NonNegativeInt = Field(default=2, le=1024)
    """Processes that read ahead; 0 reads in the training process."""
    prefetch: PositiveInt = Field(default=4, le=1024)
    """Steps each worker reads ahead."""
    pin_memory: bool = True
    """On a GPU: keep batches in page-locked memory, so that copies overlap with computation."""
    cache: str | None = None
    """Folder for prepared tokens; by default `$XDG_CACHE_HOME/meshwright` or `~/.cache/meshwright`."""

    @model_validator(mode="after")
    def _stay_whole(self) -> Self:
        """Conversations and pairs stay whole and apart from each other, unless a job of the former says otherwise."""
        if self.format != "text" or self.fields:
            for field, value in (("packing", "best-fit"), ("mask_documents", True)):
                if field not in self.model_fields_set:
                    object.__setattr__(self, field, value)  # a default that depends on another field; nobody has it yet
        if self.fields:
            require_fields(self)
        if self.format == "preferences":
            if self.packing == "concatenate":
                raise ValueError(
                    'data.packing = "concatenate" would cut answers apart that data.format = "preferences" compares; '
                    'set it to "best-fit" or "none"'
                )
            if not self.mask_documents:
                raise ValueError(
                    'data.mask_documents = false would show answers to each other that data.format = "preferences" '
                    "compares; set it to true"
                )
        return self

    @model_validator(mode="after")
    def _sources_are_named(self) -> Self:
        if not all(source.strip() for source in self.sources):
            raise ValueError(
                "data.sources has an empty name, which would stand for the working directory; remove it, or write "
                '"." for that folder'
            )
        return self

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.join is not None and (self.weights is not None or self.format != "text"):
            other = "data.weights" if self.weights is not None else f'data.format = "{self.format}"'
            raise ValueError(
                f'data.join = "{self.join}" joins all sources into one text, which excludes {other}; leave one out'
            )
        if self.stages and self.weights is None:
            raise ValueError("data.stages needs data.weights, which apply until the first stage begins; set them")
        beside = [] if self.weights is None else [f"data.weights = {list(self.weights)}"]
        beside += [] if self.join is None else [f'data.join = "{self.join}"']
        beside += [] if self.packing == "concatenate" else [f'data.packing = "{self.packing}"']
        beside += [] if self.format == "text" else [f'data.format = "{self.format}"']
        if self.stream and beside:
            raise ValueError(
                f"data.stream = true reads plain text sequentially, without {' or '.join(beside)}; leave those out or "
                "prepare the data"
            )
        tokens = [stage.tokens for stage in self.stages]
        if tokens != sorted(set(tokens)):
            raise ValueError(f"data.stages begin at {tokens} tokens; list them in ascending order")
        given = [] if self.weights is None else [("data.weights", self.weights)]
        given += [(f"data.stages at {stage.tokens} tokens: weights", stage.weights) for stage in self.stages]
        for name, weights in given:
            if len(weights) != len(self.sources):
                raise ValueError(
                    f"{name} has {len(weights)} entries for {len(self.sources)} data.sources; give one for each"
                )
            if not all(weight >= 0 for weight in weights) or not any(weights):
                raise ValueError(f"{name} = {list(weights)} must be 0 or more and not all 0; correct them")
        return self


def require_data(data: Data, continued: str | None = None) -> None:
    """Refuse to train on data that nobody named, unless this is the folder of a run that is continued: it has its
    own."""
    if "sources" in data.model_fields_set or (
        continued is not None and (Path(continued) / "job.resolved.json").is_file()
    ):
        return
    raise UserError(
        "data.sources is not set; set it to the files, folders or addresses of the texts to train on, as "
        'data.sources = ["texts"], or to ["builtin:stdlib"] for those of Python\'s standard library'
    )
