"""DeepSeek-V3's weights of multi-token prediction: read and written by their names when a job asks for them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.errors import UserError
from meshwright.job import Model, model_of_folder
from meshwright.model import Decoder, initialise, load_hf_state, to_hf_state
from meshwright.runs.huggingface import export_run, import_folder

transformers = pytest.importorskip("transformers")
from hf_folders import make_folder  # noqa: E402

OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def published(folder: Path) -> dict[str, torch.Tensor]:
    """A folder as DeepSeek publishes it: layer 3, after the last, is for the extra token; returns that layer."""
    make_folder(folder, "deepseek-v3", shard="1GB")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    state, drawn = tensors(folder), torch.Generator().manual_seed(5)

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return 0.3 * torch.randn(tensor.shape, generator=drawn) + (1.0 if tensor.dim() == 1 else 0.0)

    last = "model.layers.2."
    extra = {name.replace(last, "model.layers.3."): like(t) for name, t in state.items() if name.startswith(last)}
    norm, width = state["model.norm.weight"], len(state["model.norm.weight"])
    for name in ("enorm", "hnorm", "shared_head.norm"):
        extra[f"model.layers.3.{name}.weight"] = like(norm)
    extra["model.layers.3.eh_proj.weight"] = like(torch.empty(width, 2 * width))
    extra["model.layers.3.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    extra["model.layers.3.shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state | extra, folder / "model.safetensors", {"format": "pt"})
    return extra


@pytest.mark.thorough
def test_a_job_that_asks_for_them_reads_and_writes_every_tensor(cli, tiny_job: Path, tmp_path: Path) -> None:
    extra = published(tmp_path / "hf")
    text = tiny_job.read_text().replace('preset = "tiny-llama"', 'init_from = "hf"\nextra_tokens = 1')
    tiny_job.write_text(text + "\n[schedule]\nwarmup_steps = 0\n")
    done = cli("train", "job.toml", "--set", "run.steps=1", "--set", "optimizer.lr=1e-30", "--json")
    assert done.code == 0, done.err
    assert cli("checkpoint", "export", "run", "out").code == 0
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "out")
    assert {f"model.layers.3.{name}.weight" for name in OWN} <= extra.keys() <= after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(0, 301, (2, 30), generator=torch.Generator().manual_seed(1))
    ours = Decoder(model_of_folder(tmp_path / "out").model_copy(update={"extra_tokens": 1}))
    load_hf_state(ours, after)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_each_tensor_becomes_the_parameter_that_is_called_otherwise(tmp_path: Path) -> None:
    extra = published(tmp_path / "hf")
    ours: Any = Decoder(model_of_folder(tmp_path / "hf").model_copy(update={"extra_tokens": 1}))
    load_hf_state(ours, tensors(tmp_path / "hf"))
    block = ours.layers["3"]
    named = {
        "enorm": block.embedding_norm,
        "hnorm": block.hidden_norm,
        "eh_proj": block.joined,
        "shared_head.norm": block.output_norm,
        "mlp.gate": block.moe.router.linear,
    }
    for name, module in named.items():
        assert torch.equal(module.weight, extra[f"model.layers.3.{name}.weight"]), name
    assert torch.equal(block.moe.router.preference, extra["model.layers.3.mlp.gate.e_score_correction_bias"])


def test_without_the_option_they_are_left_out(tmp_path: Path) -> None:
    extra = published(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", "fp32")
    assert tensors(tmp_path / "out").keys() == tensors(tmp_path / "hf").keys() - extra.keys()
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_folder_without_them_is_refused(cli, tiny_job: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "hf", "deepseek-v3")
    tiny_job.write_text(tiny_job.read_text().replace('preset = "tiny-llama"', 'init_from = "hf"\nextra_tokens = 1'))
    told = cli("train", "job.toml")
    assert told.code == 2 and not (tmp_path / "run").exists()
    assert "lack model.layers.3." in told.err and "set model.extra_tokens = 0" in told.err


def test_other_families_have_no_place_for_them() -> None:
    shape = Model(vocab_size=29, width=12, layers=2, heads=2, extra_tokens=1)
    decoder = Decoder(shape)
    initialise(decoder, 0)
    state = to_hf_state(decoder)
    plain = Decoder(shape.model_copy(update={"extra_tokens": 0}))
    load_hf_state(plain, state)
    assert not any("layers.2." in name for name in state)
    with pytest.raises(UserError, match=r"lack model\.layers\.2\..*set model\.extra_tokens = 0"):
        load_hf_state(decoder, state)
