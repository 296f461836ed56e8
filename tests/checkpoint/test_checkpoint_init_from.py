"""A job that starts from a Hugging Face folder: every layout gets its own rows of it, and none holds it whole."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint import load_hf_weights, newest
from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.model import Decoder, load_hf_state, routers
from meshwright.parallel import build, join_world
from meshwright.runs.folder import RunFolder
from meshwright.runs.huggingface import import_folder
from meshwright.runs.resume import require_same_run
from meshwright.train import open_corpus
from meshwright.verify import run_ranks, shrink

pytest.importorskip("transformers")
from hf_folders import make_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for case in ("llama-scaled-tied", "gpt2-tied", "qwen3", "qwen3-moe", "deepseek-v3"):
        make_folder(root / case, case)
    return root


def job_from(folder: Path, tmp_path: Path, *overrides: str) -> Job:
    small = ["batch.global_batch=8", "batch.micro_batch=1", "run.device=cpu"]
    return load_job(str(_written(tmp_path, folder, "")), [*small, *overrides]).job


def wrong_masters(job: Job, folder: Path) -> tuple[int, list[str]]:
    """On a rank: how many elements it holds, and the names of the masters that are not the folder's."""
    world = join_world(job, torch.device("cpu"))
    _, weights = build(job, world)
    whole = Decoder(job.model)
    load_hf_state(whole, {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()})
    expected = dict(whole.named_parameters(remove_duplicate=False))
    shards = weights.shards()
    bad = [
        name for name, m in weights.masters.items() if not torch.equal(m, shards[name].take(expected[name].detach()))
    ]
    return sum(master.numel() for master in weights.masters.values()), bad


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "ranks", "layout"),
    [
        ("gpt2-tied", 1, []),
        ("gpt2-tied", 2, ["layout.tp=2"]),
        ("gpt2-tied", 4, ["layout.pp=2", "layout.dp_shard=2", "layout.zero=1"]),
        ("llama-scaled-tied", 3, ["layout.tp=3", "layout.kv_replicate=true"]),
        ("llama-scaled-tied", 4, ["layout.pp=2", "layout.tp=2"]),
        ("qwen3", 4, ["layout.tp=2", "layout.dp_shard=2", "layout.zero=3"]),
        ("qwen3", 2, ["layout.cp=2", "layout.zero=2"]),
        ("qwen3-moe", 2, ["layout.dp_shard=2", "layout.ep=2", "layout.zero=3"]),
        ("deepseek-v3", 2, ["layout.pp=2"]),
        ("qwen3", 2, ["layout.pp=2", "layout.schedule=pipedream", "batch.micro_batch=8"]),
    ],
    ids=lambda value: " ".join(value).replace("layout.", "") if isinstance(value, list) else str(value),
)
def test_every_rank_starts_with_its_own_rows_of_the_folder(
    folders: Path, tmp_path: Path, case: str, ranks: int, layout: list[str]
) -> None:
    job = job_from(folders / case, tmp_path, *layout)
    results = run_ranks(wrong_masters, ranks, job, folders / case)
    assert [bad for _, bad in results] == [[]] * ranks
    whole = sum(p.numel() for p in Decoder(job.model).parameters())
    assert sum(held for held, _ in results) >= whole
    assert ranks == 1 or max(held for held, _ in results) < whole


def test_routers_start_with_the_preferences_of_the_folder(folders: Path, tmp_path: Path) -> None:
    job = job_from(folders / "deepseek-v3", tmp_path)
    engine, _ = build(job, join_world(job, torch.device("cpu")))
    whole = Decoder(job.model)
    load_hf_weights(folders / "deepseek-v3", whole)
    found, expected = (dict(routers(model)) for model in (engine.modules[0], whole))
    assert list(found) == list(expected) == [1, 2]
    for layer, router in expected.items():
        assert router.preference.abs().max() > 0 and torch.equal(found[layer].preference, router.preference)


def test_how_experts_are_balanced_is_a_choice_of_the_training(folders: Path, tmp_path: Path) -> None:
    path = str(_written(tmp_path, folders / "qwen3-moe", ""))
    changes = {"balance_loss": 0.01, "balance_rate": 0.001, "capacity": 1.25}
    experts = load_job(path, [f"model.experts.{name}={value}" for name, value in changes.items()]).job.model.experts
    assert experts is not None and experts.count == 4
    assert {name: getattr(experts, name) for name in changes} == changes
    with pytest.raises(UserError, match=r"model\.experts\.top_k = 1 contradicts model\.init_from .* gives 2; leave it"):
        load_job(path, ["model.experts.top_k=1"])


