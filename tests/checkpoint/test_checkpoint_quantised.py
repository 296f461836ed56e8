"""Adapters of a base in 4 or 8 bits: what is written, merged and loaded again is what was trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.checkpoint import load_weights, newest_weights
from meshwright.checkpoint.bitsandbytes_write import require_packable
from meshwright.errors import UserError
from meshwright.job import load_job
from meshwright.launch.worker import run_job
from meshwright.layout import require_layout
from meshwright.model import Decoder
from meshwright.model.quantised import NORMAL_FLOAT, dynamic_codes, quantise
from meshwright.parallel import World, build
from meshwright.runs.huggingface import export_run, export_run_adapter

peft = pytest.importorskip("peft")
import transformers  # noqa: E402

TOKENS = torch.arange(40).view(2, 20) * 7 % 301


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=301, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def job_file(folder: Path, path: Path, base: str) -> str:
    lines = ["[model]", f"init_from = {json.dumps(str(folder))}", "[model.adapter]", "rank = 4", "dora = true"]
    lines += [f'base = "{base}"', '[data]\nsources = ["builtin:synthetic"]', "[batch]\nsequence_length = 16"]
    lines += ["global_batch = 2", "micro_batch = 2", "[evaluation]\nevery_steps = 0", "[optimizer]\nlr = 0.05"]
    lines += [f'[run]\nsteps = 2\ndevice = "cpu"\nfolder = {json.dumps(str(path / "run"))}', ""]
    (path / "job.toml").write_text("\n".join(lines))
    return str(path / "job.toml")


def worst(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.thorough
@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_peft_and_a_merged_folder_compute_what_the_run_computes(folder: Path, tmp_path: Path, base: str) -> None:
    loaded = load_job(job_file(folder, tmp_path, base))
    run_job(loaded, Console(quiet=True))
    model = Decoder(loaded.job.model)
    assert load_weights(newest_weights(tmp_path / "run"), model) == 2
    with torch.no_grad():
        ours = model(TOKENS)
    export_run_adapter(tmp_path / "run", tmp_path / "adapter")
    there: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in there.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.copy_(quantise(parameter, base).weight())
        expected = peft.PeftModel.from_pretrained(there, tmp_path / "adapter").eval()(TOKENS).logits
    assert worst(ours, expected) <= 1e-5
    export_run(tmp_path / "run", tmp_path / "merged", "fp32")
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    with torch.no_grad():
        assert worst(merged.eval()(TOKENS).logits, expected) <= 1e-5
    # A job that continues from the adapter computes the same from codes; from the weights themselves it does not.
    given = [f"model.adapter.init_from={tmp_path / 'adapter'}", "run.folder=elsewhere"]
    with torch.no_grad():
        for how, equal in ((base, True), ("compute", False)):
            again = load_job(str(tmp_path / "job.toml"), [*given, f"model.adapter.base={how}"])
            engine, _ = build(again.job, World(torch.device("cpu")))
            assert (worst(engine.modules[0](TOKENS), expected) <= 1e-5) == equal


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["memory.offload=['params']"], 'which memory.offload = \\["params"\\] excludes; leave "params" out'),
        (["layout.tp=4", "layout.kv_replicate=true"], "which layout.tp = 4 would split"),
    ],
)
def test_what_a_quantised_base_cannot_do_is_refused(
    folder: Path, tmp_path: Path, overrides: list[str], words: str
) -> None:
    job = load_job(job_file(folder, tmp_path, "nf4"), overrides).job
    with pytest.raises(UserError, match=words):
        require_layout(job, job.layout.tp)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.preset=olmoe-1b-7b"], "those of its experts"),
        (["model.preset=tiny-llama", "model.width=96"], "whole blocks of 64 numbers"),
    ],
)
def test_what_cannot_be_quantised_is_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    (tmp_path / "job.toml").write_text('[model.adapter]\nbase = "nf4"\n')
    with pytest.raises(UserError, match=words):
        load_job(str(tmp_path / "job.toml"), overrides)


def as_transformers_saves(folder: Path, path: Path, base: str) -> None:
    """A folder of the same model with its projections as bitsandbytes stores them."""
    shutil.copytree(folder, path)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        packed = quantise(weight, base)
        if packed.absmax_OG is None:
            tensors |= {name: packed.codes, name.replace("weight", "SCB"): packed.scales}
            tensors[name.replace("weight", "weight_format")] = torch.tensor(0, dtype=torch.uint8)
            continue
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(packed.scales[0])}
        tensors |= {name: packed.codes.view(-1, 1), f"{name}.absmax": packed.absmax_OG.flatten()}
        tensors |= {f"{name}.quant_map": torch.tensor(NORMAL_FLOAT), f"{name}.nested_absmax": packed.scales[1:].clone()}
        tensors[f"{name}.nested_quant_map"] = dynamic_codes().clone()
        noted = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = noted
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    kind = {"load_in_8bit": True} if base == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config["quantization_config"] = {"quant_method": "bitsandbytes", "bnb_4bit_use_double_quant": True} | kind
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_codes_of_a_quantised_folder_are_used_as_they_are(folder: Path, tmp_path: Path, base: str) -> None:
    as_transformers_saves(folder, tmp_path / "codes", base)
    models = []
    for start, how in ((folder, base), (tmp_path / "codes", base), (tmp_path / "codes", "compute")):
        engine, weights = build(load_job(job_file(start, tmp_path, how)).job, World(torch.device("cpu")))
        models.append((engine.modules[0], weights))
    for name, tensor in models[0][1].frozen.items():
        assert torch.equal(tensor, models[1][1].frozen[name]), name
    with torch.no_grad():
        logits = [model(TOKENS) for model, _ in models]
    assert torch.equal(logits[0], logits[1])
    assert worst(logits[2], logits[0]) <= 1e-5  # what the codes stand for, in fp32
    file = tmp_path / "codes" / "model.safetensors"
    end = {"nf4": "q_proj.weight.nested_absmax", "int8": "q_proj.SCB"}[base]
    tensors = load_file(file)
    damaged = {name: tensor[:0].clone() if name.endswith(end) else tensor for name, tensor in tensors.items()}
    save_file(damaged, file, {"format": "pt"})
    with pytest.raises(UserError, match="numbers in F32 are needed"):
        build(load_job(job_file(tmp_path / "codes", tmp_path, base)).job, World(torch.device("cpu")))
    path = tmp_path / "codes" / "config.json"
    path.write_text(path.read_text().replace("bitsandbytes", "gptq"))
    with pytest.raises(UserError, match="quantized weights cannot be trained"):
        load_job(job_file(tmp_path / "codes", tmp_path, base))


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    run_job(load_job(job_file(folder, path, "compute")), Console(quiet=True))
    return path / "run"


@pytest.mark.parametrize("format_", ["nf4", "int8"])
def test_an_export_in_codes_is_what_the_merged_weights_become(run: Path, tmp_path: Path, format_: str) -> None:
    for dtype in ("fp32", format_):
        export_run(run, tmp_path / dtype, dtype)
    merged, codes = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("fp32", format_))
    as_transformers_saves(tmp_path / "fp32", tmp_path / "expected", format_)
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert codes.keys() == expected.keys()
    for name, tensor in codes.items():
        if name.endswith("bitsandbytes__nf4"):
            noted = [json.loads(bytes(each.tolist())) for each in (tensor, expected[name])]
            assert noted[0] == noted[1] | {"dtype": "bfloat16"}
        else:
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
            assert tensor.shape == expected[name].shape
    # What is written is read again, by us: with the same codes in a run that trains next to them.
    engine, _ = build(load_job(job_file(tmp_path / format_, tmp_path, format_)).job, World(torch.device("cpu")))
    held = engine.modules[0].get_parameter("layers.1.ffn.down.weight")
    assert torch.equal(held, quantise(merged["model.layers.1.mlp.down_proj.weight"], format_).codes)


def test_what_has_no_such_codes_is_refused(folder: Path, run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bf16, or nf4 or int8"):
        export_run(run, tmp_path / "out", "fp4")
    shape = load_job(job_file(folder, tmp_path, "compute")).job.model.base
    require_packable(shape, "nf4")
    for fields, words in (
        ({"ffn_width": 96}, "--dtype = nf4 needs rows of whole blocks of 64 numbers.* 96 inputs; export it with"),
        ({"positions": "learned"}, 'is not for models with model.positions = "learned"; export it with --dtype bf16'),
    ):
        with pytest.raises(UserError, match=words):
            require_packable(shape.model_copy(update=fields), "nf4")


@pytest.mark.parametrize("format_", ["nf4", "int8"])
def test_transformers_with_bitsandbytes_loads_an_export_in_codes(run: Path, tmp_path: Path, format_: str) -> None:
    pytest.importorskip("bitsandbytes")
    export_run(run, tmp_path / "codes", format_)
    export_run(run, tmp_path / "merged", "fp32")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "codes", attn_implementation="eager")
    ours: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.copy_(quantise(parameter, format_).weight())
        # In bf16, and int8's products are of activations in 8 bits too.
        assert worst(theirs.eval()(TOKENS).logits.float(), ours.eval()(TOKENS).logits) <= 0.03
