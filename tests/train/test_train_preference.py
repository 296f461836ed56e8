"""Preference losses: equal to a plain float64 computation and to TRL's, and training on them changes the answers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from preference_pairs import SHAPE, answers, model, packed
from safetensors import safe_open
from safetensors.numpy import save

from meshwright.data import References
from meshwright.errors import UserError
from meshwright.job import Job, Preference, load_job
from meshwright.launch.worker import run_quietly
from meshwright.model import tallied
from meshwright.parallel import World
from meshwright.parallel.inputs import Inputs

LOSSES = [
    Preference(),
    Preference(beta=0.5, label_smoothing=0.2),
    Preference(loss="ipo"),
    Preference(loss="orpo", beta=0.3),
]
# Printed by tests/train/trl_values.py with trl 1.16.0, transformers 5.22.2 and torch 2.13.0.
TRL = [
    (Preference(beta=0.1), 1.313771367073059),
    (Preference(beta=0.5), 4.907588958740234),
    (Preference(loss="ipo", beta=0.1), 46.45560073852539),
]


def log_probabilities(decoder) -> list[torch.Tensor]:
    """Every answer's token log-probabilities, each computed by itself from whole logits."""
    found = []
    for prompt, answer in answers():
        logits = decoder(torch.tensor([[*prompt, *answer]]))[0]
        rows = F.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
        found.append(rows.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1))
    return found


def plainly(settings: Preference, chosen, rejected, ref_chosen, ref_rejected) -> torch.Tensor:
    """A pair's loss as the papers write it, from token log-probabilities."""
    if settings.loss == "orpo":
        odds = [logp.mean() - torch.log1p(-logp.mean().exp()) for logp in (chosen, rejected)]
        return -chosen.mean() - settings.beta * torch.log(torch.sigmoid(odds[0] - odds[1]))
    if settings.loss == "ipo":
        difference = (chosen - ref_chosen).mean() - (rejected - ref_rejected).mean()
        return (difference - 1 / (2 * settings.beta)) ** 2
    margin = settings.beta * ((chosen.sum() - ref_chosen.sum()) - (rejected.sum() - ref_rejected.sum()))
    right, wrong = torch.sigmoid(margin), torch.sigmoid(-margin)
    return -(1 - settings.label_smoothing) * right.log() - settings.label_smoothing * wrong.log()


def loss_of_batch(settings: Preference, decoder, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
    """The decoder's loss of the packed pairs, a mean over them, and the tally."""
    job = Job.model_validate({"model": SHAPE, "data": {"format": "preferences"}, "preference": settings,
                              "batch": {"sequence_length": 48, "global_batch": 2, "micro_batch": 2}})  # fmt: skip
    with torch.no_grad():
        sums = [float(logp.sum()) for logp in log_probabilities(model(0.5))]
    inputs, batch = Inputs(job, World(torch.device("cpu"))), packed().select(rows)
    pairs = np.array(sums).reshape(-1, 2)
    inputs.references = References(np.array([*packed().pairs[0], 100]), np.concatenate([pairs, pairs[:1]]))
    tokens, arguments = inputs.training(batch, float(batch.valid_count()), torch.tensor(1))
    loss = decoder(tokens, **arguments)
    return loss, inputs.tally.take()


@pytest.mark.parametrize("settings", LOSSES, ids=lambda settings: f"{settings.loss} {settings.beta:g}")
def test_loss_and_gradients_are_those_of_a_plain_computation(settings):
    """Four pairs in two packed sequences against eight forwards of one answer each: float64, ≤ 1e-9."""
    ours, plain = model(0.0), model(0.0)
    loss, tally = loss_of_batch(settings, ours)
    loss.backward()
    logps = log_probabilities(plain)
    with torch.no_grad():
        references = log_probabilities(model(0.5))
    order = [0, 1, 2, 0]
    pairs = [(logps[2 * n], logps[2 * n + 1], references[2 * n], references[2 * n + 1]) for n in order]
    expected = torch.stack([plainly(settings, *pair) for pair in pairs]).mean()
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    for (name, mine), (_, theirs) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        scale = theirs.grad.abs().max()
        assert scale > 0 and (mine.grad - theirs.grad).abs().max() / scale < 1e-9, name
    if settings.loss == "dpo":
        rewards = [
            [settings.beta * float((a - r).sum().detach()) for a, r in ((c, rc), (w, rw))] for c, w, rc, rw in pairs
        ]
        right = sum(chosen > rejected for chosen, rejected in rewards)
        assert tally.tolist() == pytest.approx([*map(sum, zip(*rewards, strict=True)), right])


@pytest.mark.parametrize(("settings", "theirs"), TRL, ids=lambda each: getattr(each, "loss", ""))
def test_losses_are_trls(settings, theirs):
    loss, _ = loss_of_batch(settings, model(0.0), slice(0, 1))
    assert float(loss.detach()) == pytest.approx(theirs, rel=2e-6)  # TRL's value is of float32


def test_a_pair_is_right_where_the_chosen_answer_has_the_higher_reward():
    """Of three pairs two; a pair of equal rewards counts half, and a slot without a pair nothing."""
    rewards = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]], [[5.0, 5.0], [7.0, 0.0], [0.0, 7.0]]])
    present = torch.tensor([[True, True, True], [True, False, False]])
    assert tallied(rewards, present).tolist() == [9.0, 8.0, 2.5]


