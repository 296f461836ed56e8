"""A model that can write: a run's newest weights or a Hugging Face folder's, with the tokenizer and where it stops."""

from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.checkpoint import Generation, generation_of, load_hf_weights, load_weights, newest_weights
from meshwright.data import Shown, Tokenizer, Viewer
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import UserError
from meshwright.job import Job, Model, model_of_folder
from meshwright.job.data import Data
from meshwright.model import Decoder, routers
from meshwright.runs.folder import RunFolder
from meshwright.train import choose_device


@dataclass(frozen=True)
class Writer:
    """A model on its device, in fp32, with what it needs to write text."""

    model: Decoder
    tokenizer: Tokenizer
    generation: Generation
    step: int | None
    """Of a run's weights; a folder's have none."""
    source: Path
    data: Data | None
    """The section that the run trained on; a folder has none."""

    def viewer(self, shown: Shown) -> Viewer:
        """What shows the model files; one that does not read what is in them is refused."""
        shape = self.model.shape
        for kind, section, things in (
            ("image", "vision", "pictures"),
            ("video", "vision", "film"),
            ("audio", "audio", "sound"),
        ):
            if kind in shown.by_kind and getattr(shape, section) is None:
                raise UserError(f"{self.source} reads no {things}, since it has no model.{section}; leave out --{kind}")
        return Viewer(shape.encoder, self.data, str(self.source))


def open_writer(source: Path, device: str) -> Writer:
    """The model of a run folder, or of a Hugging Face folder; no code that either names is run."""
    job = RunFolder.open(source).resolved_job(trust=True) if _is_run(source) else None  # none of its code is run
    if job is not None and job.model.file is not None:
        raise UserError(f"{source} trained model.file = {job.model.file}, which cannot generate text; use a preset")
    tokenizer = tokenizer_of(source)
    generation = generation_of(source, tokenizer)
    if job is None:
        model = _empty(model_of_folder(source), device)
        load_hf_weights(source, model)
        return Writer(model, tokenizer, generation, None, source, None)
    checkpoint = newest_weights(source)
    model = _empty(job.model, device)
    step = load_weights(checkpoint, model, job.run.seed)
    return Writer(model, tokenizer, generation, step, source, job.data)


def tokenizer_of(source: Path) -> Tokenizer:
    """The tokenizer of a run or of a Hugging Face folder; a path that is neither is refused."""
    if not _is_run(source) and not (source / "config.json").is_file():
        raise UserError(
            f'"{source}" is neither a run folder nor a Hugging Face folder (config.json, safetensors); give the folder '
            "that `meshwright train` or `checkpoint export` printed"
        )
    path = source / "tokenizer.json"
    if path.is_file():
        return load_tokenizer(path, str(path))
    if _is_run(source):
        raise UserError(
            f"{source} has no tokenizer.json (its tokens are synthetic or came without one); use another run"
        )
    raise UserError(f"{source} has no tokenizer.json; save the model's tokenizer there with transformers")


def _is_run(source: Path) -> bool:
    return (source / "job.resolved.json").is_file()


def _empty(shape: Model, device: str) -> Decoder:
    # A run's own number format is for training; text is written in fp32, which every device computes.
    target = choose_device(Job.model_validate({"run": {"device": device}}))
    with torch.device("meta"):
        model = Decoder(shape)
    model = model.to_empty(device=target)
    for _, router in routers(model):
        router.reset()
    return model
