"""What the lectures' own code and tensor questions do when they are run, as docs/lectures.md says."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from meshwright.verify import run_ranks


def trained(loop: Callable[[nn.Linear, torch.optim.Optimizer, list[Tensor]], None]) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    batches = [torch.randn(4, 3) for _ in range(6)]
    start = model.weight.detach().clone()
    loop(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    return (model.weight.detach() - start).abs().max()


def test_clearing_gradients_before_the_step_learns_nothing() -> None:
    def loop(
        model: nn.Linear, optimizer: torch.optim.Optimizer, batches: list[Tensor], *, clears_first: bool = True
    ) -> None:
        for index, batch in enumerate(batches):
            (model(batch).square().mean() / 2).backward()
            if (index + 1) % 2 == 0:
                if clears_first:
                    optimizer.zero_grad()
                optimizer.step()
                optimizer.zero_grad()

    assert trained(loop) == 0
    assert trained(lambda *given: loop(*given, clears_first=False)) > 0


def test_a_last_partial_window_divided_by_the_full_count_is_too_small() -> None:
    weight = torch.ones(1, requires_grad=True)
    for _ in range(2):  # a window of 4 that ends with the data after 2
        (weight.square().sum() / 4).backward()
    assert weight.grad is not None and float(weight.grad) == 1.0  # the mean over the 2 would be 2


def test_the_matrices_of_the_slide_cut_by_columns_then_by_rows() -> None:
    x, first, second = (
        torch.tensor(rows, dtype=torch.float64) for rows in ([[1, 2]], [[1, 2], [3, 4]], [[1, 2], [3, 4]])
    )
    assert (x @ first).tolist() == [[7, 10]] and (x @ first @ second).tolist() == [[37, 54]]
    parts = [x @ first[:, [rank]] @ second[[rank]] for rank in (0, 1)]
    assert sum(parts[1:], parts[0]).tolist() == [[37, 54]]  # one sum at the end, nothing in between


def zero_example(stage: int) -> tuple[list[float], int, int]:
    """The chapter's W1 … W4 on two GPUs by Adam: the new weights, gradients a rank keeps, moments it has."""
    rank, weights = dist.get_rank(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    own = [torch.nn.Parameter(weights[2 * rank : 2 * rank + 2].clone())]
    optimizer = torch.optim.Adam(own, lr=0.1)
    for step in range(3):
        local = weights * (rank + 1) + step  # every GPU has its own data, so its own gradients
        kept = [shard.clone() for shard in local.chunk(2)]
        for owner, shard in enumerate(kept):  # a reduce-scatter: each shard is summed at its owner alone
            dist.reduce(shard, owner)
        mean = kept[rank] / 2
        if stage == 1:  # the chapter's ZeRO-1: all gradients on both, then half of them are used
            dist.all_reduce(local)
            mean = (local / 2)[2 * rank : 2 * rank + 2]
        own[0].grad = mean
        optimizer.step()
        shards = [torch.empty(2), torch.empty(2)]
        dist.all_gather(shards, own[0].detach())
        weights = torch.cat(shards)
    moments = optimizer.state[own[0]]["exp_avg"].numel()
    return weights.tolist(), local.numel() if stage == 1 else mean.numel(), moments


def test_w1_to_w4_on_two_gpus_end_as_on_one_whatever_is_sharded() -> None:
    whole = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    optimizer = torch.optim.Adam([whole], lr=0.1)
    for step in range(3):
        whole.grad = torch.stack([whole.detach() * (rank + 1) + step for rank in (0, 1)]).mean(dim=0)
        optimizer.step()
    expected = pytest.approx(whole.tolist(), rel=1e-6)
    for stage, gradients in ((1, 4), (2, 2)):
        for weights, kept, moments in run_ranks(zero_example, 2, stage):
            assert (weights, kept, moments) == (expected, gradients, 2)


def test_a_view_needs_strides_that_fit_and_reshape_copies_where_they_do_not() -> None:
    turned = torch.randn(3, 4).transpose(0, 1)
    assert not turned.is_contiguous()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        turned.view(-1)
    assert torch.equal(turned.contiguous().view(-1), turned.reshape(-1))
    assert turned.view(4, 3, 1).shape == (4, 3, 1)  # not contiguous, and yet it can be viewed


def test_when_contiguity_matters() -> None:
    whole = torch.randn(4, 6)
    for other in (whole.transpose(0, 1), whole.permute(1, 0), whole[:, :3]):
        assert not other.is_contiguous() and other.untyped_storage().data_ptr() == whole.data_ptr()
        assert other.contiguous().data_ptr() != other.data_ptr()  # a copy
        assert other.reshape(-1).data_ptr() != other.data_ptr()  # a copy too, where a view would fail
    assert not whole[:, ::2].is_contiguous() and whole[:, ::2].view(-1).shape == (12,)  # every second entry of all
    assert whole.contiguous().data_ptr() == whole.data_ptr()  # no copy of what is contiguous already
    assert whole.reshape(-1).data_ptr() == whole.data_ptr()


def views_of_ranks() -> tuple[bool, bool, str]:
    """Whether a view works in a DDP forward and on a DTensor sharded by rows, and what one that cuts a shard says."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).view(-1)

    replica = DistributedDataParallel(Flat())
    replica(torch.randn(2, 4)).sum().backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)])
    split = rows.view(2, 3, 4)
    assert isinstance(split, DTensor)
    try:
        rows.view(3, 2, 4)  # its first dim cannot be sharded over two ranks
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    return replica.module.linear.weight.grad is not None, split.to_local().shape == (1, 3, 4), said


def test_views_are_local_under_ddp_and_restricted_for_a_dtensor() -> None:
    for ddp, sharded, said in run_ranks(views_of_ranks, 2):
        assert ddp and sharded and "shard" in said.lower(), said
