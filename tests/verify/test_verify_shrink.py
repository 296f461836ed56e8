"""Shrinking keeps what decides how a layout cuts a model."""

from typing import Any

import pytest

from meshwright.job import Job, model_preset
from meshwright.layout import kv_copies, ranks_of, require_layout, table_of
from meshwright.verify import Change, shrink


def big(preset: str, *, batch: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **layout: Any) -> Job:
    sizes = {"global_batch": 1680, "micro_batch": 4, "sequence_length": 1024} | (batch or {})
    return Job.model_validate({"model": model_preset(preset) | (model or {}), "batch": sizes, "layout": layout})


def texts(changes: list[Change]) -> list[str]:
    return [change.text for change in changes]


CASES = [
    big("llama-3-8b", tp=8, dp_shard=4, zero=3),
    big("llama-3-70b", tp=4, dp_replicate=7, sp=False),
    big("llama-3.1-405b", tp=16, kv_replicate=True, dp_shard=5, zero=2),
    big("llama-3.2-3b", tp=3, kv_replicate=True, batch={"sequence_length": 1023}, model={"ffn_width": 8190}),
    big("gpt2", tp=2, dp_replicate=2),
    big("gpt2-xl", tp=5, dp_replicate=7, sp=False),
    big("gpt2", dp_shard=3, zero=1, model={"layers": 13}),
    big("qwen3-0.6b", tp=4, dp_shard=4, dp_replicate=3, zero=1),
    big("mistral-7b", tp=8, dp_shard=16, zero=3, batch={"global_batch": 64, "sequence_length": 4096}),
    big("llama-3-70b", tp=8, cp=4, pp=4, dp_shard=2, batch={"sequence_length": 8192}, model={"layers": 81}),
    big("llama-3-8b", cp=8, cp_method="ulysses", zero=3),
    big("llama-3-8b", tp=4, cp=2, cp_method="ulysses", pp=2, schedule="zb-v"),
    big("llama-3-8b", cp=16, cp_method="ulysses", batch={"sequence_length": 4096}),
    big("llama-3-8b", tp=2, cp=8, cp_method="ulysses", model={"heads": 48, "kv_heads": 12, "head_dim": 128}),
    big("qwen3-0.6b", tp=8, model={"width": 1020}),
    big("qwen3-0.6b", pp=7, schedule="zb-interleaved", virtual_stages=4, batch={"micro_batch": 3}),
    big("gpt2", pp=4, schedule="dualpipe-v", dp_replicate=2, model={"layers": 13}),
    big("gpt2", pp=3, split=[2, 4, 6]),
    big("mixtral-8x7b", dp_shard=40, ep=8, zero=3, batch={"micro_batch": 1}),
    big("gpt-oss-120b", tp=4, dp_shard=10, ep=8, batch={"micro_batch": 2}),
    big("deepseek-v3", dp_shard=8, ep=8, pp=4, batch={"global_batch": 64}),
    big("deepseek-v2-lite", tp=2),
]


@pytest.mark.parametrize("job", [case for case in CASES if case.model.experts is not None])
def test_experts_are_routed_in_the_same_way(job: Job) -> None:
    (small, changes), before = shrink(job), job.model.experts
    after = small.model.experts
    assert before is not None and after is not None and after.count <= 16 and after.top_k < after.count
    assert (small.layout.ep > 1) == (job.layout.ep > 1)
    assert (after.groups_kept < after.groups, after.first_dense > 0, after.shared_width > 0) == (
        before.groups_kept < before.groups, before.first_dense > 0, before.shared_width > 0
    )  # fmt: skip
    assert (after.scores, after.scale, after.normalised) == (before.scores, before.scale, before.normalised)
    assert (small.model.latent is None) == (job.model.latent is None)
    assert any(f"{before.top_k} of {before.count} experts" in text for text in texts(changes))


def test_groups_of_a_single_expert_stay_so() -> None:
    experts = {"count": 8, "top_k": 2, "ffn_width": 8, "scores": "sigmoid", "groups": 8, "groups_kept": 4}
    small, _ = shrink(big("olmoe-1b-7b", dp_shard=10, ep=2, model={"experts": experts}))
    after = small.model.experts
    assert after is not None and after.groups == after.count > after.groups_kept >= after.top_k == 2


