"""Adapters in PEFT's format: PEFT computes with ours what we compute, and we with PEFT's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from meshwright.checkpoint import PeftAdapter, load_weights, newest_weights
from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.model import Decoder
from meshwright.parallel import World, build
from meshwright.runs.huggingface import export_run, export_run_adapter

peft = pytest.importorskip("peft")
import transformers  # noqa: E402
from hf_folders import make_folder  # noqa: E402

TOKENS = torch.arange(40).view(2, 20) * 7 % 301
CASES = [
    ("llama", {}),
    ("qwen3", {"dora": True, "targets": ["q", "v", "ffn"]}),
    ("gpt2-tied", {"rslora": True, "dora": True, "targets": ["o", "ffn"]}),
    ("mixtral", {"rslora": True}),
]


def written(folder: Path, path: Path, adapter: dict[str, Any]) -> Path:
    """A job file that trains adapters of a folder for two steps."""
    lines = ["[model]", f"init_from = {json.dumps(str(folder))}", "[model.adapter]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in adapter.items()]
    lines += ['[data]\nsources = ["builtin:synthetic"]', "[batch]\nsequence_length = 16\nglobal_batch = 2"]
    lines += ["micro_batch = 2", "[evaluation]\nevery_steps = 0", "[optimizer]\nlr = 0.05"]
    lines += [f'[run]\nsteps = 2\ndevice = "cpu"\nfolder = {json.dumps(str(path / "run"))}', ""]
    (path / "job.toml").write_text("\n".join(lines))
    return path / "job.toml"


def peft_logits(folder: Path, adapter: Path) -> Tensor:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        logits: Tensor = peft.PeftModel.from_pretrained(base, adapter).eval()(TOKENS).logits
    return logits


def worst(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(("case", "adapter"), CASES, ids=[case for case, _ in CASES])
def test_peft_computes_with_an_exported_adapter_what_the_run_computes(
    tmp_path: Path, case: str, adapter: dict[str, Any]
) -> None:
    make_folder(tmp_path / "base", case)
    loaded = load_job(str(written(tmp_path / "base", tmp_path, {"rank": 4, "alpha": 8} | adapter)))
    run_job(loaded, Console(quiet=True))
    export_run_adapter(tmp_path / "run", tmp_path / "adapter")
    model = Decoder(loaded.job.model)
    assert load_weights(newest_weights(tmp_path / "run"), model) == 2
    with torch.no_grad():
        ours = model(TOKENS)
    expected = peft_logits(tmp_path / "base", tmp_path / "adapter")
    assert worst(ours, expected) <= 1e-5
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    with torch.no_grad():
        assert worst(base.eval()(TOKENS).logits, expected) > 1e-2  # the adapter changes something
    export_run(tmp_path / "run", tmp_path / "merged", "fp32")
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    with torch.no_grad():
        assert worst(whole.eval()(TOKENS).logits, expected) <= 1e-5
    # And back: a job that continues from the folder starts with what it holds.
    again = load_job(
        str(tmp_path / "job.toml"), [f"model.adapter.init_from={tmp_path / 'adapter'}", "run.folder=elsewhere"]
    )
    engine, _ = build(again.job, World(torch.device("cpu")))
    with torch.no_grad():
        assert worst(engine.modules[0](TOKENS), expected) <= 1e-5


def test_a_job_continues_from_an_adapter_that_peft_saved(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", "llama")
    config = peft.LoraConfig(r=5, lora_alpha=15, use_rslora=True, target_modules=["q_proj", "down_proj"], use_dora=True)
    adapted = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(tmp_path / "adapter")
    given = {"init_from": str(tmp_path / "adapter"), "targets": ["q", "down"]}
    job = load_job(str(written(tmp_path / "base", tmp_path, given))).job
    adapter = job.model.adapter
    assert adapter is not None and (adapter.rank, adapter.alpha, adapter.rslora, adapter.dora) == (5, 15.0, True, True)
    engine, weights = build(job, World(torch.device("cpu")))
    assert set(weights.masters) == {
        f"layers.{layer}.{name}.lora_{part}"
        for layer in range(3)
        for name in ("attention.q", "ffn.down")
        for part in ("a", "b", "magnitude")
    }
    with torch.no_grad():
        assert worst(engine.modules[0](TOKENS), peft_logits(tmp_path / "base", tmp_path / "adapter")) <= 1e-5
    for overrides, words in (
        (["model.adapter.rank=6"], "contradicts model.adapter.init_from"),
        (["model.adapter.targets=['q','v','down']"], "set model.adapter.targets"),
        (["model.adapter.targets=['q']"], "leaves out"),
    ):
        with pytest.raises(UserError, match=words):
            PeftAdapter(tmp_path / "adapter", load_job(str(tmp_path / "job.toml"), overrides).job.model)


def test_what_peft_has_no_module_for_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "base", "gpt2-tied")
    loaded = load_job(str(written(tmp_path / "base", tmp_path, {"rank": 2, "targets": ["q", "v"]})))
    run_job(loaded, Console(quiet=True))
    with pytest.raises(UserError, match=r"it is a part of transformer\.h\.0\.attn\.c_attn"):
        export_run_adapter(tmp_path / "run", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
