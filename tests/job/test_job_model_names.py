"""Names of models as people write them, and families that are not supported."""

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.errors import UserError
from meshwright.job import load_job, model_of_config, model_presets

LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("spelled", "preset"),
    [
        ("Llama-3-8B", "llama-3-8b"),
        ("llama3-8b", "llama-3-8b"),
        ("Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-70B", "llama-3-70b"),
        ("llama-3.1-70b", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("LLAMA_2_13B", "llama-2-13b"),
        ("Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("GPT-2", "gpt2"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
        ("GPT-3", "gpt3-175b"),
        ("Mixtral-8x7B", "mixtral-8x7b"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b"),
        ("allenai/OLMoE-1B-7B-0924", "olmoe-1b-7b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("DeepSeek-R1", "deepseek-v3"),
    ],
)
def test_usual_spellings_are_presets(tmp_path: Path, spelled: str, preset: str) -> None:
    job = meshwright.load_job(spelled)
    assert job == meshwright.load_job(preset) and job.model.preset == preset
    (tmp_path / "job.toml").write_text(f'[model]\npreset = "{spelled}"\n')
    loaded = load_job(str(tmp_path / "job.toml"))
    assert loaded.job.model == job.model and loaded.origin("model.width") == f"preset {preset}"


@pytest.mark.parametrize(
    "other",
    [
        "mistral-7b-v0.3",  # another vocabulary and no window
        "Qwen3-8B-Base",  # shorter sequences
        "Qwen3-4B-Instruct-2507",
        "TinyLlama",  # not our tiny-llama
        "someone/Llama-3-8B",
        "Llama-3-8B-262k",
    ],
)
def test_other_models_are_not_taken_for_presets(other: str) -> None:
    with pytest.raises(UserError, match=r"is not known; (did you mean|choose one of) .*model\.init_from to a Hugging"):
        load_job("demo", [f"model.preset={other}"])


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama-3.1-7b", "llama-3.1-8b"),
        ("llama-3.1-400b", "llama-3.1-405b"),
        ("llama-3-13b", "llama-2-13b"),
        ("Qwen2.5-7B", "qwen3-8b"),
        ("mistral-8b", "mistral-7b"),
        ("gpt-2-huge", "gpt2"),
        ("tiny-lama", "tiny-llama"),
    ],
)
def test_the_nearest_preset_comes_first(name: str, near: str) -> None:
    with pytest.raises(UserError, match=f"did you mean {near}"):
        load_job("demo", [f"model.preset={name}"])


def test_a_family_without_presets_lists_all() -> None:
    with pytest.raises(UserError) as caught:
        load_job("demo", ["model.preset=gemma-2-9b"])
    assert all(preset in str(caught.value) for preset in model_presets())


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-ai/deepseek-moe-16b-base",
        "deepseek-ai/DeepSeek-V4",
        "Qwen1.5-MoE-A2.7B",
        "Qwen3-Next-80B-A3B-Instruct",
        "Llama-4-Scout-17B-16E",
        "databricks/dbrx-base",
    ],
)
def test_other_mixtures_of_experts_are_called_so(cli: Any, name: str) -> None:
    with pytest.raises(UserError, match="is a mixture of experts of a family that Meshwright does not support; choose"):
        load_job("demo", [f"model.preset={name}"])
    for words in (("plan", "--model", name, "--cluster", "8xh100"), ("job", "explain", name)):
        refused = cli(*words)
        assert refused.code == 2 and "mixture of experts" in refused.err, refused.err


@pytest.mark.parametrize("name", ["DeepSeek-R1-Distill-Qwen-7B", "deepseek-llm-7b", "Qwen2.5-7B", "llama-400b"])
def test_dense_models_are_not_called_mixtures(name: str) -> None:
    with pytest.raises(UserError, match="is not known"):
        load_job("demo", [f"model.preset={name}"])


