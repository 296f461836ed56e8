"""`plan JOB`: the user's job in, the user's job out."""

import json
import tomllib
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
from plan_jobs import asked, nodes

from meshwright.job import Job, Model, changed_job, load_job, model_preset, model_to_hf_config
from meshwright.job.edit import edited_text
from meshwright.plan import question, search

OWN = """\
# Our second try; the first one diverged at step 9000.
[model]
preset = "llama-3.2-1b"
dropout = 0.1            # regularises

[data]
sources = [
  "corpora/web",   # 60%
  "corpora/code",  # and the rest
]
weights = [0.6, 0.4]
workers = 4

[batch]
sequence_length = 2048
global_batch = 96
micro_batch = 2

[precision]
compute = "bf16"
gradients = "bf16"

[optimizer]
name = "lion"
lr = 1e-4       # a third of AdamW's
weight_decay = 0.3
clip = 0.5

[schedule]
name = "wsd"
warmup_steps = 200
decay_steps = 500

[layout]
dp_shard = 8            # one node, until the others are free
zero = 3
prefetch = 2

[checkpoint]
every_steps = 250
keep_last = 3

[run]
steps = 5000
folder = "runs/second-try"
seed = 7
# compiled blocks were slower here
compile = false

[log]
every_steps = 5

[cluster]
gpu = "h100"
gpus_per_node = 8
price = 2.5
"""
PLANNED = ("layout", "memory", "cluster")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(OWN, encoding="utf-8")
    return path


def test_a_job_of_many_settings_comes_out_with_another_layout_alone(cli: Callable[..., Any], own: Path) -> None:
    done = cli("plan", str(own), "--cluster", "16xh100", "--write", "out.toml", "--json")
    assert done.code == 0, done.err
    found, text = json.loads(done.out), Path("out.toml").read_text(encoding="utf-8")
    changed = [line for line in unified_diff(OWN.splitlines(), text.splitlines(), n=0, lineterm="") if line[0] in "+-"]
    before, after = load_job(str(own)).job, load_job("out.toml").job
    for section in type(before).model_fields:
        if section not in (*PLANNED, "batch"):
            assert getattr(after, section) == getattr(before, section), section
    assert after.batch.model_copy(update={"micro_batch": 2}) == before.batch
    removed = [line[1:].split("=")[0].strip() for line in changed if line.startswith("-") and line[1:3] != "--"]
    assert set(removed) <= {"dp_shard", "zero", "micro_batch", "gpus_per_node"}, "no other line of the file is touched"
    for comment in ("# Our second try", "# regularises", "# and the rest", "# a third of AdamW's", "# compiled blocks"):
        assert comment in text
    assert after.layout.model_dump(mode="json") == found["layouts"][0]["layout"] and after.layout.prefetch == 2
    assert (after.cluster.nodes, after.cluster.gpus_per_node, after.cluster.price) == (2, 8, 2.5)
    assert found["global_batch"] == 96 and found["sequence_length"] == 2048 and found["batch_from"] == ""


def test_the_file_written_is_planned_as_it_was_found(cli: Callable[..., Any], own: Path) -> None:
    found = json.loads(cli("plan", str(own), "--write", "out.toml", "--json", "--top", "1").out)
    checked = json.loads(cli("plan", "--check", "out.toml", "--json").out)
    assert checked["step_s"] == pytest.approx(found["layouts"][0]["step_s"])
    assert "[cluster]\n" + OWN.partition("[cluster]\n")[2] in Path("out.toml").read_text(encoding="utf-8")