def test_a_capacity_is_low_enough_to_drop_tokens() -> None:
    job = big("olmoe-1b-7b", dp_shard=8, ep=8, batch={"global_batch": 64})
    assert job.model.experts is not None
    experts = job.model.experts.model_copy(update={"capacity": 1.25})
    small, changes = shrink(job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})}))
    assert small.model.experts is not None and small.model.experts.capacity == 0.5
    assert any("capacity 1.25 → 0.5" in text for text in texts(changes))


@pytest.mark.parametrize("job", CASES, ids=lambda job: f"tp{job.layout.tp}-layers{job.model.layers}")
def test_what_matters_is_kept(job: Job) -> None:
    require_layout(job, ranks_of(job.layout))
    small, _ = shrink(job)
    require_layout(small, ranks_of(small.layout))
    assert 1 < ranks_of(small.layout) <= 16
    before, after, tp, small_tp = job.model, small.model, job.layout.tp, small.layout.tp
    stages = 1 if small.layout.pp == 1 else table_of(small).stages
    assert after.width <= 164 and after.layers <= stages + 3 and after.vocab_size <= 60
    assert small.batch.sequence_length <= 24
    assert (after.kv_heads % small_tp == 0) == (before.kv_heads % tp == 0)
    assert (after.width % small_tp == 0) == (before.width % tp == 0)
    if small.layout.cp_method == "ulysses" and small.layout.cp > 1:
        assert (kv_copies(small) == 1) == (kv_copies(job) == 1)
    assert (after.vocab_size % small_tp == 0) == (before.vocab_size % tp == 0)
    assert (small.batch.sequence_length % small_tp == 0) == (job.batch.sequence_length % tp == 0)
    assert (after.heads == after.kv_heads) == (before.heads == before.kv_heads)
    assert (after.heads * after.head_dim == after.width) == (before.heads * before.head_dim == before.width)
    assert after.layers % 2 == before.layers % 2
    assert (small.accumulation == 1) == (job.accumulation == 1)
    for field in ("tied", "norm", "activation", "positions", "qkv_bias", "linear_bias", "qk_norm", "dropout"):
        assert getattr(after, field) == getattr(before, field)
    assert (after.sliding_window is None) == (before.sliding_window is None)
    for field in ("zero", "sp", "kv_replicate", "schedule", "cp_method"):
        assert getattr(small.layout, field) == getattr(job.layout, field)


def test_a_reduced_degree_is_noted_and_a_small_one_left_alone() -> None:
    small, changes = shrink(big("llama-3-8b", tp=8, dp_replicate=2, cp=3, batch={"sequence_length": 768}))
    assert {"layout.tp 8 → 4", "layout.cp 3 → 2"} < set(texts(changes))  # 4 × 2 × 3 would be more than 16 ranks
    assert small.layout.dp_replicate == 2
    assert not any(text.startswith("layout.dp_replicate") for text in texts(changes))


def test_degrees_of_up_to_four_stay_and_odd_ones_become_three() -> None:
    small, _ = shrink(big("gpt2", tp=3, sp=False, dp_shard=7, zero=3, batch={"global_batch": 28}))
    assert (small.layout.tp, small.layout.dp_shard) == (3, 3)
    small, _ = shrink(big("llama-3-8b", cp=4, pp=4, schedule="interleaved", virtual_stages=4))
    assert (small.layout.cp, small.layout.pp, small.layout.virtual_stages) == (4, 4, 4)


def test_the_job_s_own_way_to_read_pack_mask_compile_and_keep_states_is_kept() -> None:
    sources = {"sources": ["a.txt", "b.txt"], "weights": [1.0, 3.0], "stages": [{"tokens": 10**6, "weights": [1, 1]}]}
    kinds = {"packing": "best-fit", "mask_documents": True, "workers": 1, "format": "conversations"}
    job = big("gpt2", tp=2, model={"dropout": 0.1}).model_dump()
    job["data"] |= sources | kinds
    job["run"] |= {"compile": True}
    job["precision"] |= {"optimizer_states": "bf16"}
    job["evaluation"] |= {"every_steps": 0}
    small, changes = shrink(Job.model_validate(job))
    assert {field: getattr(small.data, field) for field in kinds} == kinds
    assert small.data.weights == (1.0, 3.0) and [stage.weights for stage in small.data.stages] == [(1, 1)]
    assert small.data.stages[0].tokens == small.tokens_per_step
    assert small.run.compiles and small.precision.optimizer_states == "bf16" and small.evaluation.every_steps == 0
    assert not any(change.hides for change in changes), changes
    assert not shrink(big("gpt2", tp=2))[0].data.mask_documents


