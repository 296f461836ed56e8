"""Who reads which share of the batch, whatever the sizes of the axes."""

from itertools import product

import pytest
import torch

from meshwright.parallel import World


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
