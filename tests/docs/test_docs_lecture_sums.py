"""Sums of the lectures that no command prints: each is done again here, as docs/lectures.md says."""

from collections.abc import Callable
from math import ceil, log2

import pytest
import torch
from torch import Tensor, nn

from meshwright.cost import flops_per_token, parameter_count
from meshwright.hardware import gpu_by_key, peak_flops
from meshwright.job import Model, model_preset


def shape_of(name: str) -> Model:
    return Model.model_validate({"preset": name, **model_preset(name)})


@pytest.mark.parametrize(("name", "sequence", "times"), [("llama-3.2-1b", 4096, 3.62), ("llama-3-8b", 8192, 2.69)])
def test_the_vocabulary_belongs_beside_the_layers_not_in_them(name: str, sequence: int, times: float) -> None:
    shape = shape_of(name)
    width, of_width = shape.width, shape.layers * shape.width**2
    inside = 12 + 12 * shape.kv_heads / shape.heads + 18 * shape.ffn_width / width + 12 * sequence / width
    ours = flops_per_token(shape, sequence, "full")
    assert of_width * inside + 6 * shape.vocab_size * width == pytest.approx(ours, rel=1e-9)
    assert of_width * (inside + 6 * shape.vocab_size / width) / ours == pytest.approx(times, abs=0.005)


def test_total_compute_grows_linearly_with_the_sequence_for_a_fixed_number_of_tokens() -> None:
    shape = shape_of("llama-3-8b")
    a, b, c = (flops_per_token(shape, sequence, "full") for sequence in (4096, 8192, 12288))
    assert b - a == pytest.approx(c - b)
    whole = [flops_per_token(shape, sequence, "full") * sequence for sequence in (4096, 8192, 12288)]
    assert whole[2] - whole[1] > whole[1] - whole[0]  # a sample grows quadratically


def test_parameters_are_quadratic_in_the_width_and_linear_in_the_layers() -> None:
    def blocks(width: int, layers: int) -> int:
        fields = {"width": width, "layers": layers, "heads": 8, "vocab_size": 1}
        return parameter_count(Model.model_validate(fields)) - 3 * width  # embedding, head, last norm

    assert blocks(1024, 8) == 2 * blocks(1024, 4)
    assert blocks(2048, 4) / blocks(1024, 4) == pytest.approx(4, rel=1e-3)


def test_gpt3_in_16_and_32_bits() -> None:
    count = parameter_count(shape_of("gpt3-175b"))
    assert round(2 * count / 1e9) == 349 and round(4 * count / 1e9) == 698


def test_the_zero_table_of_7b_on_8_gpus() -> None:
    def gigabytes(weights: float, gradients: float, optimizer: float) -> float:
        return 7 * (weights + gradients + optimizer)

    rows = [gigabytes(2, 2, 12), gigabytes(2, 2, 12 / 8), gigabytes(2, 2 / 8, 12 / 8), gigabytes(2 / 8, 2 / 8, 12 / 8)]
    assert rows == [112, 38.5, 26.25, 14]


def ring_all_reduce(ranks: int) -> tuple[int, float]:
    """A ring played out: the rounds it takes and what one rank sends, in shares of its data. Checks the sums."""
    data = [[float(rank + 10 * chunk) for chunk in range(ranks)] for rank in range(ranks)]
    expected = [sum(rank + 10 * chunk for rank in range(ranks)) for chunk in range(ranks)]
    rounds = 0
    for adds in (True, False):
        for turn in range(ranks - 1):
            sent = [((rank - turn + (0 if adds else 1)) % ranks, rank) for rank in range(ranks)]
            values = [data[rank][chunk] for chunk, rank in sent]
            for (chunk, rank), value in zip(sent, values, strict=True):
                right = data[(rank + 1) % ranks]
                right[chunk] = right[chunk] + value if adds else value
            rounds += 1
    assert all(row == expected for row in data)
    return rounds, rounds / ranks


def test_a_ring_of_8_sends_1_75_times_its_data_in_14_rounds() -> None:
    assert ring_all_reduce(8) == (14, 1.75)
    assert ring_all_reduce(64)[0] == 126  # the bytes stay below 2, the rounds do not stay


def test_trees_win_where_latency_counts_and_rings_where_bytes_do() -> None:
    """Rounds of a ring and of a tree over many ranks, at one microsecond a round and 1 byte in 0.1 ns."""

    def ring(ranks: int, size: float) -> float:
        return 2 * (ranks - 1) * 1e-6 + 2 * (ranks - 1) / ranks * size * 1e-10

    def tree(ranks: int, size: float) -> float:
        return 2 * ceil(log2(ranks)) * 1e-6 + 2 * size * 1e-10

    assert tree(1024, 1e6) < ring(1024, 1e6) and ring(4, 1e9) < tree(4, 1e9)


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


def test_ranges_of_the_16_bit_formats() -> None:
    assert torch.finfo(torch.float16).max == 65504
    assert torch.finfo(torch.bfloat16).max == pytest.approx(torch.finfo(torch.float32).max, rel=0.01)


def test_peaks_and_links_of_the_cards_the_lectures_name() -> None:
    a100, h100, rtx = (gpu_by_key(key) for key in ("a100-80gb", "h100", "rtx-3090"))
    assert (peak_flops(a100, "tf32"), peak_flops(a100, "bf16")) == (156e12, 312e12)  # dense
    assert peak_flops(rtx, "bf16") is not None
    links = [gpu.gpu_link.bytes_per_s for gpu in (a100, h100) if gpu.gpu_link is not None]
    assert links == [300e9, 450e9]  # in one direction: 600 and 900 GB/s in both


def test_a_view_needs_strides_that_fit_and_reshape_copies_where_they_do_not() -> None:
    turned = torch.randn(3, 4).transpose(0, 1)
    assert not turned.is_contiguous()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        turned.view(-1)
    assert torch.equal(turned.contiguous().view(-1), turned.reshape(-1))
    assert turned.view(4, 3, 1).shape == (4, 3, 1)  # not contiguous, and yet it can be viewed
