"""The planner's terms for an encoder of pictures or sound: what the trainer allocates, time that grows with work."""

from functools import partial
from typing import Any

import pytest
import torch
from plan_jobs import llama, nodes

from meshwright.job import Job
from meshwright.job.devices import Cluster
from meshwright.layout import encoder_bytes, recomputes_encoder
from meshwright.parallel import World, build
from meshwright.plan import predict
from meshwright.train.optimizer import build_optimizer, states_of

SMALL = {"image_size": 8, "patch": 4, "width": 16, "layers": 3, "heads": 2, "ffn_width": 24, "kind": "clip"}
LARGE = {
    "kind": "clip",
    "image_size": 336,
    "patch": 14,
    "width": 1024,
    "layers": 24,
    "heads": 16,
    "select_layer": -2,
}
SMALL_SOUND = {"mels": 5, "seconds": 0.08, "width": 16, "layers": 3, "heads": 2, "ffn_width": 24}
LARGE_SOUND = {"mels": 128, "seconds": 30.0, "width": 1280, "layers": 32, "heads": 20}
"""The encoder of Whisper large-v3."""
BATCH = {"sequence_length": 2048, "global_batch": 64, "micro_batch": 1}


def small(section: str, **encoder: Any) -> Job:
    own = (SMALL if section == "vision" else SMALL_SOUND) | encoder
    return Job.model_validate(
        {
            "model": {"vocab_size": 64, "width": 32, "layers": 2, "heads": 4, section: own},
            "batch": {"sequence_length": 16, "global_batch": 2, "micro_batch": 2},
            "precision": {"compute": "bf16"},
            "data": {"sources": ["builtin:synthetic"]},
        }
    )


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("train", [("encoder", "projector", "decoder"), ("projector", "decoder"), ("projector",)])
@pytest.mark.parametrize("section", ["vision", "audio"])
def test_states_are_those_that_the_trainer_allocates(section: str, train: tuple[str, ...]) -> None:
    job = small(section, train=train)
    _, weights = build(job, World(torch.device("cpu")))
    terms = predict(job, Cluster(gpu="h100")).memory[0].terms
    exactly = partial(pytest.approx, rel=2e-3)  # but for the decoder's last norm
    assert terms["weights"] == exactly(bytes_of(weights.masters.values()))
    assert terms["working weights"] == exactly(bytes_of(weights.working.values()))
    assert terms.get("frozen weights", 0) == exactly(bytes_of(weights.frozen.values()))
    optimizer = build_optimizer(weights.masters, job)
    for master in weights.masters.values():
        master.grad = torch.zeros_like(master)
    optimizer.step()
    kept = [value for state in states_of(optimizer, weights.masters).values() for value in state.values()]
    assert terms["optimizer states"] == exactly(bytes_of(value for value in kept if value.dim() > 0))


@pytest.mark.parametrize(("section", "tp"), [("vision", 1), ("vision", 2), ("audio", 2)])
def test_what_the_encoder_keeps_is_counted_on_the_first_stage(section: str, tp: int) -> None:
    large = LARGE if section == "vision" else LARGE_SOUND
    plain, seeing = (
        llama(batch=BATCH, model={section: encoder}, layout={"pp": 4, "tp": tp, "dp_replicate": 2 // tp})
        for encoder in (None, large)
    )
    without, with_it = (predict(job, nodes(1)).memory for job in (plain, seeing))
    more = [b.terms["activations"] - a.terms["activations"] for a, b in zip(without, with_it, strict=True)]
    assert more[0] == pytest.approx(4 * encoder_bytes(seeing))  # micro-batches in flight
    assert more[1:] == pytest.approx([0.0, 0.0, 0.0])
    recomputed = seeing.model_copy(update={"memory": seeing.memory.model_copy(update={"recompute": "full"})})
    assert recomputes_encoder(recomputed) and encoder_bytes(recomputed) < encoder_bytes(seeing) / 5


def test_more_pictures_take_longer_and_a_frozen_encoder_takes_less() -> None:
    def step_s(**vision: Any) -> float:
        return _step_s({"vision": LARGE | vision} if vision else {})

    frozen = {"train": ["projector", "decoder"]}
    plain, one, three = step_s(), step_s(images=1, **frozen), step_s(images=3, **frozen)
    assert 1.8 < (three - plain) / (one - plain) < 3.1
    assert step_s(images=1) > one > plain


def test_a_step_of_one_micro_batch_may_have_several_slots() -> None:
    batch = BATCH | {"global_batch": 8, "micro_batch": 1}
    sound = LARGE_SOUND | {"seconds": 5.0}
    one, three = (
        predict(llama(batch=batch, model={"audio": sound | {"windows": windows}}, layout={"dp_shard": 8}), nodes(1))
        for windows in (1, 3)
    )
    assert three.step_s > one.step_s


def test_longer_sound_takes_longer_and_a_frozen_encoder_takes_less() -> None:
    frozen = LARGE_SOUND | {"train": ["projector", "decoder"]}
    plain, half, whole = (_step_s(model) for model in ({}, {"audio": frozen | {"seconds": 15.0}}, {"audio": frozen}))
    assert 1.8 < (whole - plain) / (half - plain) < 3.1
    assert _step_s({"audio": LARGE_SOUND}) > whole > plain


def _step_s(model: dict[str, Any]) -> float:
    batch = BATCH | {"micro_batch": 8}  # large products, or launches would take most of the time
    return predict(llama(batch=batch, model=model, layout={"dp_shard": 8}), nodes(1)).step_s
