"""A table whose rows tensor-parallel ranks share: values and gradients of the whole one, in the memory of a part."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright.parallel.vocabulary import VocabularyParallelEmbedding
from meshwright.verify.ranks import run_ranks

ROWS, WIDTH, RANKS = 12, 4, 2
TOKENS = torch.tensor([[0, 11, 5, 7], [7, 7, 2, 6]])


def table() -> nn.Embedding:
    embed = nn.Embedding(ROWS, WIDTH, padding_idx=7, dtype=torch.float64)
    with torch.no_grad():
        embed.weight.copy_(torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).sin())
    return embed


def shared(sequence: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,))
    embed = table()
    embed.weight = nn.Parameter(distribute_tensor(embed.weight.detach(), mesh, [Shard(0)]))
    found = VocabularyParallelEmbedding(embed, mesh, Shard(1) if sequence else Replicate())(TOKENS)
    (found * found).sum().backward()  # the same on both ranks, or of each rank's own places
    gradient = embed.weight.grad
    assert isinstance(gradient, DTensor)
    local = gradient.to_local()
    return {"found": found.detach(), "gradient": local, "held": local.untyped_storage().nbytes()}


@pytest.mark.parametrize("sequence", [False, True])
def test_every_rank_finds_all_rows_and_holds_gradients_of_its_own_alone(sequence: bool) -> None:
    ranks = run_ranks(shared, RANKS, sequence)
    whole = table()
    expected = whole(TOKENS)
    (expected * expected).sum().backward()
    assert whole.weight.grad is not None and not whole.weight.grad[7].any()
    for rank, its in enumerate(ranks):
        places = slice(2 * rank, 2 * rank + 2) if sequence else slice(None)
        assert torch.equal(its["found"], expected.detach()[:, places])
        rows = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
        assert torch.equal(its["gradient"], whole.weight.grad[rows])
        assert its["held"] == ROWS // RANKS * WIDTH * 8  # torch's own holds that of all rows, with these as a view
