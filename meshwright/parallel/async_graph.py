"""Graphs of compiled blocks in the words that torch's pass for asynchronous tensor parallelism knows.

It finds a gather only where its parts are put together again, a scatter only where one product is scattered, and no
product with a bias. What these functions write computes the same; where the pass then finds nothing, a copy is more.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from meshwright.torch_private.symmetric_memory import GATHER, SCATTER, WAIT

_ATEN = torch.ops.aten
_RESHAPE, _SPLIT, _CAT = _ATEN.reshape.default, _ATEN.split.Tensor, _ATEN.cat.default
_MM, _ADDMM, _ADD = _ATEN.mm.default, _ATEN.addmm.default, _ATEN.add.Tensor


def use_known_patterns(graph: Graph) -> None:
    """Rewrite what the pass does not know."""
    _join_gathered(graph)
    _separate_biases(graph)
    _join_sums(graph)
    graph.eliminate_dead_code()


def _join_gathered(graph: Graph) -> None:
    """With one sequence in a micro-batch, torch takes what was gathered along it as a view."""
    for wait in graph.find_nodes(op="call_function", target=WAIT):
        gather = wait.args[0]
        if gather.target is not GATHER:
            continue
        first, length, *rest = _shape(gather.args[0])
        ranks = gather.args[1]
        for view in [user for user in wait.users if user.target is _RESHAPE]:
            if first != 1 or not rest or _shape(view) != [1, ranks * length, *rest]:
                continue
            with graph.inserting_before(view):
                split = _call(graph, _SPLIT, wait, 1)
                parts = [_call(graph, operator.getitem, split, rank) for rank in range(ranks)]
                joined = _call(graph, _CAT, parts, 1)
            view.replace_all_uses_with(joined)


def _separate_biases(graph: Graph) -> None:
    """A bias is added to the product of what was gathered, not by it."""
    for node in graph.find_nodes(op="call_function", target=_ADDMM):
        bias, first, second = node.args
        if first.target is not _RESHAPE or not _is_gathered(whole := first.args[0]):
            continue
        with graph.inserting_before(node):
            product = _call(graph, _MM, first, second)
            shaped = _call(graph, _RESHAPE, product, [*_shape(whole)[:-1], _shape(second)[-1]])
            biased = _call(graph, _RESHAPE, _call(graph, _ADD, shaped, bias), _shape(node))
        node.replace_all_uses_with(biased)


def _is_gathered(node: Node) -> bool:
    while node.target in (_CAT, operator.getitem, _SPLIT, WAIT):
        node = _first(node)
    return node.target is GATHER


def _join_sums(graph: Graph) -> None:
    """A sum of products that is scattered, as that of the gradients of one input's projections, becomes one product:
    first factors side by side, second ones below each other."""
    for scatter in graph.find_nodes(op="call_function", target=SCATTER):
        summed = scatter.args[0]
        while summed.target in (_CAT, operator.getitem, _SPLIT):
            summed = _first(summed)
        terms = list(_terms(summed))
        if len(terms) == 1 or None in terms:
            continue
        shape = _shape(summed)
        with graph.inserting_before(summed):
            flat = _call(graph, _CAT, [term.args[0] for term in terms if term], 1)
            inputs = _shape(flat)[-1]
            # The pass wants the first factor in the shape of the result, and finds it through these.
            first = _call(graph, _RESHAPE, _call(graph, _RESHAPE, flat, [*shape[:-1], inputs]), [-1, inputs])
            second = _call(graph, _CAT, [term.args[1] for term in terms if term], 0)
            product = _call(graph, _RESHAPE, _call(graph, _MM, first, second), shape)
        summed.replace_all_uses_with(product)


def _terms(node: Node) -> Iterator[Node | None]:
    """The products that a node sums up; None for what is not one."""
    if node.target is _ADD and not node.kwargs and all(isinstance(one, Node) for one in node.args):
        for one in node.args:
            yield from _terms(one)  # type: ignore[arg-type]
        return
    product = node.args[0] if node.target is _RESHAPE else node
    yield product if isinstance(product, Node) and product.target is _MM else None


def _first(node: Node) -> Any:
    given = node.args[0]
    return given[0] if isinstance(given, list | tuple) else given


def _shape(node: Any) -> list[Any]:
    return list(node.meta["val"].shape)


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    """A new node, with the shape of its result for those who look at it next."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*torch.fx.map_arg(args, lambda one: one.meta["val"]))
    return node
