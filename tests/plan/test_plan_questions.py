"""The inverse questions: the largest that fits, what a faster machine brings, what none beats, and energy."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from plan_jobs import asked, nodes

from meshwright.cost import parameter_count
from meshwright.job import Model, model_preset
from meshwright.job.devices import Cluster
from meshwright.plan import Choice, Question, choices, frontier, machine_of, predict, search, sensitivity
from meshwright.plan.energy import energy_of
from meshwright.plan.grow import grown

SMALL = ("plan", "--model", "llama-3.2-1b", "--batch-tokens", "262144", "--json")


def test_the_largest_model_fits_and_the_next_does_not(cli: Callable[..., Any]) -> None:
    found = json.loads(cli(*SMALL, "--cluster", "2xrtx-4090", "--largest", "model").out)
    (one,) = found["clusters"]
    shape = {name: one["model"][name] for name in one["model"]}
    model = Model.model_validate({**model_preset("llama-3.2-1b"), **shape})
    assert parameter_count(model) == one["size"] < one["next_size"] < 1.15 * one["size"]
    assert "GiB too much" in one["next_why"] and one["layouts"][0]["device_bytes"] < 24 * 2**30
    assert {step["fits"] for step in one["tried"]} == {True, False}
    names = [each["preset"] for each in one["presets"]]
    assert "llama-3.2-1b" in names and "llama-3-8b" not in names
    job = asked("llama-3.2-1b", 4096, 64)
    there = Cluster(nodes=1, gpus_per_node=2, gpu="rtx-4090")
    assert search(job.model_copy(update={"model": model}), there, 1).best
    bigger = min((each for each in grown(model) if parameter_count(each) > 1.1 * one["size"]), key=parameter_count)
    assert not search(job.model_copy(update={"model": bigger}), there, 1).best


def test_a_family_keeps_its_proportions() -> None:
    own = Model.model_validate(model_preset("llama-3-8b"))
    family = list(grown(own))
    sizes = sorted(parameter_count(one) for one in family)
    assert parameter_count(own) in sizes and all(b / a < 1.25 for a, b in pairwise(sizes) if a > 1e9)
    for one in family:
        assert one.heads % one.kv_heads == 0 and one.width == one.heads * 128 and one.kv_heads == 8
        if one.heads >= 24:
            assert 0.5 < (one.width / one.layers) / 128 < 2
    published = Model.model_validate(model_preset("llama-3-70b"))
    near = min(family, key=lambda one: abs(parameter_count(one) - parameter_count(published)))
    assert abs(near.layers - 80) <= 20 and abs(near.width - 8192) <= 1024


@pytest.mark.parametrize("kind", ["sequence", "batch"])
def test_the_longest_sequence_and_the_largest_batch(cli: Callable[..., Any], kind: str) -> None:
    words = (*SMALL, "--cluster", "2xrtx-4090", "--seq", "2048")
    (one,) = json.loads(cli(*words, "--largest", kind).out)["clusters"]
    best = one["layouts"][0]
    assert one["next_size"] <= 1.26 * one["size"] and "GiB too much" in one["next_why"]
    if kind == "sequence":
        assert best["batch"]["sequence_length"] == one["size"] > 8192
        assert one["model"]["max_sequence_length"] >= one["size"]
    else:
        assert best["batch"]["global_batch"] == one["size"]
        ranks = best["layout"]["dp_shard"] * best["layout"]["dp_replicate"]
        assert best["batch"]["micro_batch"] * ranks == one["size"], "nothing is accumulated"
    more = json.loads(cli(*words, "--cluster", "2xa100-40gb", "--largest", kind).out)["clusters"][0]
    assert more["size"] > one["size"], "more memory holds more"


@pytest.mark.thorough
def test_a_limit_of_days_makes_the_largest_model_smaller(cli: Callable[..., Any]) -> None:
    words = (*SMALL, "--cluster", "2xrtx-4090", "--largest", "model", "--tokens", "1e9")
    (free,) = json.loads(cli(*words).out)["clusters"]
    (limited,) = json.loads(cli(*words, "--days", "0.5").out)["clusters"]
    assert limited["size"] < free["size"] and "days" in limited["next_why"]


@pytest.mark.thorough
def test_each_part_is_searched_again() -> None:
    """A network twice as fast is the prediction with such links, and the H200's profile doubles its compute too."""
    job = asked("llama-3.2-1b", 2048, 8)
    cluster = Cluster(nodes=2, gpus_per_node=2, gpu="a100-40gb", links={"network": 2.0})
    found = sensitivity(Question(job, cluster, "", ()))
    assert found is not None
    gains = {gain.part: gain for gain in found.gains}
    assert found.gains[0].part == "network between nodes" and found.sentence.startswith("network between nodes first")
    faster = cluster.model_copy(update={"links": {"network": 4.0}})
    again = search(job, faster, 1).best[0].prediction.step_s
    assert gains["network between nodes"].best.prediction.step_s == pytest.approx(again)
    assert gains["network between nodes"].faster == pytest.approx(found.base.prediction.step_s / again - 1)
    assert [gain.faster for gain in found.gains] == sorted((gain.faster for gain in found.gains), reverse=True)

    measured = sensitivity(Question(asked("llama-3.2-1b", 4096, 64), nodes(1, "h200"), "", ()))
    assert measured is not None and machine_of(nodes(1, "h200")).measured is not None
    parts = {gain.part: gain.faster for gain in measured.gains}
    assert 0.5 < parts["compute"] < 1.0 and 0.0 < parts["memory bandwidth"] < 0.5
    assert "network between nodes" not in parts
    base = measured.base
    assert predict(base.job, nodes(1, "h200"), every_rank=False).step_s == pytest.approx(base.prediction.step_s)


