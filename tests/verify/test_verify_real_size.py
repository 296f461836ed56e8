"""Every kind of block at its real size, on the meta device: what fails there is named, block and module."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.job import Job, model_preset
from meshwright.model import CausalAttend
from meshwright.model.encoder import EncoderAttention
from meshwright.model.router import Router
from meshwright.verify import require_real_size

EXAMPLE = Path(__file__).parents[2] / "docs/examples/parallel_block.py"
PRESETS = ["llama-3-8b", "gpt2", "qwen3-0.6b", "mixtral-8x7b", "gpt-oss-120b", "deepseek-v3"]
VISION = {"kind": "clip", "image_size": 336, "patch": 14, "width": 1024, "layers": 24, "heads": 16, "select_layer": -2}


def big(preset: str, model: dict[str, Any] | None = None, **sections: Any) -> Job:
    batch = {"sequence_length": 1024, "global_batch": 8, "micro_batch": 2}
    sections = {"model": model_preset(preset) | (model or {}), "batch": batch, **sections}
    return Job.model_validate(sections)


@pytest.mark.parametrize("preset", PRESETS)
def test_all_kinds_of_blocks_run_at_their_real_size(preset: str) -> None:
    assert require_real_size(big(preset, layout={"tp": 2, "cp": 2}, data={"mask_documents": True})) == []


def test_so_do_encoders_extra_tokens_adapters_and_experts_with_a_capacity() -> None:
    experts = model_preset("deepseek-v3")["experts"] | {"capacity": 1.25}
    assert require_real_size(big("llama-2-7b", {"vision": VISION})) == []
    assert require_real_size(big("deepseek-v3", {"extra_tokens": 1, "experts": experts})) == []
    assert require_real_size(big("llama-3-8b", {"adapter": {"rank": 16, "dora": True}})) == []


def test_a_router_that_fails_is_named_before_a_rank_starts(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two best experts of a group of a single one."""

    def choose(self: Router, scores: Any) -> Any:
        return scores.view(*scores.shape[:-1], self.experts.groups, -1).topk(2, -1).indices[..., 0]

    monkeypatch.setattr(Router, "_choose", choose)
    experts = 'count = 8\ntop_k = 2\nffn_width = 8\ngroups = 8\ngroups_kept = 4\nscores = "sigmoid"\nfirst_dense = 3'
    (tmp_path / "job.toml").write_text(f"[model]\nlayers = 6\n[model.experts]\n{experts}\n")
    told = cli("verify", "job.toml", "--set", "layout.dp_shard=2")
    assert told.code == 2 and told.err.startswith(
        "meshwright: model.experts.count = 8, model.experts.top_k = 2, model.experts.groups = 8, "
        "model.experts.groups_kept = 4: a block with experts fails at its real size in layers.3.moe.router "
        "(RuntimeError: "
    ), told
    assert told.err.endswith("; change these, or report it with the job file\n") and told.err.count("\n") == 1


@pytest.mark.parametrize("layout", [{}, {"tp": 4, "cp": 2}])
def test_a_size_that_only_the_real_job_has(layout: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads: all of them, or those of a tensor-parallel rank."""
    visible = CausalAttend.__call__
    local = 32 // layout.get("tp", 1)

    def refuse(self: CausalAttend, q: Any, *others: Any) -> Any:
        assert q.shape[2] != local, f"not for {local} heads"
        return visible(self, q, *others)

    monkeypatch.setattr(CausalAttend, "__call__", refuse)
    sentence = rf"model.heads = 32, .*a dense block fails .* in layers.0.attention \(.*: not for {local} heads\)"
    with pytest.raises(UserError, match=sentence):
        require_real_size(big("llama-3-8b", layout=layout))


def test_a_failure_of_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncoderAttention, "forward", lambda self, x: x[..., :-1])
    with pytest.raises(UserError, match=r"vision.width = 1024, .*: the encoder fails .* in vision.layers.0 \("):
        require_real_size(big("llama-2-7b", {"vision": VISION}))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("self.down(torch.relu(self.up(x)).square()[..., :128])", "fails at its real size in layers.0.mix.down ("),
        ("self.down(torch.relu(self.up(x)).square()) * float(x.sum())", ""),
    ],
)
def test_a_model_file(tmp_path: Path, wrong: str, sentence: str) -> None:
    """The small job's feed-forward is narrower than 128; and what reads values cannot run without any."""
    text, right = EXAMPLE.read_text(), "self.down(torch.relu(self.up(x)).square())"
    assert text.count(right) == 1
    path = tmp_path / "own.py"
    path.write_text(text.replace(right, wrong))
    sections = {"model": {"file": str(path)}, "layout": {"dp_replicate": 2}, "batch": {"global_batch": 64}}
    job = Job.model_validate(sections)
    if not sentence:
        [change] = require_real_size(job)
        assert change.hides and "its real size is not checked" in change.text
        return
    with pytest.raises(UserError) as refused:
        require_real_size(job)
    assert str(refused.value).startswith(f'model.file = "{path}" {sentence}'), refused.value
