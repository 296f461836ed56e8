"""Initial values of every parameter, drawn by (seed, name, block of rows): any slice can be drawn without the rest."""

import hashlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from meshwright.job import Model
from meshwright.job.encoder import encoder_part
from meshwright.model.adapter import A, AdaptedLinear, B
from meshwright.model.decoder import Decoder

EMBEDDING = "embed.weight"
ROWS_PER_DRAW = 512
"""Rows drawn by one generator; a slice costs at most this many extra rows at either end."""


def initialise(model: Decoder, seed: int) -> None:
    """Fill every parameter in place, on whatever device it is; the values depend only on seed and names."""
    parameters = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    pieces = [
        (name, parameter, slice(start, min(start + ROWS_PER_DRAW, parameter.shape[0])))
        for name, parameter in parameters
        for start in range(0, parameter.shape[0], ROWS_PER_DRAW)
    ]

    def fill(piece: tuple[str, Tensor, slice]) -> None:
        name, parameter, rows = piece
        parameter[rows].copy_(initial_rows(model.shape, name, parameter.shape, seed, rows))

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(fill, pieces))
    for linear in model.modules():
        if isinstance(linear, AdaptedLinear) and linear.lora_magnitude is not None:
            linear.lora_magnitude.detach().copy_(torch.linalg.vector_norm(linear.weight.detach(), dim=1))


def initial_rows(shape: Model, name: str, size: Sequence[int], seed: int, rows: slice) -> Tensor:
    """The initial values of some rows of the parameter `name`, whose full size is `size`, in float32 on the CPU."""
    start, stop, _ = rows.indices(size[0])
    if name.endswith(f".{A}"):  # the variance that torch draws linears with
        return draw_rows(name, size, 1 / math.sqrt(3 * size[1]), seed, rows)
    if name.endswith((".bias", ".sinks.weight", f".{B}")):
        return torch.zeros(stop - start, *size[1:])
    if len(size) == 1 and not name.endswith(".class_token.weight"):
        return torch.ones(stop - start)
    if name.startswith("audio.") and len(size) == 3:
        # Positions of sound have a size of their own, and features must not be lost next to them (arXiv:1502.01852).
        return draw_rows(name, size, math.sqrt(2 / math.prod(size[1:])), seed, rows)
    residual = name.endswith((".o.weight", ".down.weight"))
    encoder = shape.encoder if encoder_part(name) != "decoder" else None
    layers = shape.layers if encoder is None else encoder.layers
    # A tied head separate from its table, as on a last pipeline stage, starts with the table's values.
    drawn_as = EMBEDDING if shape.tied and name == "head.weight" else name
    std = shape.init_std / math.sqrt(2 * layers) if residual else shape.init_std
    if drawn_as == EMBEDDING and shape.embed_std is not None:
        std = shape.embed_std
    return draw_rows(drawn_as, size, std, seed, rows)


def draw_rows(name: str, size: Sequence[int], std: float, seed: int, rows: slice) -> Tensor:
    """Normal draws for some rows of a matrix, equal to the same rows of any longer slice or padded matrix."""
    start, stop, _ = rows.indices(size[0])
    drawn = []
    for block in range(start // ROWS_PER_DRAW, math.ceil(stop / ROWS_PER_DRAW)):
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        whole = torch.randn(ROWS_PER_DRAW, *size[1:], generator=generator, dtype=torch.float32)
        first = block * ROWS_PER_DRAW
        drawn.append(whole[max(start - first, 0) : stop - first] * std)
    return torch.cat(drawn) if drawn else torch.empty(0, *size[1:])
