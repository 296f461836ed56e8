"""`meshwright verify` as a person and as a script use it: tables, JSON, exit codes."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "parallel_block.py"
DEMO = "job.toml"
ROW_KEYS = {"format", "kind", "name", "error", "bound", "ok", "note"}


@pytest.fixture(autouse=True)
def job_file(tmp_path: Path) -> None:
    """A job of odd sizes in the folder the commands run in."""
    shape = "vocab_size = 1001\nwidth = 96\nlayers = 3\nheads = 6\nkv_heads = 2\nmax_sequence_length = 128"
    (tmp_path / DEMO).write_text(
        f"[model]\n{shape}\n[batch]\nsequence_length = 128\nglobal_batch = 24\nmicro_batch = 2\n"
    )


def test_a_job_is_shrunk_compared_and_found_equal(cli) -> None:
    result = cli("verify", DEMO, "--set", "layout.dp_replicate=6", "--steps", "2", "--set", "batch.global_batch=24")
    assert result.code == 0, result.err
    assert "layout.dp_replicate 6 → 4" in result.out
    assert "equal: 4 ranks compute the same as one process" in result.out
    for kind in ("loss", "norm", "gradient", "update"):
        assert kind in result.out


@pytest.mark.thorough
def test_json_has_stable_keys(cli) -> None:
    result = cli("verify", DEMO, "--set", "layout.dp_shard=2", "--set", "layout.zero=3", "--steps", "2", "--json")
    answer = json.loads(result.out)
    assert result.code == 0 and answer["equal"] is True
    assert set(answer) == {
        "equal", "nothing_compared", "job", "layout", "ranks", "dtype", "steps", "seconds", "notes",
        "could_hide_errors", "first_wrong", "collectives", "nccl", "rows",
    }  # fmt: skip
    assert answer["layout"] == {"dp_shard": 2, "zero": 3} and answer["first_wrong"] is None
    assert answer["nothing_compared"] is None
    assert all(set(row) == ROW_KEYS for row in answer["rows"])
    assert sum(row["kind"] == "loss" for row in answer["rows"]) == 2


def test_a_layout_of_one_rank_leaves_nothing_to_compare(cli) -> None:
    job = (DEMO, "--steps", "1", "--set", "model.layers=1")
    told = "that the job trains, 2 micro-batches as the batch at once, data from workers as from this process"
    sentence = f"Nothing compared: the layout has one rank. Checked: {told}."
    result = cli("verify", *job)
    assert result.code == 0 and f"{sentence} (" in result.out and "equal:" not in result.out, result
    answer = json.loads(cli("verify", *job, "--json").out)
    assert answer["ranks"] == 1 and answer["nothing_compared"] == sentence


@pytest.mark.thorough
def test_a_wrong_layout_exits_1_with_the_first_diverging_parameter(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    divide = FSDPModule.set_gradient_divide_factor
    monkeypatch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: divide(self, 2 * factor))
    job = (DEMO, "--set", "layout.dp_shard=2", "--steps", "1")
    result = cli("verify", *job)
    assert result.code == 1
    assert "not equal: first difference is the gradient of embed.weight, off by 5.0e-01" in result.out
    result = cli("verify", *job, "--json")
    assert result.code == 1 and json.loads(result.out)["first_wrong"]["name"] == "embed.weight"


@pytest.mark.thorough
def test_a_format_is_judged_by_bounds_of_its_own(cli) -> None:
    arguments = (DEMO, "--set", "layout.dp_replicate=2", "--set", "model.layers=1", "--steps", "1")
    result = cli("verify", *arguments, "--dtype", "bf16", "--json")
    answer = json.loads(result.out)
    assert result.code == 0 and answer["equal"] is True
    assert {(row["format"], row["ok"]) for row in answer["rows"]} == {("bf16", True)}
    assert {row["kind"] for row in answer["rows"]} == {"loss", "norm", "evaluation", "gradient", "update", "sum"}
    result = cli("verify", *arguments, "--set", "precision.compute=bf16")
    assert result.code == 0 and "gradient in bf16" in result.out and "loss in bf16" in result.out
    assert "equal: 2 ranks compute the same as one process, in bf16 as exactly as the format allows" in result.out


@pytest.mark.thorough
def test_float32_is_judged_by_its_own_bounds(cli) -> None:
    result = cli("verify", DEMO, "--set", "layout.tp=2", "--dtype", "float32", "--json")
    answer = json.loads(result.out)
    assert result.code == 0 and answer["equal"] is True
    assert {row["bound"] for row in answer["rows"]} == {1e-5, None}


@pytest.mark.thorough
def test_a_model_of_one_s_own(cli) -> None:
    result = cli("verify", "--model", str(EXAMPLE), "--json")
    answer = json.loads(result.out)
    assert result.code == 0 and answer["equal"] is True, result.out
    assert len(answer["layouts"]) >= 5 and {layout["ranks"] for layout in answer["layouts"]} == {2, 4}
    assert set(answer["layouts"][0]) == {
        "name", "ranks", "equal", "worst", "first_wrong", "error", "seconds", "collectives",
    }  # fmt: skip


@pytest.mark.thorough
def test_a_layer_of_one_s_own(cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Whole(nn.Linear):\n"
        "    def __init__(self, i, o, bias, group):\n        super().__init__(i, o, bias)\n\n"
        "    @torch.no_grad()\n    def load_full(self, weight, bias):\n        self.weight.copy_(weight)\n"
        "        if bias is not None:\n            self.bias.copy_(bias)\n"
    )
    result = cli("verify", "--layer", "mine.py:Whole")
    assert result.code == 1 and "2 ranks, with bias: every rank holds the whole weight" in result.out
    answer = json.loads(cli("verify", "--layer", "mine.py:Whole", "--json").out)
    assert answer["equal"] is False and [grade["ranks"] for grade in answer["grades"]] == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "verify needs exactly one of JOB, --matrix, --model, --layer, --random, not none"),
        ((DEMO, "--matrix", "quick"), "not JOB and --matrix"),
        (("--matrix", "small"), "--matrix small does not exist; use quick or full"),
        ((DEMO, "--dtype", "fp64"), "--dtype fp64 is not supported; use float64, float32, bf16"),
        ((DEMO, "--set", "layout.tp=5"), "layout.tp = 5 does not divide"),
        (("--layer", "mine"), "--layer mine is not file.py:Class"),
    ],
)
def test_mistakes_exit_2_in_one_sentence(cli, arguments: tuple[str, ...], sentence: str) -> None:
    result = cli("verify", *arguments)
    assert result.code == 2
    assert sentence in result.err and "Traceback" not in result.err


def test_the_parent_never_touches_cuda(cli) -> None:
    cli("verify", DEMO, "--set", "layout.dp_replicate=2", "--steps", "1")
    assert not torch.cuda.is_initialized()
