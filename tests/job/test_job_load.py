"""A job file, presets and overrides become one Job, and every mistake one sentence."""

from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.job import load_job, model_presets


def write(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text)
    return str(path)


def test_a_value_comes_from_default_preset_file_or_override_in_that_order(tmp_path: Path) -> None:
    source = write(tmp_path, '[model]\npreset = "llama-3.2-1b"\nlayers = 3\n[batch]\nmicro_batch = 2\n')
    loaded = load_job(source, ["batch.micro_batch=1", "run.device=cpu"])
    assert (loaded.job.model.width, loaded.origin("model.width")) == (2048, "preset llama-3.2-1b")
    assert (loaded.job.model.layers, loaded.origin("model.layers")) == (3, "file")
    assert (loaded.job.batch.micro_batch, loaded.origin("batch.micro_batch")) == (1, "override")
    assert (loaded.job.run.device, loaded.origin("run.device")) == ("cpu", "override")
    assert loaded.origin("optimizer.lr") == "default"


def test_overrides_become_values_of_the_merged_job_file(tmp_path: Path) -> None:
    written = '# mine\n[model]\npreset = "llama-3.2-1b"\nlayers = 3\n[evaluation.sets]\n"my set" = "a.txt"\n'
    source = write(tmp_path, written)
    loaded = load_job(source, ["batch.micro_batch=1", "evaluation.sets.b=c", 'evaluation.sample_prompt="""a\nb"""'])
    assert loaded.raw == written and loaded.merged is not None
    (tmp_path / "merged.toml").write_text(loaded.merged)
    again = load_job(str(tmp_path / "merged.toml"))
    assert again.job == loaded.job and again.origin("batch.micro_batch") == "file"
    assert again.job.evaluation.sets == {"my set": "a.txt", "b": "c"}
    assert "width" not in loaded.merged, "a preset stays a name"
    assert load_job(source).merged is None


def test_an_overridden_preset_replaces_the_file_s(tmp_path: Path) -> None:
    source = write(tmp_path, '[model]\npreset = "llama-3.2-1b"\n')
    assert load_job(source, ["model.preset=gpt2"]).job.model.width == 768


def test_shape_fields_follow_those_they_derive_from(tmp_path: Path) -> None:
    model = load_job(write(tmp_path, "[model]\nwidth = 96\nheads = 3\n")).job.model
    assert (model.kv_heads, model.head_dim, model.ffn_width) == (3, 32, 384)


def test_accumulation_and_warmup_are_derived(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, "[batch]\nglobal_batch = 12\nmicro_batch = 4\n[run]\nsteps = 50\n")).job
    assert (job.accumulation, job.warmup_steps, job.decay_steps) == (3, 5, 0)


@pytest.mark.parametrize("preset", model_presets())
def test_a_preset_alone_is_a_job(preset: str, tmp_path: Path) -> None:
    loaded = load_job(write(tmp_path, f'[model]\npreset = "{preset}"\n'))
    assert loaded.job.batch.sequence_length == min(512, loaded.job.model.max_sequence_length)


def test_a_short_model_has_short_sequences_unless_told_otherwise(tmp_path: Path) -> None:
    tiny = write(tmp_path, '[model]\npreset = "tiny-llama"\n')
    loaded = load_job(tiny)
    assert (loaded.job.batch.sequence_length, loaded.origin("batch.sequence_length")) == (
        128,
        "model.max_sequence_length",
    )
    assert load_job(tiny, ["batch.sequence_length=64"]).job.batch.sequence_length == 64
    with pytest.raises(UserError, match=r"batch\.sequence_length = 256 is longer than"):
        load_job(tiny, ["batch.sequence_length=256"])


@pytest.mark.parametrize(
    "field", ["evaluation.every_steps", "checkpoint.every_steps", "checkpoint.every_minutes", "log.every_steps"]
)
def test_0_is_never(field: str) -> None:
    section, name = field.split(".")
    assert getattr(getattr(load_job("demo", [f"{field}=0"]).job, section), name) == 0


