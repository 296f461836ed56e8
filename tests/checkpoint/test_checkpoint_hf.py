"""Hugging Face folders in and out: bit for bit, with the logits of the original."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint import Export, load_weights, newest
from meshwright.job import Job, load_job, model_from_hf_config
from meshwright.model import Decoder
from meshwright.runs.folder import RunFolder
from meshwright.runs.huggingface import export_run, import_folder

transformers = pytest.importorskip("transformers")
from hf_folders import FAMILIES, TEXT, make_folder  # noqa: E402


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def decoder_of(run: Path) -> Decoder:
    decoder = Decoder(Job.model_validate(RunFolder.open(run).job()).model)
    assert load_weights(newest(run), decoder) == 0
    return decoder


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("case", FAMILIES)
def test_import_and_export_keep_every_bit_and_the_logits(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = make_folder(tmp_path / "hf", case)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    import_folder(tmp_path / "hf", tmp_path / "run")
    exported = export_run(tmp_path / "run", tmp_path / "out", "fp32")
    import_folder(tmp_path / "out", tmp_path / "again")

    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    first, second = (load_file(newest(tmp_path / run).path / "model.safetensors") for run in ("run", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    ours = decoder_of(tmp_path / "run")
    if "rope_parameters" in (config := json.loads((tmp_path / "out/config.json").read_text())):
        old = {key: value for key, value in config.items() if key != "rope_parameters"}  # as transformers 4 reads it
        assert model_from_hf_config(old) == model_from_hf_config(config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert theirs.dtype == torch.float32 and exported.model_type == theirs.config.model_type == FAMILIES[case][0]
    tokens = torch.randint(0, 301, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, original(tokens).logits)
        assert relative(ours(tokens), original(tokens).logits) <= 1e-5
        assert relative(ours.double()(tokens), float64_logits(original, tokens, monkeypatch)) <= 1e-12


def float64_logits(model: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What transformers gives in float64 throughout: it casts norms, softmax and rotations to float32 by name."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        exact = transformers.AutoModelForCausalLM.from_config(model.config, **eager).double().eval()
        exact.load_state_dict(model.double().state_dict())
        logits: torch.Tensor = exact(tokens).logits
    return logits


@pytest.mark.parametrize("case", ["llama", "gpt2-tied"])
def test_bf16_goes_in_and_out_unchanged(tmp_path: Path, case: str) -> None:
    make_folder(tmp_path / "hf", case, torch.bfloat16)
    import_folder(tmp_path / "hf", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", "bf16")
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(t.dtype == torch.bfloat16 and torch.equal(t, after[name]) for name, t in before.items())
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_large_models_are_cut_into_shards(tmp_path: Path) -> None:
    original = make_folder(tmp_path / "hf", "gpt2-untied")
    import_folder(tmp_path / "hf", tmp_path / "run")
    export = Export(tmp_path / "run", Job.model_validate(RunFolder.open(tmp_path / "run").job()).model, "fp32")
    seen: list[int] = []
    done = export.write(tmp_path / "out", seen.append, shard_bytes=100_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == done.shards > 3 and sum(seen) == done.bytes == export.bytes
    assert all(len(load_file(path)) == 1 or path.stat().st_size < 104_000 for path in files)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert {name: file.name for file in files for name in load_file(file)} == index["weight_map"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in original.state_dict().items())
    import_folder(tmp_path / "out", tmp_path / "again")
    again, first = (newest(tmp_path / run).path / "model.safetensors" for run in ("again", "run"))
    assert again.read_bytes() == first.read_bytes()


def test_tokenizer_and_generation_settings_travel_with_the_weights(tmp_path: Path) -> None:
    original = make_folder(tmp_path / "hf", "llama")
    import_folder(tmp_path / "hf", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", "fp32")
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    assert all((tmp_path / "hf" / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in names)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (theirs.generation_config.temperature, theirs.config.eos_token_id) == (0.7, 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    prompt = torch.tensor([tokenizer.encode("def ")])
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(theirs.generate(prompt, **greedy), original.generate(prompt, **greedy))


@pytest.mark.parametrize("path", ["hf[bold]", "[/bold]"])
def test_a_path_may_look_like_a_style(cli, path: str) -> None:
    refused = cli("checkpoint", "import", path, "--out", "run")
    assert refused.code == 2 and path in refused.err and "internal" not in refused.err


def test_an_imported_run_writes_text_and_starts_a_job(cli, tmp_path: Path) -> None:
    make_folder(tmp_path / "hf", "qwen3")
    told = cli("checkpoint", "import", "hf", "--out", "run", "--json")
    assert told.code == 0, told.err
    count = sum(t.numel() for t in tensors(tmp_path / "hf").values())
    assert json.loads(told.out) == {"source": "hf", "run": "run", "parameters": count, "bytes": 4 * count}
    written = cli("generate", "run", "--prompt", "def ", "--tokens", "4", "--json")
    assert written.code == 0 and json.loads(written.out)["text"].startswith("def ")
    job = load_job(str(tmp_path / "run/job.toml")).job
    assert job.model == Job.model_validate(RunFolder.open(tmp_path / "run").job()).model
    assert cli("report", "run").code == 0


def test_a_trained_run_is_exported_with_its_own_tokenizer(cli, tiny_job: Path, tmp_path: Path) -> None:
    assert cli("train", "job.toml").code == 0
    told = cli("checkpoint", "export", "run", "out", "--dtype", "bf16", "--json")
    assert told.code == 0, told.err
    size = (tmp_path / "out/model.safetensors").stat().st_size
    shown = json.loads(told.out)
    assert 0 < size - shown.pop("bytes") < 10_000
    expected = {"run": "run", "folder": "out", "dtype": "bf16", "step": 10, "model_type": "llama", "shards": 1}
    assert shown == expected
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id is not None
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_preferences_that_a_run_learned_are_exported(cli, tiny_job: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "hf", "deepseek-v3")
    text = tiny_job.read_text().replace('preset = "tiny-llama"', 'init_from = "hf"')
    tiny_job.write_text(text + "\n[schedule]\nwarmup_steps = 0\n")
    done = cli("train", "job.toml", "--set", "run.steps=1", "--set", "model.experts.balance_rate=0.5", "--json")
    assert done.code == 0, done.err
    assert cli("checkpoint", "export", "run", "out").code == 0
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "out")
    for layer in (1, 2):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        moved = (after[name] - before[name]).abs()
        assert 0.49 < moved.max() < 0.51
    ours = Decoder(load_job(str(tmp_path / "run/job.toml")).job.model)
    load_weights(newest(tmp_path / "run"), ours)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = torch.randint(0, 301, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert relative(ours(tokens), theirs(tokens).logits) <= 1e-5


def test_a_fine_tune_is_one_line(cli, tiny_job: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "hf", "gpt2-tied")
    text = tiny_job.read_text().replace('preset = "tiny-llama"', 'init_from = "hf"')
    tiny_job.write_text(text + "\n[schedule]\nwarmup_steps = 0\n")
    done = cli("train", "job.toml", "--set", "run.steps=1", "--set", "optimizer.lr=1e-30", "--json")
    assert done.code == 0, done.err
    assert (tmp_path / "run/tokenizer.json").is_file()
    assert cli("checkpoint", "export", "run", "out").code == 0
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "hf/tokenizer_config.json").read_bytes() == (tmp_path / "out/tokenizer_config.json").read_bytes()