def test_what_is_set_is_planned_and_written(cli: Callable[..., Any], own: Path) -> None:
    words = ("plan", str(own), "--set", "optimizer.name=adamw", "--set", "batch.global_batch=64", "--tokens", "1e9")
    assert cli(*words, "--write", "out.toml").code == 0
    after = load_job("out.toml").job
    assert (after.optimizer.name, after.batch.global_batch) == ("adamw", 64)
    assert after.run.steps == -(-(10**9) // (64 * 2048)), "as many steps as the tokens take"
    typo = cli("plan", "--model", "llama-3.2-1b", "--cluster", "1xh100", "--set", "optimizer.nme=lion")
    assert typo.code == 2 and "did you mean optimizer.name?" in typo.err


def test_the_job_s_own_optimizer_and_precision_decide(own: Path) -> None:
    job = load_job(str(own)).job
    held = {}
    for name in ("adamw", "lion"):
        optimizer = job.optimizer.model_copy(update={"name": name})
        best = search(job.model_copy(update={"optimizer": optimizer}), nodes(1), top=1).best[0]
        assert best.job.optimizer.name == name and best.job.precision == job.precision and not best.job.run.compiles
        held[name] = best.prediction.fullest.terms["optimizer states"] * best.job.layout.dp_shard
    assert held["adamw"] == pytest.approx(2 * held["lion"])


def test_a_preset_takes_what_is_set(cli: Callable[..., Any]) -> None:
    words = ("plan", "--model", "llama-3-8b", "--cluster", "8xh100", "--top", "1", "--json")
    usual = json.loads(cli(*words).out)
    less = json.loads(cli(*words, "--set", "optimizer.name=adafactor").out)
    assert usual["sequence_length"] == 4096 and less["layouts"][0]["step_s"] != usual["layouts"][0]["step_s"]
    long = json.loads(cli(*words, "--set", "model.max_sequence_length=32768").out)
    assert long["sequence_length"] == 32768 and long["layouts"], "32k fit"
    refused = cli(*words, "--seq", "32768")
    assert refused.code == 2 and "set model.max_sequence_length = 32768" in refused.err


def test_a_fine_tuning_is_not_pre_trained(tmp_path: Path) -> None:
    job = asked("llama-3-8b", 4096, 8)
    start = job.model_copy(update={"model": job.model.model_copy(update={"init_from": "weights"}), "batch": job.batch})
    bare = start.model_copy(update={"batch": type(job.batch)()})
    found = question(bare, "8xh100", exact=False)
    assert found.job.batch.global_batch == 64 and "fine-tuning" in found.practice
    assert question(start, "8xh100", exact=False).job.batch.global_batch == 8


@pytest.mark.parametrize(
    ("cluster", "sequences"), [("1xrtx-4090", 16), ("8xh100", 16), ("6xh100", 24), ("8x8xh100", 16)]
)
def test_adapters_are_not_pre_trained_either(cluster: str, sequences: int) -> None:
    """A preset's adapters had the millions of tokens of its pre-training; a batch that a recipe's author gave stays."""
    changes = {"model.adapter": {"rank": 16, "base": "nf4"}}
    found = question(changed_job(Job(), {"model.preset": "llama-3-8b"} | changes), cluster, exact=False)
    assert found.job.batch.global_batch == sequences and "about 16 sequences, as QLoRA" in found.practice
    asked_for = question(found.job, cluster, exact=False, batch_tokens=192 * 4096)
    assert asked_for.job.batch.global_batch == 192 and asked_for.practice == ""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A Hugging Face folder, as far as it is read before a training."""
    folder = tmp_path / "weights"
    folder.mkdir()
    config = model_to_hf_config(Model(**model_preset("llama-3.2-1b")))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def test_a_folder_of_weights_is_the_start_of_the_job_written(cli: Callable[..., Any], weights: Path) -> None:
    words = ("plan", "--model", "weights", "--cluster", "1xh100", "--top", "1")
    data = ("--set", 'data.sources=["texts"]', "--set", "model.adapter.rank=8")
    made = cli(*words, *data, "--write", "tuned.toml")
    assert made.code == 0 and "as QLoRA" in made.out
    table = tomllib.loads(Path("tuned.toml").read_text(encoding="utf-8"))
    assert table["model"]["init_from"] == str(weights) and table["data"] == {"sources": ["texts"]}
    job = load_job("tuned.toml").job
    assert job.model.adapter is not None and job.model.adapter.rank == 8
    assert (job.model.layers, job.data.tokenizer) == (16, str(weights / "tokenizer.json"))

    other = cli(*words, "--set", "model.layers=4", "--write", "other.toml")
    assert other.code == 2 and "model.layers = 4 contradicts model.init_from" in other.err
    assert cli(*words, "--set", "model.layers=4").code == 0, "another shape may be planned"


def test_a_folder_without_weights_is_a_shape(cli: Callable[..., Any], weights: Path) -> None:
    (weights / "model.safetensors").unlink()
    for source in ("weights", "weights/config.json"):
        made = cli("plan", "--model", source, "--cluster", "1xh100", "--top", "1", "--write", "shape.toml", "--force")
        assert made.code == 0 and "as GPT-3" in made.out
        assert load_job("shape.toml").job.model.init_from is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--batch-tokens", "100"), "--batch-tokens = 100 is less than one sequence of 4096 tokens"),
        (("--cluster", "13xh100"), "--cluster = 13xh100 is more than a node has (8)"),
    ],
)
def test_what_would_be_another_question_is_refused(
    cli: Callable[..., Any], words: tuple[str, ...], sentence: str
) -> None:
    refused = cli(
        "plan", "--model", "llama-3.2-1b", *(("--cluster", "8xh100") if "--cluster" not in words else ()), *words
    )
    assert refused.code == 2 and sentence in refused.err


def test_sixty_four_gpus_are_eight_nodes(cli: Callable[..., Any]) -> None:
    words = ("plan", "--model", "llama-3.2-1b", "--top", "1", "--json", "--cluster")
    found = json.loads(cli(*words, "64xh100").out)
    assert (found["nodes"], found["gpus_per_node"]) == (8, 8) and "taken as 8x8xh100" in found["notes"][0]
    assert json.loads(cli(*words, "1x64xh100").out)["gpus_per_node"] == 64
    rounded = json.loads(cli(*words, "8xh100", "--batch-tokens", "1000000").out)
    assert "is taken as" in rounded["notes"][0]


@pytest.mark.thorough
def test_a_batch_too_small_for_its_gpus_is_named(cli: Callable[..., Any]) -> None:
    words = ("plan", "--model", "llama-3-8b", "--top", "1", "--json", "--cluster")
    assert "small for 16,384 GPUs" in json.loads(cli(*words, "2048x8xh100").out)["warning"]
    assert json.loads(cli(*words, "8x8xh100").out)["warning"] == ""


def test_the_simplest_of_equals_is_marked(cli: Callable[..., Any]) -> None:
    found = json.loads(cli("plan", "--model", "llama-3.2-1b", "--cluster", "8xh100", "--json").out)
    [plain] = [one for one in found["layouts"] if one["simplest"]]
    assert plain["step_s"] <= 1.05 * found["layouts"][0]["step_s"]
    assert (plain["layout"]["tp"], plain["layout"]["cp"], plain["layout"]["pp"]) == (1, 1, 1)


FORMS = {
    "tables": (
        "[layout]\ntp = 4 # four\n\n[run]\nsteps = 3\n",
        "[layout]\ntp = 8 # four\nsplit = [1, 2]\n\n[run]\nsteps = 3\n",
    ),
    "dotted": ("layout.tp=4\n[run]\nsteps = 3", "layout.tp=8\nlayout.split = [1, 2]\n[run]\nsteps = 3\n"),
    "inline": ("layout = {tp = 4, pp = 2} # c\n", "layout = { pp = 2, tp = 8, split = [1, 2] } # c\n"),
    "missing": ("# nothing\n", "# nothing\n\n[layout]\ntp = 8\nsplit = [1, 2]\n"),
    "in a string": (
        'a = """\n[layout]\ntp = 4\n"""\n[layout]\ntp   =   4\n',
        'a = """\n[layout]\ntp = 4\n"""\n[layout]\ntp   =   8\nsplit = [1, 2]\n',
    ),
    "windows": ("[layout]\r\ntp = 4\r\n", "[layout]\r\ntp = 8\r\nsplit = [1, 2]\n"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_line_is_edited_in_every_form(name: str) -> None:
    before, after = FORMS[name]
    assert edited_text(before, {"layout.tp": 8, "layout.split": [1, 2]}) == after


def test_tables_within_sections_are_replaced_and_removed() -> None:
    text = "[cluster]\nlinks.node = 3\n[memory.recompute]\nevery = 2\n# of the next\n[run]\nsteps = 3\n"
    new = edited_text(text, {"cluster.links": {"network": 50.0}, "memory.recompute": "full", "run.steps": None})
    assert tomllib.loads(new) == {"cluster": {"links": {"network": 50.0}}, "memory": {"recompute": "full"}, "run": {}}
    assert "# of the next" in new


def test_a_recipe_is_planned_and_written_as_its_author_wrote_it(cli: Callable[..., Any]) -> None:
    assert cli("plan", "finetune-7b-4xa100", "--cluster", "8xa100-80gb", "--write", "mine.toml", "--top", "1").code == 0
    before, after = load_job("finetune-7b-4xa100").job, load_job("mine.toml").job
    assert after.model == before.model and after.data == before.data and after.optimizer == before.optimizer
    assert after.batch.global_batch == before.batch.global_batch and after.cluster.gpus_per_node == 8
    again = cli("plan", "finetune-7b-4xa100", "--cluster", "8xa100-80gb", "--write", "mine.toml")
    assert again.code == 2 and "--force" in again.err