def test_plan_takes_spellings_and_folders_and_offers_what_is_near(cli: Any, tmp_path: Path) -> None:
    small = ("--cluster", "1xh100", "--top", "1", "--json", "--seq", "128", "--batch-tokens", "1024")
    exact, spelled = cli("plan", "--model", "llama-3.2-1b", *small), cli("plan", "--model", "Llama-3.2-1B", *small)
    by_hub = cli("plan", "--model", "meta-llama/Llama-3.2-1B", *small)
    layouts = [json.loads(done.out)["layouts"] for done in (exact, spelled, by_hub)]
    assert layouts[0] == layouts[1] == layouts[2]
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(LLAMA))
    assert cli("plan", "--model", "hf", *small).code == 0
    refused = cli("plan", "--model", "llama-3.1-7b", *small)
    assert refused.code == 2 and "--model llama-3.1-7b is not known; did you mean llama-3.1-8b or" in refused.err
    assert "demo" not in refused.err


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Llama-3-8B", 'Llama-3-8B is a model, not a job; write a job file with preset = "llama-3-8b" in [model], or '),
        ("llama-3.1-7b", "llama-3.1-7b is neither a job nor a known model; a job file may name llama-3.1-8b or "),
        ("hf", 'hf is a Hugging Face folder, not a job; write a job file with init_from = "hf" in [model]'),
    ],
)
def test_a_model_where_a_job_belongs(cli: Any, tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(LLAMA))
    refused = cli("job", "explain", name)
    assert refused.code == 2 and sentence in refused.err
    refused = cli("job", "explain", "demo", "--set", "model.preset=hf")
    assert refused.code == 2 and 'is a Hugging Face folder; set model.init_from = "hf" instead' in refused.err


def test_a_name_alone_where_weights_belong_is_completed(cli: Any) -> None:
    refused = cli("checkpoint", "import", "Llama-3-8B", "--out", "run")
    assert refused.code == 2 and "give its folder, or its name, meta-llama/Meta-Llama-3-8B" in refused.err
    refused = cli("checkpoint", "import", "databricks/dbrx-base", "--out", "run")
    assert refused.code == 2 and 'dbrx-base" is a mixture of experts' in refused.err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "model_type = 'gemma2', a family that Meshwright"),
        ({"model_type": "qwen2_moe", "num_experts": 60}, "model_type = 'qwen2_moe', a mixture of experts of a family"),
        ({"model_type": "deepseek_v32", "n_routed_experts": 256}, "model_type = 'deepseek_v32', a mixture of experts"),
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}, "model_type = 'dbrx', a mixture of experts"),
        ({"model_type": "own", "text_config": {"num_experts": 4}}, "model_type = 'own', a mixture of experts"),
        ({"num_local_experts": 8}, "model_type = 'llama' and num_local_experts = 8, a mixture of experts"),
        ({"model_type": None}, "has no model_type"),
    ],
)
def test_an_unsupported_family_is_named_by_its_model_type(
    cli: Any, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    config = {"final_logit_softcapping": 30.0} | LLAMA | change  # the field that used to be named instead
    with pytest.raises(UserError, match=sentence) as caught:
        model_of_config(config)
    assert "use a llama, mistral, qwen2, qwen3, gpt2, llava, mixtral, olmoe, qwen3_moe, gpt_oss, " in str(caught.value)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    for words in (
        ("checkpoint", "import", "hf", "--out", "run"),
        ("job", "explain", "demo", "--set", "model.init_from=hf"),
        ("plan", "--model", "hf", "--cluster", "8xh100"),
    ):
        refused = cli(*words)
        assert refused.code == 2 and sentence in refused.err, refused.err


def test_a_job_s_own_values_do_not_change_the_preset() -> None:
    changed = load_job("demo", ["model.preset=qwen3-30b-a3b", "model.experts.count=4", "model.experts.top_k=2"]).job
    assert changed.model.experts is not None and changed.model.experts.count == 4
    again = load_job("demo", ["model.preset=qwen3-30b-a3b"]).job
    assert again.model.experts is not None and again.model.experts.count == 128
