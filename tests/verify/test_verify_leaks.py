"""Outputs that depend on a later token or on another document: none of ours do, and a model of one's own is checked."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshwright.job import Job
from meshwright.model import CausalAttend
from meshwright.model.router import Router
from meshwright.verify import load_matrix
from meshwright.verify.check import in_one_process
from meshwright.verify.leaks import find_leaks

EXAMPLE = Path(__file__).parents[2] / "docs/examples/parallel_block.py"
RESIDUAL = "return x + self.mix(self.norm(x), rotary, documents)"
ATTEND = "out, _ = self.attend(apply_rotary(q, rotary), apply_rotary(k, rotary), v, None, documents)"
JOB = """
[model]
file = "own.py"
vocab_size = 300
width = 32
heads = 4
kv_heads = 2
layers = 2
max_sequence_length = 64

[data]
mask_documents = true

[batch]
sequence_length = 32
global_batch = 4
micro_batch = 1

[evaluation]
every_steps = 0

[layout]
dp_shard = 2
"""


def of_each_family() -> Iterator[tuple[str, Job]]:
    """The quick matrix's first layout of every model, as one process; what trains only a part computes the same."""
    jobs = {line.name.partition(" · ")[0]: line.job for line in reversed(load_matrix("quick"))}
    for name, job in jobs.items():
        if not job.prefers and not job.model.freezes:
            yield name, in_one_process(job)


FAMILIES = dict(of_each_family())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_sees_later_tokens_or_other_documents(family: str) -> None:
    job = FAMILIES[family]
    for masked in (True, False):
        checked = job.model_copy(update={"data": job.data.model_copy(update={"mask_documents": masked})})
        rows = find_leaks(checked)
        assert [row.name for row in rows] == ["later tokens", "other documents"][: 1 + masked]
        assert all(row.ok for row in rows), rows


def test_the_families_are_those_of_the_matrix() -> None:
    assert {"llama", "gpt2", "qwen2", "qwen3", "mistral", "olmoe", "gpt-oss", "deepseek"} <= set(FAMILIES)
    assert {"clip, qwen3", "siglip, llama", "whisper, llama"} <= set(FAMILIES)


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_a_mask_that_lets_a_token_see_the_next_one_is_reported(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    visible = CausalAttend.visible

    def late(self, q, k, documents):
        seen = visible(self, q, k, documents)
        if seen is None:
            seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()[None, None]
        return seen | seen.roll(1, -1)

    monkeypatch.setattr(CausalAttend, "visible", late)
    rows = find_leaks(FAMILIES[family])
    assert rows[0].ok is False and "which comes later; let no token attend to a later one" in rows[0].note


def test_experts_that_choose_their_tokens_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert choice: whether an expert takes a token depends on the scores of all others."""

    def choose(self, scores):
        return scores.argsort(1, descending=True)[..., : self.experts.top_k].remainder(self.experts.count)

    monkeypatch.setattr(Router, "_choose", choose)
    [later, _] = find_leaks(FAMILIES["moe"])
    assert later.ok is False


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        (
            RESIDUAL,
            "return x + self.mix(self.norm(x + 0.1 * x.roll(-1, 1)), rotary, documents)",
            "the output at position 0 depends on token 1, which comes later; let no token attend to a later one",
        ),
        (
            ATTEND,
            ATTEND.replace("None, documents", "None, None"),
            "the output at position 5 in document 1 depends on token 0 in document 0 despite data.mask_documents = "
            "true; let attention use `documents`",
        ),
    ],
)
def test_a_model_file_that_leaks_fails_the_check(cli, tmp_path: Path, right: str, wrong: str, sentence: str) -> None:
    text = EXAMPLE.read_text()
    assert text.count(right) == 1
    path = tmp_path / "own.py"  # references are kept by this name
    path.write_text(text.replace(right, wrong))
    (tmp_path / "own.toml").write_text(JOB)
    command = ("verify", "own.toml", "--steps", "1", "--set", f"model.file={path}")
    told = cli(*command)
    assert told.code == 1 and told.out.endswith(f'wrong: model.file = "{path}": {sentence}\n'), told
    answer = json.loads(cli(*command, "--json").out)
    assert answer["equal"] is False and answer["first_wrong"]["kind"] == "leak"
    assert sentence in answer["first_wrong"]["note"]


@pytest.mark.thorough
def test_what_a_model_adds_to_its_loss_may_depend_on_all_tokens(cli, tmp_path: Path) -> None:
    """As the balance of a router does."""
    text, loss = EXAMPLE.read_text(), "return self.head(self.final_norm(x), labels, valid_count)"
    assert text.count(loss) == 1
    path = tmp_path / "own.py"
    path.write_text(text.replace(loss, f"{loss} + (0 if labels is None else x.square().sum() / valid_count)"))
    (tmp_path / "own.toml").write_text(JOB)
    right = cli("verify", "own.toml", "--steps", "1", "--json", "--set", f"model.file={path}")
    rows = [row for row in json.loads(right.out)["rows"] if row["kind"] == "leak"]
    assert [row["name"] for row in rows] == ["later tokens", "other documents"] and all(row["ok"] for row in rows)
