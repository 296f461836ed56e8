"""The picture of the load of experts."""

from meshwright.studio.experts import experts_chart


def test_without_experts_there_is_no_picture() -> None:
    assert experts_chart([{"kind": "start"}]) == ""


def test_every_expert_of_every_layer_is_a_cell_of_the_last_load() -> None:
    older = {"kind": "experts", "step": 1, "first_layer": 1, "tokens": [[1, 1, 1]]}
    last = {"kind": "experts", "step": 20, "first_layer": 1, "tokens": [[30, 10, 20], [60, 0, 0]]}
    shown = experts_chart([older, last])
    assert shown.count("<rect") == 6 and "Tokens per expert in step 20" in shown
    assert "layer 1, expert 0: 1.50 × the mean" in shown and "layer 2, expert 1: 0.00 × the mean" in shown
    assert "The most loaded got 3.0 × it; 2 experts got none (orange)." in shown
    assert shown.count('fill-opacity="1.00"') == 3  # twice the mean and more, and those without a token


def test_dropped_tokens_are_named_if_experts_have_a_capacity() -> None:
    event = {"kind": "experts", "step": 20, "first_layer": 1, "tokens": [[30, 10, 20], [60, 0, 0]]}
    assert "dropped" not in experts_chart([event])
    shown = experts_chart([event | {"dropped": [6, 30]}])
    assert "30.0% of them were dropped for an expert, most in layer 2 (50.0%)." in shown


def test_too_many_experts_are_not_drawn() -> None:
    tokens = [[1] * 300] * 200
    assert "too many to draw" in experts_chart([{"kind": "experts", "step": 1, "first_layer": 0, "tokens": tokens}])
