"""Who reads which share of the batch, whatever the sizes of the axes; sums over all ranks."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel import World
from meshwright.verify.ranks import run_ranks


@pytest.mark.parametrize(("replicate", "shard"), [(2, 2), (2, 3), (3, 2), (1, 4), (4, 1)])
def test_every_share_of_the_batch_is_read_by_those_who_share_a_model_alone(replicate: int, shard: int) -> None:
    sizes = {"pp": 2, "dp_replicate": replicate, "dp_shard": shard, "cp": 2, "tp": 2}
    readers: dict[int, list[World]] = {}
    for places in product(*(range(size) for size in sizes.values())):
        axes = {name: (place, size) for (name, size), place in zip(sizes.items(), places, strict=True)}
        world = World(torch.device("cpu"), axes=axes)
        readers.setdefault(world.data_rank, []).append(world)
        assert world.data_ranks == replicate * shard
    assert sorted(readers) == list(range(replicate * shard))
    for of_share in readers.values():
        assert len(of_share) == 2 * 2 * 2 and sum(world.leads_data for world in of_share) == 1


def summed() -> list[float]:
    """A stage without a loss gives numbers where another gives tensors."""
    world = World(torch.device("cpu"), dist.get_rank(), 2)
    given: list[torch.Tensor | float] = [torch.tensor(1.0), 2.0, torch.tensor(3.0)]
    if world.rank == 0:
        given = [0.5, torch.tensor(0.25), 0.125]
    return world.sum_over_world(given)


def test_sums_keep_their_places_whatever_a_rank_knows_them_by() -> None:
    assert run_ranks(summed, 2) == [[1.5, 2.25, 3.125]] * 2
    alone = World(torch.device("cpu"))
    assert alone.sum_over_world([1.0, torch.tensor(2.0), 3.0, torch.tensor(4.0)]) == [1.0, 2.0, 3.0, 4.0]
    assert alone.sum_over_world([1.0]) == [1.0]
