"""Multi-token prediction: the arithmetic, written out; layouts are compared with one process by `verify --matrix`."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.cost import flops_per_token, matmul_parameters, parameter_count, tensor_count
from meshwright.data.batch import Batch, stack_samples
from meshwright.data.samples import IGNORE, Sample, masked_sample
from meshwright.job import Model
from meshwright.model import Decoder, initialise
from meshwright.model.block import Block, ExtraBlock
from meshwright.model.rotary import rotary_tables

S = 11
SMALL: dict[str, Any] = {"vocab_size": 29, "width": 12, "layers": 2, "heads": 2, "ffn_width": 20, "extra_tokens": 1}
EXPERTS = {"count": 4, "top_k": 2, "ffn_width": 6, "scores": "sigmoid", "first_dense": 1, "shared_width": 6}
GPT2 = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "linear_bias": True, "tied": True}
SHAPES: dict[str, Any] = {
    "llama": {},
    "two": {"extra_tokens": 2},
    "tied": {"tied": True},
    "experts": {"experts": EXPERTS},
    "gpt2": GPT2,
}


def made(**fields: Any) -> Decoder:
    decoder = Decoder(Model(**SMALL | fields)).double()
    initialise(decoder, 0)
    with torch.no_grad():
        for number, parameter in enumerate(decoder.parameters()):  # norms of one and small matrices would hide mistakes
            parameter.mul_(6).add_(0.1 * torch.cos(torch.arange(parameter.numel()) + number).view_as(parameter))
    return decoder


def batch_of(*texts: Tensor) -> Batch:
    samples = [Sample(text[:-1].numpy(), text[1:].numpy(), None, len(text) - 1) for text in texts]
    return stack_samples(samples, range(len(texts)))


def run(decoder: Decoder, batch: Batch, count: float) -> tuple[Tensor, list[Tensor]]:
    """The loss that is returned, and the gradients of all parameters."""
    ahead = [batch.ahead(places) for places in range(1, decoder.shape.extra_tokens + 1)]
    options = {"positions": batch.positions_BS, "documents": batch.documents(), "ahead": ahead}
    loss = decoder(batch.tokens_BS, batch.labels_BS, count, **options)
    return loss, list(torch.autograd.grad(loss, list(decoder.parameters())))


def normed(norm: Any, x: Tensor) -> Tensor:
    if isinstance(norm, torch.nn.LayerNorm):
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight


def written_out(decoder: Decoder, text: Tensor) -> tuple[Tensor, Tensor]:
    """Both losses of a text, as sums: place i of depth k has hidden state i and token i + k, and predicts i + k + 1."""
    shape, tokens = decoder.shape, text[:-1].unsqueeze(0)
    table, places = decoder.embed.weight, torch.arange(len(text)).unsqueeze(0)
    hidden = table[tokens]
    if decoder.position_embed is not None:
        hidden = hidden + decoder.position_embed.weight[: len(text) - 1]

    def block(layer: int, x: Tensor) -> Tensor:
        rotary = rotary_tables(shape, places[:, : x.shape[1]], x.dtype) if shape.positions == "rope" else None
        return Block.forward(cast(Block, decoder.layers[str(layer)]), x, rotary)

    for layer in range(shape.layers):
        hidden = block(layer, hidden)
    hidden = normed(decoder.final_norm, hidden)
    main = F.cross_entropy((hidden @ decoder.head.weight.T)[0], text[1:], reduction="sum")
    extra = torch.zeros((), dtype=main.dtype)
    for depth in range(1, shape.extra_tokens + 1):
        own: Any = decoder.layers[str(shape.layers + depth - 1)]
        hidden = hidden[:, : len(text) - 1 - depth]
        later = table[text[depth:-1]].unsqueeze(0)
        both = torch.cat([normed(own.embedding_norm, later), normed(own.hidden_norm, hidden)], -1)
        hidden = normed(own.output_norm, block(shape.layers + depth - 1, both @ own.joined.weight.T))
        logits = (hidden @ decoder.head.weight.T)[0]
        extra = extra + F.cross_entropy(logits, text[depth + 1 :], reduction="sum") / shape.extra_tokens
    return main, extra


@pytest.mark.parametrize("name", SHAPES)
def test_it_equals_the_formulas_written_out(name: str) -> None:
    decoder = made(**SHAPES[name], extra_tokens_weight=0.7)
    texts = [torch.randint(0, 29, (S + 1,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    loss, gradients = run(decoder, batch_of(*texts), 5.0)
    losses = [written_out(decoder, text) for text in texts]
    main, extra = (sum(each) / 5.0 for each in zip(*losses, strict=True))
    torch.testing.assert_close(loss, main, rtol=1e-12, atol=0)
    assert decoder.extra_loss is not None
    torch.testing.assert_close(decoder.extra_loss, extra.detach(), rtol=1e-12, atol=0)
    expected = torch.autograd.grad(main + 0.7 * extra, list(decoder.parameters()))
    for (parameter, _), ours, theirs in zip(decoder.named_parameters(), gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"gradient of {parameter}")


def test_packed_documents_give_what_each_gives_alone() -> None:
    decoder = made(extra_tokens=2)
    text = torch.randint(0, 29, (S + 1,), generator=torch.Generator().manual_seed(3)).numpy()
    starts = torch.tensor([4, 5, 7]).numpy()  # one of a single token among them
    packed = stack_samples([masked_sample(text[:-1], text[1:], starts)], [0])
    alone = [torch.from_numpy(part) for part in (text[0:4], text[5:7], text[7:])]
    loss, gradients = run(decoder, packed, 1.0)
    parts = [run(decoder, batch_of(part), 1.0) for part in alone]
    torch.testing.assert_close(loss, sum(part for part, _ in parts))
    for ours, *theirs in zip(gradients, *(own for _, own in parts), strict=True):
        torch.testing.assert_close(ours, sum(theirs), rtol=1e-9, atol=1e-12)


def test_labels_that_do_not_count_are_never_predicted() -> None:
    text = torch.arange(6)
    sample = Sample(text[:-1].numpy(), torch.tensor([1, IGNORE, 3, 4, 5]).numpy(), None, 5)
    tokens, labels = stack_samples([sample], [0]).ahead(1)
    assert tokens[:, :-1].tolist() == [[1, 2, 3, 4]] and labels.tolist() == [[IGNORE, 3, 4, 5, IGNORE]]


def test_evaluation_and_generation_do_not_run_the_extra_block(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, plain = made(), Decoder(Model(**SMALL | {"extra_tokens": 0})).double()
    plain.load_state_dict({name: value for name, value in decoder.state_dict().items() if "layers.2." not in name})
    monkeypatch.setattr(ExtraBlock, "forward", None)
    tokens = torch.randint(0, 29, (2, S))
    assert torch.equal(decoder(tokens), plain(tokens))
    assert torch.equal(decoder(tokens, tokens, 1), plain(tokens, tokens, 1))


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted(name: str) -> None:
    shape = Model(**SMALL | SHAPES[name])
    parameters = list(Decoder(shape).parameters())
    assert parameter_count(shape) == sum(parameter.numel() for parameter in parameters)
    assert tensor_count(shape) == len(parameters)


def test_flops_count_another_block_and_another_pass_through_the_head() -> None:
    shape, plain = Model(**SMALL), Model(**SMALL | {"extra_tokens": 0})
    block = matmul_parameters(Model(**SMALL | {"extra_tokens": 0, "layers": 3})) - matmul_parameters(plain)
    assert matmul_parameters(shape) - matmul_parameters(plain) == block + 2 * 12 * 12 + 29 * 12
    attention = flops_per_token(shape, 8, "full") - 6 * matmul_parameters(shape)
    assert attention == 1.5 * (flops_per_token(plain, 8, "full") - 6 * matmul_parameters(plain))
