"""A model that reads pictures: LLaVA as transformers computes it, tokens at their places, and what is refused."""

from typing import Any

import pytest
import torch

from meshwright.errors import UserError
from meshwright.job import model_from_hf_config, model_to_hf_config
from meshwright.job.model import Model
from meshwright.model import Decoder, Media, initialise, load_hf_state, to_hf_state
from meshwright.model.encoder import is_unused

TEXT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ENCODER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}
PICTURE = 7
SHAPE = Model(
    vocab_size=50,
    width=32,
    layers=2,
    heads=4,
    vision={"image_size": 8, "patch": 4, "width": 24, "layers": 2, "heads": 4, "images": 2, "image_token": PICTURE},
)


def llava(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    clip = kind == "clip"
    encoder = (
        transformers.CLIPVisionConfig(**ENCODER)
        if clip
        else transformers.SiglipVisionConfig(**ENCODER, vision_use_head=False)
    )
    config = transformers.LlavaConfig(
        vision_config=encoder,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=PICTURE,
        vision_feature_select_strategy="default" if clip else "full",
        image_seq_length=9,
    )
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    theirs = transformers.LlavaForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in theirs.parameters():  # away from zero biases and unit norms, which would hide a mistake
            parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs


def relative(ours: torch.Tensor, theirs: torch.Tensor, floor: float = 0.0) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=floor)).item()


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_logits_and_gradients_equal_transformers(kind: str) -> None:
    theirs = llava(kind)
    ours = Decoder(Model(**model_from_hf_config(theirs.config.to_dict())))
    load_hf_state(ours, theirs.state_dict())
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(8, 97, (2, 24), generator=generator)
    places_BKT = torch.tensor([[list(range(2, 11)), list(range(13, 22))], [list(range(9)), [-1] * 9]])
    for row, places in enumerate(places_BKT.flatten(1)):
        tokens[row, places[places >= 0]] = PICTURE
    items_BK = torch.randn(2, 2, 3, 12, 12, generator=generator)
    taken = items_BK[torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])]
    their_logits = theirs(input_ids=tokens, pixel_values=taken).logits
    our_logits = ours(tokens, media=Media(items_BK, places_BKT))
    assert relative(our_logits, their_logits) <= 1e-5

    weight = torch.randn(their_logits.shape, generator=generator)
    (their_logits * weight).sum().backward()
    (our_logits * weight).sum().backward()
    gradients = Decoder(ours.shape)
    state = {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters(recurse=True)
    }
    load_hf_state(gradients, state)
    floor = 1e-5 * max(p.abs().max().item() for p in gradients.parameters())
    for (name, own), expected in zip(ours.named_parameters(), gradients.parameters(), strict=True):
        assert (own.grad is None) == is_unused(ours.shape, name), name
        if own.grad is not None:
            # A key's bias has no gradient but rounding errors: attention is invariant to it.
            assert relative(own.grad, expected.detach(), floor) <= 1e-5 or name.endswith("k.bias"), name


def test_pixels_are_normalised_before_they_are_rounded() -> None:
    """In 16 bits x / 255 and its centre differ by little more than their rounding."""
    assert SHAPE.vision is not None
    pictures = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 4, 3, 8, 8)
    inputs = {}
    for dtype in (torch.bfloat16, torch.float32):
        tower = Decoder(SHAPE).vision
        assert tower is not None
        tower.get_submodule("patch").register_forward_pre_hook(
            lambda _, arguments, dtype=dtype: inputs.update({dtype: arguments[0]})
        )
        tower.to(dtype)(pictures)
    assert inputs[torch.bfloat16].dtype == torch.bfloat16
    torch.testing.assert_close(inputs[torch.bfloat16], inputs[torch.float32].bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_config_and_names_round_trip(kind: str) -> None:
    theirs = llava(kind)
    shape = Model(**model_from_hf_config(theirs.config.to_dict()))
    assert Model(**model_from_hf_config(model_to_hf_config(shape))) == shape
    ours = Decoder(shape)
    load_hf_state(ours, theirs.state_dict())
    again = Decoder(shape)
    written = to_hf_state(ours)
    load_hf_state(again, written)
    assert len(written) == len(theirs.state_dict())
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_published_config_may_leave_out_what_transformers_assumes() -> None:
    shape = Model(
        **model_from_hf_config(
            {
                "model_type": "llava",
                "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
                "vision_config": {
                    "model_type": "clip_vision_model",
                    "hidden_size": 1024,
                    "intermediate_size": 4096,
                    "num_hidden_layers": 24,
                    "num_attention_heads": 16,
                    "image_size": 336,
                    "patch_size": 14,
                    "projection_dim": 768,
                    "vocab_size": 32000,
                },
                "image_token_index": 32000,
                "ignore_index": -100,
                "projector_hidden_act": "gelu",
                "vision_feature_layer": -2,
                "vision_feature_select_strategy": "default",
            }
        )
    )
    assert (shape.width, shape.layers, shape.vision.tokens if shape.vision else 0) == (4096, 32, 576)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ({"vision_config": {"model_type": "pixtral"}}, "vision_config.model_type = 'pixtral'"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "vision_use_head"),
        ({"vision_config": {"model_type": "clip_vision_model", "rope": 1}}, "vision_config.rope"),
        ({"text_config": {"model_type": "gemma"}}, "text_config.model_type = 'gemma'"),
        ({"query_tokens": 32}, "query_tokens"),
    ],
)
def test_what_a_config_has_besides_is_refused_by_name(change: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        model_from_hf_config({"model_type": "llava"} | change)


def test_tokens_of_pictures_take_their_places_and_no_others() -> None:
    model = Decoder(SHAPE).double()
    initialise(model, seed=0)
    seen = {}
    model.layers["0"].register_forward_pre_hook(lambda _, inputs: seen.update(hidden=inputs[0]))
    tokens = torch.arange(2 * 12).view(2, 12) % 50
    items_BK = torch.randint(0, 256, (2, 2, 3, 8, 8), dtype=torch.uint8)
    places_BKT = torch.tensor([[[1, 2, 3, 4], [8, 9, -1, -1]], [[-1] * 4, [0, 1, 2, 3]]])
    model(tokens)
    plain = seen["hidden"]
    model(tokens, media=Media(items_BK, places_BKT))
    assert model.vision is not None
    encoded = model.vision(items_BK)
    expected = plain.clone()
    expected[0, 1:5], expected[0, 8:10], expected[1, :4] = encoded[0, 0], encoded[0, 1, :2], encoded[1, 1]
    assert torch.equal(seen["hidden"], expected)
    # As transformers' processors scale bytes for SigLIP.
    scaled = items_BK.double() / 255
    torch.testing.assert_close(model.vision((scaled - 0.5) / 0.5), encoded)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"patch": 5}, "model.vision.patch = 5 does not divide"),
        ({"heads": 5}, "model.vision.heads = 5 does not divide"),
        ({"select_layer": -3}, "select_layer = -3 selects none"),
        ({"image_token": 50}, "image_token = 50 is outside model.vocab_size = 50"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], match: str) -> None:
    assert SHAPE.vision is not None
    with pytest.raises(ValueError, match=match):
        Model(**SHAPE.model_dump() | {"vision": SHAPE.vision.model_dump() | fields})


@pytest.mark.parametrize("fields", [{"extra_tokens": 1}, {"adapter": {}}, {"file": "own.py"}])
def test_what_is_not_supported_with_it_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"model\.vision"):
        Model(**SHAPE.model_dump() | fields)