def test_a_recipe_is_found_by_name() -> None:
    assert load_job("demo").name == "demo"


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        ("[layout]\ntpp = 1", [], "layout.tpp is not a known setting; did you mean layout.tp"),
        ("[layouts]\ntp = 1", [], "layouts is not a known setting; did you mean layout"),
        ("[data]\nmicro_batch = 1", [], "data.micro_batch is not a known setting; did you mean batch.micro_batch?"),
        ("[model]\nzzz = 1", [], "model.zzz is not a known setting; choose one of preset"),
        ('[batch]\nmicro_batch = "4"', [], 'batch.micro_batch = "4" is not allowed; it should be a whole number'),
        ("[batch]\nmicro_batch = true", [], "batch.micro_batch = true is not allowed; it should be a whole number"),
        ("[batch]\nmicro_batch = 0", [], "batch.micro_batch = 0 is not allowed; it should be greater than 0"),
        ("batch = 4", [], "batch = 4 should be a table; write [batch]"),
        ('data = "texts"', [], 'data = "texts" should be a table; write [data]'),
        ("", ["precision.compute=bf17"], '--set: precision.compute = "bf17" is not allowed; it should be'),
        ("", ["micro_batch=4"], "--set micro_batch=4 is not section.field=value"),
        ("", ["batch.micro_batch"], "--set batch.micro_batch is not section.field=value"),
        ("[batch]\nglobal_batch = 6\nmicro_batch = 4", [], "set batch.micro_batch to one of 1, 2, 3, 6"),
        (
            "[batch]\nsequence_length = 4096",
            [],
            "batch.sequence_length = 4096 is longer than model.max_sequence_length",
        ),
        ("[model]\nheads = 4\nkv_heads = 3", [], "model.kv_heads = 3 does not divide model.heads = 4"),
        ("[model]\nhead_dim = 7", [], "model.head_dim = 7 is odd"),
        ("[schedule]\nwarmup_steps = 9\n[run]\nsteps = 5", [], "do not fit into run.steps = 5"),
        ('[model]\npreset = "llama-3.2-2b"', [], "did you mean llama-3.2-1b"),
        ("[model\n", [], "not valid TOML"),
        ("[optimizer]\nbetas = [2.0, 0.9]", [], "optimizer.betas = 2.0 is not allowed; it should be less than 1"),
        (
            '[run]\ncompile = "yes"',
            [],
            "run.compile = \"yes\" is not allowed; it should be true or false, or 'auto'",
        ),
        ('[data]\nsources = ["texts", " "]', [], "data.sources has an empty name, which would stand for the working"),
        ("[data]\nsources = []", [], "data.sources = [] is not allowed; it needs at least 1 item"),
        ("[data]\nweights = [1, 2]", [], "data.weights has 2 entries for 1 data.sources; give one for each"),
        ("[data]\nweights = [-1.0]", [], "data.weights = [-1.0] must be 0 or more and not all 0; correct them"),
        ("[data]\nweights = [0]", [], "data.weights = [0.0] must be 0 or more and not all 0"),
        ("[data]\nstages = [{tokens = 5, weights = [1]}]", [], "data.stages needs data.weights, which apply until the"),
        (
            "[data]\nweights = [1]\nstages = [{tokens = 5, weights = [1]}, {tokens = 5, weights = [1]}]",
            [],
            "data.stages begin at [5, 5] tokens; list them in ascending order",
        ),
        (
            "[data]\nweights = [1]\nstages = [{tokens = 5, weights = [1, 2]}]",
            [],
            "data.stages at 5 tokens: weights has 2 entries for 1 data.sources",
        ),
        ('[data]\njoin = "id"\nweights = [1]', [], 'data.join = "id" joins all sources into one text, which excludes'),
        ('[memory]\nrecompute = "often"', [], 'memory.recompute = often is not allowed; it should be "none", '),
        ("[memory]\nrecompute = {every = 0}", [], "memory.recompute = {every = 0} is not allowed; it should be"),
        ("", ["memory.recompute={budget=3}"], "memory.recompute = {budget = 3} is not allowed; it should be"),
        ("[checkpoint]\nevery_steps = 5\nauto = true", [], "checkpoint.every_steps = 5 and checkpoint.auto = True are"),
        ("[checkpoint]\nauto = true", [], "checkpoint.auto = true needs cluster.mtbf_hours"),
        ("[cluster]\nnodes = 0", [], "cluster.nodes = 0 is not allowed"),
        ("[cluster]\nlinks = { node = -1.0 }", [], "cluster.links = -1.0 is not allowed"),
    ],
)
def test_every_mistake_is_one_sentence_with_field_and_remedy(
    tmp_path: Path, text: str, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_job(write(tmp_path, text), overrides)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_all_named_one_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_job(write(tmp_path, "[batch]\nmicro_batch = 0\n[run]\nsteps = -1\n"))
    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_file_offers_the_recipes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is neither a file nor a recipe; choose one of .*demo"):
        load_job(str(tmp_path / "zzzzzz.toml"))
    with pytest.raises(UserError, match="did you mean demo"):
        load_job("demoo")
    with pytest.raises(UserError, match="is a folder"):
        load_job(str(tmp_path))


def test_a_job_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_job(str(tmp_path / "job.toml"))


def test_a_table_given_as_one_value_replaces_the_file_s(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\npreset = "tiny-llama"\n[batch]\nsequence_length = 64\n[memory]\nrecompute = {segments = 2}\n'
        '[evaluation]\nsets = {one = "a.txt"}\n'
    )
    job = load_job(str(path), ["memory.recompute={every=3}", "evaluation.sets.two=b.txt"]).job
    assert str(job.memory.recompute) == "{every = 3}" and set(job.evaluation.sets) == {"one", "two"}
    with pytest.raises(UserError, match="sets part of a value that another --set sets whole"):
        load_job(str(path), ["memory.recompute={every=3}", "memory.recompute.segments=2"])
