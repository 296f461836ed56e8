"""Exercise 1: train the toy GPT on one device.

For each batch: the loss is the mean over the labels that count (not IGNORED); one step of plain SGD. Return the losses.
"""

from collections.abc import Sequence

from toy import Batch, ToyGPT


def train(model: ToyGPT, batches: Sequence[Batch], rate: float) -> list[float]:
    raise NotImplementedError("exercise 1 is still to be done")
