"""The weights of a run as one safetensors file: fp32 masters under the model's own names, tied tables once."""

import errno
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.checkpoint.streamed import read_header, read_window
from meshwright.errors import UserError


def weights_path(run: Path, step: int) -> Path:
    """Where the weights after a step lie in a run folder."""
    return run / "checkpoints" / f"step-{step:08d}" / "model.safetensors"


def save_weights(run: Path, step: int, masters: dict[str, nn.Parameter]) -> Path:
    """Write the masters beside their final place, flush them to disk, then rename; a failure leaves nothing."""
    final = weights_path(run, step)
    partial = final.with_suffix(".partial")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: p.detach().cpu().contiguous() for name, p in masters.items()}, partial, {"step": str(step)})
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(final)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        if _disk_is_full(error):
            size = sum(p.numel() * p.element_size() for p in masters.values())
            raise UserError(
                f"run.folder = {run}: the disk is full, the weights need {size / 1e9:.2f} GB; free space and run again"
            ) from None
        raise
    return final


def newest_weights(run: Path) -> Path:
    """The weights of the latest step in a run folder."""
    found = sorted((run / "checkpoints").glob("step-*/model.safetensors"))
    if not found:
        raise UserError(f"{run} holds no weights under checkpoints/; let its training finish first")
    return found[-1]


def load_weights(path: Path, model: nn.Module) -> int:
    """Fill a model's parameters from a weights file and return its step; names or shapes that differ are refused."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            if odd := parameters.keys() ^ set(file.keys()):
                raise UserError(f"{path} does not fit the run's model: {min(odd)} is on one side only; it was altered")
            for name, parameter in parameters.items():
                saved = file.get_tensor(name)
                if saved.shape != parameter.shape:
                    raise UserError(
                        f"{path}: {name} has shape {tuple(saved.shape)}, the run's model {tuple(parameter.shape)}; "
                        f"it was altered"
                    )
                parameter.copy_(saved)
            return int((file.metadata() or {}).get("step", 0))
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read ({error}); it is torn, use another run") from None


class StoredWeights:
    """A run's newest weights, any window of any parameter at a time."""

    def __init__(self, run: Path) -> None:
        self._path = newest_weights(run)
        entries, metadata = read_header(self._path)
        self.step = int(metadata.get("step", 0))
        self.sizes = {name: entry.size for name, entry in entries.items()}

    def read(self, name: str, window: tuple[slice, ...]) -> Tensor:
        """A window of a parameter's fp32 master."""
        return read_window(self._path, name, lambda stored: stored[window])


def _disk_is_full(error: Exception) -> bool:
    # safetensors wraps the operating system's error in its own text
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