def test_the_folder_decides_shape_and_tokenizer(folders: Path, tmp_path: Path) -> None:
    loaded = load_job(str(_written(tmp_path, folders / "qwen3", "")), ["model.layers=3", "model.dropout=0.1"])
    assert (loaded.job.model.layers, loaded.job.model.qk_norm, loaded.job.model.dropout) == (3, True, 0.1)
    assert loaded.job.data.tokenizer == str(folders / "qwen3/tokenizer.json")
    small = shrink(loaded.job)[0].model  # verify needs no weights
    assert (small.init_from, small.qk_norm) == (None, True)
    assert loaded.origin("model.width") == loaded.origin("data.tokenizer") == f"init_from {folders / 'qwen3'}"


@pytest.mark.parametrize(
    ("line", "override", "sentence"),
    [
        ("layers = 2", None, r"job\.toml: model\.layers = 2 contradicts model\.init_from = .*gives 3; leave it out"),
        ("", 'model.norm="layernorm"', r"--set: model\.norm = 'layernorm' contradicts .* gives 'rmsnorm'"),
        ("", "model.rope_scaling={factor=2.0}", r"--set: model\.rope_scaling = .* contradicts"),
        ('preset = "tiny-qwen3"', None, r"preset tiny-qwen3: model\.vocab_size = 512 contradicts"),
        ('file = "own.py"', None, r"model\.file with model\.init_from"),
        ("", "model.init_from=nowhere", r"model\.init_from = \"nowhere\": nowhere is not a folder; download"),
    ],
)
def test_what_contradicts_the_folder_is_refused_by_name(
    folders: Path, tmp_path: Path, line: str, override: str | None, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        load_job(str(_written(tmp_path, folders / "qwen3", line)), [override] if override else [])


def test_what_an_override_replaces_contradicts_nothing(folders: Path, tmp_path: Path) -> None:
    job = str(_written(tmp_path, folders / "qwen3", "layers = 2"))
    assert load_job(job, ["model.layers=3"]).job.model.layers == 3
    with pytest.raises(UserError, match=r"--set: model\.layers = 4 contradicts"):
        load_job(job, ["model.layers=4"])


def test_weights_without_their_tokenizer_meet_no_new_one(folders: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folders / "qwen3/config.json").read_text())
    job = str(_written(tmp_path, bare, ""))
    with pytest.raises(UserError, match=r"has no tokenizer\.json, .*; set data\.tokenizer"):
        load_job(job)
    assert load_job(job, ['data.sources=["builtin:synthetic"]']).job.model.layers == 3


def test_a_folder_without_all_weights_stops_a_run_before_it_begins(cli, folders: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(folders / "qwen3", torn)
    shard = sorted(torn.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-8])
    job = _written(tmp_path, torn, "")
    for nproc in ([], ["--nproc", "2", "--set", "layout.tp=2"]):
        told = cli("train", str(job), "--set", "run.folder=run", "--set", 'data.sources=["builtin:synthetic"]', *nproc)
        assert told.code == 2 and shard.name in told.err and len(told.err.strip().splitlines()) == 1
        assert not (tmp_path / "run").exists()


def _written(tmp_path: Path, folder: Path, line: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(f'[model]\ninit_from = "{folder}"\n{line}\n[batch]\nsequence_length = 48\n')
    return path


def test_a_run_folder_says_the_same_job_and_an_import_has_no_training_to_go_on_with(
    folders: Path, tmp_path: Path
) -> None:
    job, run = job_from(folders / "qwen3", tmp_path, "batch.sequence_length=32"), tmp_path / "run"
    RunFolder.create(run, "", job.model_dump(mode="json"), [])
    again = load_job(str(run)).job
    assert again.model == job.model and again.data == job.data

    import_folder(folders / "qwen3", tmp_path / "imported")
    corpus = open_corpus(load_job(str(tmp_path / "imported"), ['data.sources=["builtin:synthetic"]']).job)
    with pytest.raises(UserError, match=r'was imported.*model\.init_from = ".*qwen3" in a new run\.folder'):
        require_same_run(job, corpus, newest(tmp_path / "imported"))