def test_a_micro_batchs_gradient_is_scaled_by_the_steps_pairs():
    """Sequences one by one, each over the number of all pairs, add up to both together."""
    together = model(0.0)
    loss_of_batch(LOSSES[0], together)[0].backward()
    apart = model(0.0)
    for rows, pairs in ((slice(0, 1), 3), (slice(1, 2), 1)):
        (loss_of_batch(LOSSES[0], apart, rows)[0] * pairs / 4).backward()
    for mine, theirs in zip(apart.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def pairs_file(path: Path, count: int = 240) -> Path:
    """Questions whose right answer repeats the number in words, and whose wrong one does not."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    with path.open("w") as stream:
        for n in range(count):
            say = " ".join(words[int(digit)] for digit in str(n))
            record = {"prompt": f"Say {n}.", "chosen": f" {say}, please", "rejected": f" {say}, now"}
            stream.write(json.dumps(record) + "\n")
    return path


def dpo_job(folder: Path, **sections: dict[str, Any]) -> Path:
    job: dict[str, dict[str, Any]] = {
        "model": {"preset": "tiny-llama", "vocab_size": 320, "width": 32, "layers": 2, "ffn_width": 64},
        "data": {"sources": [str(folder / "pairs.jsonl")], "format": "preferences", "validation_fraction": 0.2,
                 "cache": str(folder / "cache"), "workers": 0},
        "batch": {"sequence_length": 96, "global_batch": 8, "micro_batch": 4},
        "optimizer": {"lr": 3e-3},
        "evaluation": {"every_steps": 100, "sample_tokens": 0},
        "run": {"steps": 20, "folder": str(folder / "run"), "device": "cpu"},
    }  # fmt: skip
    for name, section in sections.items():
        job[name] = job.get(name, {}) | section
    lines = [
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in section.items()) for name, section in job.items()
    ]
    path = folder / "job.toml"
    path.write_text("\n".join(lines))
    return path


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_training_changes_which_answers_are_preferred(tmp_path: Path):
    """Held-out pairs: half in the right order before (the model is its own reference), nearly all after."""
    pairs_file(tmp_path / "pairs.jsonl")
    run_quietly(load_job(str(dpo_job(tmp_path))))
    rows = rows_of(tmp_path)
    before, *_, after = [row for row in rows if "val_loss" in row]
    steps = [row for row in rows if "loss" in row]
    assert before["val_accuracy"] == 0.5 and before["val_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert steps[0]["loss"] == pytest.approx(math.log(2), rel=1e-6) and steps[0]["reward_margin"] == pytest.approx(0)
    assert after["val_accuracy"] > 0.95 and after["val_loss"] < 0.5 and after["val_margin"] > 0
    assert steps[-1]["preference_accuracy"] > 0.9
    assert steps[-1]["reward_margin"] == pytest.approx(steps[-1]["reward_chosen"] - steps[-1]["reward_rejected"])


@pytest.mark.thorough
def test_a_resumed_run_compares_with_the_first_weights(tmp_path: Path):
    """Interrupted and resumed the numbers are those of one run; longer than planned, the pairs it lacks are added; with
    a lost or foreign file of references it is refused."""
    pairs_file(tmp_path / "pairs.jsonl", 60)
    short: dict[str, dict[str, Any]] = {
        "run": {"steps": 3},
        "evaluation": {"every_steps": 0},
        "batch": {"global_batch": 2, "micro_batch": 2},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "checkpoint": {"every_steps": 3},
    }
    whole = {**short, "run": {"steps": 6, "folder": str(tmp_path / "whole")}}
    run_quietly(load_job(str(dpo_job(tmp_path, **whole))))
    (tmp_path / "whole").rename(tmp_path / "run")
    expected = [row["loss"] for row in rows_of(tmp_path)]
    (tmp_path / "run").rename(tmp_path / "whole")
    run_quietly(load_job(str(dpo_job(tmp_path, **short))))
    known = (tmp_path / "run" / "reference.safetensors").read_bytes()
    longer = load_job(str(dpo_job(tmp_path, **{**short, "run": {"steps": 6}})))
    run_quietly(longer, resume=True)
    assert [row["loss"] for row in rows_of(tmp_path)] == expected
    assert (tmp_path / "run" / "reference.safetensors").read_bytes() != known

    kept = tmp_path / "run" / "reference.safetensors"
    with safe_open(kept, "numpy") as file:
        told, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for field, words in (
        ("start", "other start weights than model.init_from"),
        ("data", "other pairs than data.sources"),
    ):
        kept.write_bytes(save(arrays, told | {field: "0"}))
        with pytest.raises(UserError, match=f"reference.safetensors belongs to {words}"):
            run_quietly(longer, resume=True)
    kept.unlink()
    with pytest.raises(UserError, match=r"reference\.safetensors is lost.*; restore it, or start a new run"):
        run_quietly(longer, resume=True)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"data": {"packing": "concatenate"}}, 'data.packing = "concatenate" would cut answers apart'),
        ({"data": {"mask_documents": False}}, "data.mask_documents = false would show answers to each other"),
        ({"data": {"stream": True}}, "data.stream = true reads plain text"),
        ({"model": {"extra_tokens": 1}}, "model.extra_tokens = 1 adds losses of tokens"),
        ({"model": {"file": "own.py"}}, "model.file = own.py computes its own loss"),
        ({"evaluation.sets": {"wiki": "w.txt"}}, "evaluation.sets has wiki"),
        ({"layout": {"pp": 2, "schedule": "pipedream"}}, 'layout.schedule = "pipedream" updates stages before'),
        ({"preference": {"loss": "ipo", "label_smoothing": 0.1}}, "preference.label_smoothing = 0.1 is for"),
        ({"preference": {"beta": 0}}, "preference.beta = 0"),
        ({"preference": {"loss": "kto"}}, "preference.loss"),
    ],
)
def test_what_cannot_be_right_is_refused(tmp_path: Path, sections, sentence):
    with pytest.raises(UserError) as raised:
        load_job(str(dpo_job(tmp_path, **sections)))
    assert sentence in str(raised.value) and ";" in str(raised.value) and "\n" not in str(raised.value)