def test_what_could_hide_an_error_is_named() -> None:
    job = big("gpt2", dp_replicate=2, tp=2, compress="powersgd", compress_rank=1).model_dump()
    job["data"] |= {"sources": ["a.txt"], "stream": True}
    job["memory"] |= {"offload": ["activations"]}
    job["evaluation"] |= {"sets": {"wiki": "wiki"}}
    _, changes = shrink(Job.model_validate(job))
    hiding = [change.text for change in changes if change.hides]
    assert [text.split()[0] for text in hiding] == [
        "layout.compress",
        "data.stream",
        "evaluation.sets",
        "memory.offload",
    ]
    _, on_gpu = shrink(Job.model_validate(job), device="cuda")
    assert not any(text.startswith("memory.offload") for text in texts(on_gpu))


def test_kernels_that_were_not_run_are_named() -> None:
    job = big("gpt2", tp=2, async_tp=True).model_dump()
    job["run"] |= {"compile": True}
    small, changes = shrink(Job.model_validate(job))
    assert small.layout.async_tp
    [hiding] = [change.text for change in changes if change.hides]
    assert "layout.async_tp" in hiding and "kernels, which send pieces beside products, are not run" in hiding


def test_a_split_keeps_its_order_of_sizes() -> None:
    small, _ = shrink(big("gpt2", pp=3, split=[2, 8, 2]))
    assert small.layout.split == (1, 2, 1) and small.model.layers == 4
    small, changes = shrink(big("gpt2", pp=6, split=[2, 1, 3, 2, 2, 2]))
    assert small.layout.split is None and any("balanced" in change.text and change.hides for change in changes)


def test_one_step_of_a_schedule_that_decays() -> None:
    job = big("gpt2", tp=2).model_dump()
    job["schedule"] |= {"name": "wsd", "decay_steps": 100}
    small, _ = shrink(Job.model_validate(job), steps=1)
    assert small.run.steps == 1


def test_a_learned_table_longer_than_the_sequence_stays_longer() -> None:
    small, _ = shrink(big("gpt2", tp=2, batch={"sequence_length": 512}))
    assert small.model.max_sequence_length > small.batch.sequence_length
    small, _ = shrink(big("gpt2", tp=2))
    assert small.model.max_sequence_length == small.batch.sequence_length


def test_a_window_stays_shorter_or_longer_than_the_sequence() -> None:
    for sequence, shorter in ((8192, True), (1024, False)):
        small, _ = shrink(
            big("mistral-7b", tp=2, model={"max_sequence_length": 8192}, batch={"sequence_length": sequence})
        )
        assert small.model.sliding_window is not None
        assert (small.model.sliding_window < small.batch.sequence_length) == shorter


def test_an_encoder_stays_of_its_kind_and_fits_the_small_layout() -> None:
    vision = {"kind": "clip", "image_size": 336, "patch": 14, "width": 1024, "layers": 24, "heads": 16}
    chosen = {"select_layer": -2, "images": 3, "image_token": 31999, "train": ("projector", "decoder")}
    model = model_preset("llama-2-7b") | {"vision": vision | chosen}
    batch = {"sequence_length": 4096, "global_batch": 64, "micro_batch": 1}
    job = Job.model_validate({"model": model, "batch": batch, "layout": {"tp": 8, "pp": 2, "dp_shard": 2}})
    small, changes = shrink(job)
    require_layout(small, ranks_of(small.layout))
    own = small.model.vision
    assert own is not None and (own.kind, own.train) == ("clip", chosen["train"])
    assert own.layers > own.used_layers and own.images == 2 and own.heads == 2 * small.layout.tp
    assert any(change.text.startswith("model.vision: image_size 336 → 8") for change in changes)
