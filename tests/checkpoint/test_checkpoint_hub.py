"""A model's Hugging Face name where a folder could be: found in the cache, or downloaded from a hub on this machine."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from hf_folders import make_folder
from hub_server import COMMIT, Hub, cached, serving

from meshwright.errors import UserError
from meshwright.job import fetch_start, hub_name, load_job, start_folder
from meshwright.job.unused import JobWarning
from meshwright.runs.huggingface import import_folder

NAME = "tiny/llama"
JOB = f"""
[model]
init_from = "{NAME}"
[data]
sources = ["text.txt"]
validation_fraction = 0
workers = 0
[batch]
sequence_length = 32
global_batch = 4
micro_batch = 2
[evaluation]
every_steps = 0
[run]
steps = 2
device = "cpu"
folder = "run"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_folder(path, "llama", torch.float32)
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this process, which may not use the network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 200)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def command(hub: Hub | None, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`meshwright WORDS` as a program of its own, with its cache in ./hub, against the hub."""
    given = {"HF_HUB_CACHE": "hub", "HF_ENDPOINT": hub.address if hub else "http://127.0.0.1:9"}
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *words],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **given, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf", "main"),
        ("org/name.v1@refs/pr/3", "org/name.v1", "refs/pr/3"),
        *((text, None, None) for text in ("gpt2", "/a/b", "a/b/c", "./a/b", "~/a", "a/b@", "a/../b", "a/-b", "a/b\n")),
    ],
)
def test_what_can_be_a_name(text: str, repository: str | None, revision: str | None) -> None:
    found = hub_name(text)
    assert (found and found.repository, found and found.revision) == (repository, revision)


def test_a_name_in_the_cache_is_the_folder_of_its_commit(cache: Path, folder: Path, job: Path) -> None:
    snapshot = cached(cache, folder, NAME)
    for text in (NAME, f"{NAME}@main", f"{NAME}@{COMMIT}"):
        loaded = load_job(str(job), [f"model.init_from={text}"]).job
        assert loaded.model.init_from == f"{NAME}@{COMMIT}"
        assert (loaded.model.layers, loaded.model.width) == (3, 48)
        assert loaded.data.tokenizer == str(snapshot / "tokenizer.json")
        assert start_folder(loaded.model) == snapshot
        fetch_start(loaded.model)  # all there


@pytest.mark.thorough
def test_the_commands_take_a_name_where_they_take_a_folder(cli, cache: Path, folder: Path, job: Path) -> None:
    cached(cache, folder, NAME)
    assert cli("plan", "--check", "job.toml", "--cluster", "1xh100").code == 0
    assert cli("plan", "--model", NAME, "--cluster", "1xh100", "--json").code == 0
    assert cli("verify", "job.toml", "--set", "layout.dp_shard=2").code == 0
    told = cli("train", "job.toml", "--json")
    assert told.code == 0, told.err
    resolved = json.loads(Path("run/job.resolved.json").read_text())
    assert resolved["model"]["init_from"] == f"{NAME}@{COMMIT}"
    assert Path("run/huggingface/config.json").is_file() and not Path("run/huggingface/config.json").is_symlink()

    assert cli("train", "job.toml", "--set", f"model.init_from={folder}", "--set", "run.folder=other").code == 0
    losses = [json.loads(Path(run, "metrics.jsonl").read_text().splitlines()[0])["loss"] for run in ("run", "other")]
    assert losses[0] == losses[1]

    assert cli("checkpoint", "import", NAME, "--out", "imported").code == 0
    imported = json.loads(Path("imported/job.resolved.json").read_text())
    assert imported["model"]["init_from"] == f"{NAME}@{COMMIT}"
    assert cli("train", "run", "--resume", "--set", "run.steps=3").code == 0


@pytest.mark.thorough
def test_the_lectures_recipe_1_runs_as_it_is_typed(cli, cache: Path, folder: Path, job: Path) -> None:
    cached(cache, folder, "meta-llama/Llama-2-7b-hf")  # a tiny one under that name
    Path("recipe.sh").write_text(
        "torchrun --nproc_per_node=4 train.py \\\n--model_name meta-llama/Llama-2-7b-hf \\\n"
        '--fsdp "shard_grad_op" \\\n--bf16 true \\\n--gradient_checkpointing true \\\n'
        "--attn_implementation flash_attention_2\n"
    )
    assert cli("job", "from-hf-trainer", "recipe.sh", "--out", "recipe.toml").code == 0
    changes = ("batch.sequence_length=32", 'data.sources=["text.txt"]', "run.steps=1", "schedule.decay_steps=1")
    words = [word for change in (*changes, "run.device=cpu", "run.folder=run") for word in ("--set", change)]
    assert cli("plan", "--check", "recipe.toml", *words, "--cluster", "4xa100-80gb").code == 0
    told = cli("train", "recipe.toml", *words, "--nproc", "4", "--json")
    assert told.code == 0, told.err
    resolved = json.loads(Path("run/job.resolved.json").read_text())
    assert resolved["model"]["init_from"] == f"meta-llama/Llama-2-7b-hf@{COMMIT}"


def test_a_folder_of_the_same_name_wins_and_it_is_said(cache: Path, folder: Path, job: Path) -> None:
    cached(cache, folder, NAME)
    Path("tiny").mkdir()
    Path(NAME).symlink_to(folder)
    with pytest.warns(JobWarning, match=r"is the folder .*/tiny/llama, not the model of that name in .*models--tiny"):
        loaded = load_job(str(job)).job
    assert (loaded.model.init_from, start_folder(loaded.model)) == (NAME, Path(NAME))


def test_without_a_network_it_says_where_it_looked(cli, cache: Path, folder: Path, job: Path) -> None:
    told = cli("train", "job.toml")
    assert told.code == 2 and len(told.err.strip().splitlines()) == 1 and "Traceback" not in told.err
    assert f"there is no {cache}/models--tiny--llama" in told.err and "HF_HUB_OFFLINE forbids" in told.err
    for shard in cached(cache, folder, NAME).glob("*2-of*.safetensors"):
        shard.unlink()
    assert cli("plan", "--check", "job.toml", "--cluster", "1xh100").code == 0  # which needs no weights
    told = cli("train", "job.toml")
    assert told.code == 2 and f"{cache}/models--tiny--llama lacks files" in told.err
    assert not Path("run").exists()
    with pytest.raises(UserError, match="lacks files"):
        import_folder(NAME, Path("imported"))
    told = command(None, "job", "explain", "job.toml", HF_HUB_CACHE="elsewhere")
    assert told.returncode == 2 and "http://127.0.0.1:9 did not give it" in told.stderr
    assert "there is no elsewhere/models--tiny--llama" in told.stderr and "Traceback" not in told.stderr


def test_without_the_package_it_says_what_to_install(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install -U huggingface_hub, or give a folder"):
        load_job(str(job))


@pytest.mark.thorough
def test_ranks_train_from_a_name_that_one_process_downloads(folder: Path, job: Path) -> None:
    with serving(Hub(folder, NAME)) as hub:
        (folder / "pytorch_model.bin").write_bytes(b"a pickle nobody asks for")
        try:
            done = command(hub, "train", "job.toml", "--nproc", "2", "--set", "layout.dp_shard=2")
        finally:
            (folder / "pytorch_model.bin").unlink()
    assert done.returncode == 0, done.stderr
    assert f"downloading {NAME}@{COMMIT} to hub/models--tiny--llama" in done.stdout
    wanted = {path.name for path in folder.iterdir()}
    assert dict(hub.gets) == dict.fromkeys(wanted, 1)  # each file once, and no pickle
    assert json.loads(Path("run/job.resolved.json").read_text())["model"]["init_from"] == f"{NAME}@{COMMIT}"
    attempt = json.loads(Path("run/attempts/0.json").read_text())
    assert attempt["job"]["model"]["init_from"] == f"{NAME}@{COMMIT}"


FETCH = """
from meshwright.errors import UserError
from meshwright.job import fetch_start, load_job
try:
    fetch_start(load_job("job.toml").job.model, print)
except UserError as error:
    exit(str(error))
"""


def fetch(hub: Hub, **more: str) -> subprocess.CompletedProcess[str]:
    """Only the download, as a program of its own."""
    variables = {
        "HF_HUB_CACHE": "hub",
        "HF_ENDPOINT": hub.address,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **more,
    }
    return subprocess.run(
        [sys.executable, "-c", FETCH], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def bare(folder: Path, path: Path, weights: str, size: int) -> Path:
    """A model whose weights nobody opens."""
    path.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_bytes((folder / name).read_bytes())
    (path / weights).write_bytes(os.urandom(size))
    return path


@pytest.mark.thorough
def test_an_interrupted_download_continues_where_it_stopped(folder: Path, job: Path, tmp_path: Path) -> None:
    shard, size = "model.safetensors", 25 << 20
    with serving(Hub(bare(folder, tmp_path / "large", shard, size), NAME, cut={shard: 22 << 20})) as hub:
        broken = fetch(hub)
        assert broken.returncode == 1 and "did not give it" in broken.stderr and "Traceback" not in broken.stderr
        hub.cuts, before = 0, hub.gets.copy()
        done = fetch(hub)
        assert done.returncode == 0, done.stderr
        assert (hub.gets - before).keys() == {shard}
        assert 0 < int(re.fullmatch(r"bytes=(\d+)-", hub.ranges[-1][1])[1]) < 22 << 20
        assert "downloaded" in done.stdout
        again = fetch(hub)
        assert again.returncode == 0 and again.stdout == "" and hub.gets[shard] == before[shard] + 1
    snapshot = Path("hub/models--tiny--llama/snapshots") / COMMIT
    assert (snapshot / shard).read_bytes() == (hub.folder / shard).read_bytes()


def test_of_processes_that_start_together_one_asks_the_hub(folder: Path, job: Path, tmp_path: Path) -> None:
    with serving(Hub(bare(folder, tmp_path / "model", "model.safetensors", 4 << 20), NAME)) as hub:
        assert fetch(hub, HF_HUB_CACHE="first").returncode == 0
        alone = hub.asked.copy()
        with ThreadPoolExecutor() as pool:
            together = list(pool.map(lambda _: fetch(hub, HF_HUB_CACHE="second"), range(3)))
    assert [one.returncode for one in together] == [0, 0, 0], together
    assert hub.asked - alone == alone
    assert sorted(one.stdout.count("downloaded") for one in together) == [0, 0, 1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tiny/other", r'"tiny/other" is neither a folder here nor a public model at http.*; correct it'),
        (f"{NAME}@v9", r'has no revision "v9"; give a branch, a tag or a commit'),
    ],
)
def test_what_the_hub_does_not_have_is_named(folder: Path, job: Path, text: str, sentence: str) -> None:
    with serving(Hub(folder, NAME)) as hub:
        told = command(hub, "job", "explain", "job.toml", "--set", f"model.init_from={text}")
    assert told.returncode == 2 and re.search(sentence, told.stderr), told.stderr
    assert "Traceback" not in told.stderr


def test_a_model_of_pickles_alone_is_refused(folder: Path, job: Path, tmp_path: Path) -> None:
    with serving(Hub(bare(folder, tmp_path / "pickles", "pytorch_model.bin", 100), NAME)) as hub:
        told = fetch(hub)
    assert told.returncode == 1 and "has weights only as a pickle (pytorch_model.bin)" in told.stderr
    assert set(hub.gets) == {"config.json", "tokenizer.json"}
