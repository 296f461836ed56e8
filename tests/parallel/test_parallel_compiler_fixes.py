"""What autograd functions of our own made inside a recomputed block is tagged to be made again."""

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.parallel.compiler_fixes import TagFunctions

AGAIN, KEEP = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def joint(tag: CheckpointPolicy | None) -> dict[str, fx.Node]:
    """x → tagged → untagged, as forward; grad and what is made from it and the forward, as backward."""
    graph = fx.Graph()
    x, grad = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    tagged = graph.call_function(abs, (x,))
    if tag is not None:
        tagged.meta |= {"recompute": tag, "ac_graph_id": 7}
    inside = graph.call_function(abs, (tagged,))
    behind = graph.call_function(max, (inside, grad))
    graph.output((inside, behind))
    TagFunctions()(graph)
    return {"x": x, "tagged": tagged, "inside": inside, "behind": behind}


def test_the_forward_is_tagged_and_the_backward_is_not() -> None:
    nodes = joint(AGAIN)
    assert nodes["inside"].meta["recompute"] is AGAIN and nodes["inside"].meta["ac_graph_id"] == 7
    assert "recompute" not in nodes["behind"].meta and "recompute" not in nodes["x"].meta


def test_nothing_changes_where_nothing_or_not_all_is_made_again() -> None:
    for tag in (None, KEEP):
        assert "recompute" not in joint(tag)["inside"].meta
