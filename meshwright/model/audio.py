"""Whisper's encoder of sound: two convolutions over log-mel features, and sinusoids as positions. Letters as in
`encoder`; M bands, L frames."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.job import Model
from meshwright.job.audio import KERNEL, STRIDE, Audio
from meshwright.model.encoder import Tower
from meshwright.model.router import as_it_is

LONGEST_PERIOD = 10_000.0


class AudioTower(Tower):
    """The encoder of windows of sound, (mels, frames) each, and the projector."""

    def __init__(self, shape: Model, audio: Audio) -> None:
        super().__init__(shape, audio)
        self.first = Convolution(audio.mels, audio.width, 1)
        self.second = Convolution(audio.width, audio.width, STRIDE)

    def embedded(self, items_N: Tensor) -> Tensor:
        """Every two frames as one token, with its position."""
        x_NWL = F.gelu(self.first(items_N.to(self.first.weight.dtype)))
        x_NPW = F.gelu(self.second(x_NWL)).transpose(1, 2).contiguous()
        return x_NPW + sinusoids(x_NPW.shape[1], x_NPW.shape[2], x_NPW.device).to(x_NPW.dtype)


class Convolution(nn.Module):
    """A convolution over frames, as many zeros at either end as keep their number."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.weight = nn.Parameter(torch.empty(outputs, inputs, KERNEL))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.own: Callable[[Tensor], Tensor] = as_it_is

    def forward(self, x_NML: Tensor) -> Tensor:
        weight, bias = self.own(self.weight), self.own(self.bias)
        return F.conv1d(x_NML, weight, bias, stride=self.stride, padding=KERNEL // 2)


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Positions as Whisper has them: sines of every wavelength, then their cosines."""
    step = math.log(LONGEST_PERIOD) / (width // 2 - 1)
    frequencies = torch.exp(-step * torch.arange(width // 2, device=device, dtype=torch.float64))
    angles_PF = torch.arange(length, device=device, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.cat((angles_PF.sin(), angles_PF.cos()), dim=1)
