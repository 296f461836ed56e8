"""Grading hand-written layers: a right one, wrong ones, and files that are not layers."""

import pytest

from meshwright.errors import UserError
from meshwright.verify import LayerGrade, grade_layer

LAYERS = '''
import torch
import torch.distributed as dist
from torch import nn


class Enter(torch.autograd.Function):
    """Identity; the gradient of a shared input is the sum of what every rank found."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Gather(torch.autograd.Function):
    """All ranks' columns side by side; each rank's gradient is its own part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)], None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Column(nn.Module):
    def __init__(self, in_features, out_features, bias, group):
        super().__init__()
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(torch.empty(out_features // self.size, in_features))
        self.bias = nn.Parameter(torch.empty(out_features // self.size)) if bias else None

    @torch.no_grad()
    def load_full(self, weight, bias):
        self.weight.copy_(weight.chunk(self.size)[self.rank])
        if bias is not None:
            self.bias.copy_(bias.chunk(self.size)[self.rank])

    def forward(self, x):
        return Gather.apply(nn.functional.linear(Enter.apply(x, self.group), self.weight, self.bias), self.group)


class Row(nn.Module):
    """Cut by inputs; the bias is whole everywhere and added after the sum."""

    def __init__(self, in_features, out_features, bias, group):
        super().__init__()
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(torch.empty(out_features, in_features // self.size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    @torch.no_grad()
    def load_full(self, weight, bias):
        self.weight.copy_(weight.chunk(self.size, 1)[self.rank])
        if bias is not None:
            self.bias.copy_(bias)

    def forward(self, x):
        mine = Enter.apply(x, self.group).chunk(self.size, -1)[self.rank]
        out = Sum.apply(nn.functional.linear(mine, self.weight), self.group)
        return out if self.bias is None else out + self.bias


class ForgetsTheInput(Column):
    def forward(self, x):
        return Gather.apply(nn.functional.linear(x, self.weight, self.bias), self.group)


class ScalesTheWeight(Column):
    def forward(self, x):
        out = super().forward(x)
        self.weight.register_hook(lambda grad: grad / self.size) if torch.is_grad_enabled() else None
        return out


class SharesNothing(nn.Linear):
    def __init__(self, in_features, out_features, bias, group):
        super().__init__(in_features, out_features, bias)

    @torch.no_grad()
    def load_full(self, weight, bias):
        self.weight.copy_(weight)
        if bias is not None:
            self.bias.copy_(bias)


class LosesRows(Column):
    @torch.no_grad()
    def load_full(self, weight, bias):
        super().load_full(weight, bias)
        self.weight.copy_(weight.chunk(self.size)[0])


class ReturnsItsPart(Column):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class NoWeights(nn.Module):
    pass
'''


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("layers") / "mine.py"
    path.write_text(LAYERS)
    return str(path)


def grades(layers: str, name: str) -> list[LayerGrade]:
    result = grade_layer(f"{layers}:{name}")
    assert [(grade.ranks, grade.bias) for grade in result] == [(2, True), (2, False), (3, True), (3, False)]
    return result


def test_a_right_layer_is_equal_and_its_collectives_are_counted(layers: str) -> None:
    for grade in grades(layers, "Column"):
        assert grade.ok and grade.first_wrong is None
        assert (grade.forward, grade.backward) == ({"allgather": 1}, {"allreduce": 1})
        assert grade.held == [pytest.approx(1 / grade.ranks)] * grade.ranks


def test_any_way_of_cutting_will_do(layers: str) -> None:
    for grade in grades(layers, "Row"):
        # The input is used whole by the cut that follows it, so its gradient is summed as well.
        assert grade.ok, grade
        assert (grade.forward, grade.backward) == ({"allreduce": 1}, {"allreduce": 1})


@pytest.mark.parametrize(
    ("name", "wrong"), [("ForgetsTheInput", "input gradient"), ("ScalesTheWeight", "weight gradient")]
)
def test_the_first_wrong_gradient_is_named(layers: str, name: str, wrong: str) -> None:
    assert {grade.first_wrong for grade in grades(layers, name)} == {wrong}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("SharesNothing", "nothing is parallel"),
        ("LosesRows", "in no rank's parameters after load_full"),
        ("ReturnsItsPart", "the contract is"),
    ],
)
def test_what_is_no_parallel_layer_is_refused(layers: str, name: str, problem: str) -> None:
    for grade in grades(layers, name):
        assert not grade.ok and grade.problem is not None and problem in grade.problem


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("{}:Missing", "has no nn.Module class Missing"),
        ("{}:NoWeights", "no method load_full"),
        ("nowhere.py:Column", "nowhere.py does not exist"),
        ("{}", "is not file.py:Class"),
    ],
)
def test_mistakes_are_the_users(layers: str, where: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        grade_layer(where.format(layers))
