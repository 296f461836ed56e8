"""Exercise 2: the same training on two ranks that hold the whole model each.

Every rank is given the whole batches and must work on its own half of the sequences only. The halves have very
different numbers of labels that count: what must each rank divide by? Return the losses of the whole batch, on every
rank.
"""

from collections.abc import Sequence

from toy import Batch, ToyGPT


def train(model: ToyGPT, batches: Sequence[Batch], rate: float) -> list[float]:
    raise NotImplementedError("exercise 2 is still to be done")