@pytest.mark.thorough
def test_no_choice_is_beaten_and_every_other_is() -> None:
    job, cluster = asked("llama-3.2-1b", 2048, 64), Cluster(nodes=1, gpus_per_node=4, gpu="a100-40gb")
    tried = choices(Question(job, cluster, "", ()), 2.0)
    sizes = [one.memory_gib for one in tried]
    assert len(tried) > 3 and all(b <= 0.9 * a for a, b in pairwise(sizes))
    everything = search(job, cluster, top=500).best
    for one in tried:
        room = one.memory_gib * 2**30
        fastest = min(each.prediction.step_s for each in everything if each.prediction.fullest.device <= room)
        assert one.one.prediction.step_s <= 1.0001 * fastest
    dear = [replace(one, price=4.0, spelling="dear") for one in tried]
    kept = frontier([*tried, *dear])
    assert kept and all(one.spelling != "dear" for one in kept)
    cheap_and_slow = replace(tried[0], gpus=2, price=1.0, spelling="cheap")
    assert cheap_and_slow in frontier([*tried, cheap_and_slow])

    def beats(a: Choice, b: Choice) -> bool:
        figures = [(1 / one.tokens_per_s, one.memory_gib, one.cost_per_billion or 0.0) for one in (a, b)]
        return figures[0] != figures[1] and all(x <= y for x, y in zip(*figures, strict=True))

    assert not any(beats(a, b) for a in kept for b in kept)


def test_a_table_over_several_clusters(cli: Callable[..., Any]) -> None:
    shown = json.loads(cli(*SMALL, "--compare", "1xh100@2", "2xa100-40gb@1", "--pareto", "--tokens", "1e10").out)
    names = {one["cluster"] for one in shown["choices"]}
    assert names <= {"1xh100", "2xa100-40gb"} and len(shown["choices"]) <= shown["tried"]
    for one in shown["choices"]:
        price = {"1xh100": 2, "2xa100-40gb": 1}[one["cluster"]]
        assert one["cost_per_billion_tokens"] == pytest.approx(price * one["gpu_hours_per_billion_tokens"])
        assert one["training"]["cost"] == pytest.approx(10 * one["cost_per_billion_tokens"])


def test_energy_is_of_the_boards_unless_the_site_is_known(cli: Callable[..., Any]) -> None:
    boards = energy_of(1000.0, nodes(1))
    assert boards is not None and (boards.gpu_kwh, boards.site_kwh, boards.co2_kg) == (700.0, None, None)
    assert "GPU boards only" in boards.sentence and "their limit" in boards.sentence
    site = nodes(1).model_copy(update={"pue": 1.2, "co2_g_per_kwh": 100.0, "gpu_watts": 600.0})
    whole = energy_of(1000.0, site)
    assert whole is not None and whole.gpu_kwh == 600.0 and whole.site_kwh == pytest.approx(720.0)
    assert whole.co2_kg == pytest.approx(72.0) and "limit" not in whole.sentence
    assert energy_of(1.0, Cluster(gpu="h100-64gb")) is None, "no datasheet, no figure"
    words = (*SMALL, "--cluster", "8xh100", "--tokens", "1e12", "--set", "cluster.pue=1.1")
    training = json.loads(cli(*words, "--top", "1").out)["layouts"][0]["training"]
    energy = training["energy"]
    assert energy["gpu_kwh"] == pytest.approx(0.7 * training["gpu_hours"])
    assert energy["site_kwh"] == pytest.approx(1.1 * energy["gpu_kwh"]) and energy["co2_kg"] is None
    text = cli(*words[:-4], "--tokens", "1e12", "--compare", "8xh100", "8xa100-80gb").out
    assert json.loads(text)["clusters"][1]["training"]["energy"]["watts"] == 400


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--largest", "width"], "--largest = width is not a size; give one of model, sequence, batch"),
        (["--largest", "model", "--pareto"], "--largest and --pareto are two questions; ask one at a time"),
        (["--sensitivity", "--days", "3"], "--days limits a training, and --sensitivity does not depend on one"),
        (["--largest", "batch", "--budget", "3"], "and --largest batch does not depend on one"),
        (["--largest", "model", "--days", "3"], "--days is about a whole training; give its length with --tokens"),
        (["--largest", "model", "--write", "x.toml"], "--largest asks about machines for a job"),
        (["--pareto", "--compare", "1xh100"], "--cluster = 8xh100 is one cluster too many"),
        (["--largest", "model", "--tokens", "1e9", "--budget", "5"], "--budget = 5 needs the price of a GPU-hour"),
    ],
)
def test_senseless_questions_are_refused(cli: Callable[..., Any], options: list[str], words: str) -> None:
    refused = cli("plan", "--model", "llama-3.2-1b", "--cluster", "8xh100", *options)
    assert refused.code == 2 and words in refused.err and not refused.out


def test_what_cannot_be_asked_says_so(cli: Callable[..., Any]) -> None:
    one = cli("plan", "--model", "llama-3-8b", "--compare", "8xh100", "--sensitivity")
    assert one.code == 2 and "--sensitivity is about one cluster" in one.err
    for question in (["--sensitivity"], ["--pareto"], ["--largest", "sequence"]):
        none = cli("plan", "--model", "llama-3-70b", "--cluster", "1xrtx-3090", *question)
        assert none.code == 2 and "fit" in none.err and "\n" not in none.err.strip()
