"""`job explain`: a commented job file, readable in a narrow terminal."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshwright.job import load_job

MANY = [
    *("--set", "memory.recompute={every=2}", "--set", "layout.pp=2", "--set", "schedule.name=wsd"),
    *("--set", "cluster.name=leonardo", "--set", "layout.dp_shard=2", "--set", "model.width=64"),
    *("--set", 'evaluation.sets={"a set" = "corpus"}'),
]

EXPERTS = [
    *("--set", "model.experts={count=4, top_k=2, ffn_width=8, balance_rate=0.01}", "--set", "layout.ep=2"),
    *("--set", "layout.dp_shard=2", "--set", "model.rope_scaling={kind='yarn', factor=2.0}"),
]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("options", [(), ("--changed",)], ids=["all", "changed"])
@pytest.mark.parametrize("more", [(), tuple(MANY), tuple(EXPERTS)], ids=["plain", "many", "tables"])
def test_what_is_printed_is_the_job_again(
    cli: Any, tiny_job: Path, tmp_path: Path, options: tuple[str, ...], more: tuple[str, ...]
) -> None:
    explained = cli("job", "explain", "job.toml", *options, *more)
    assert explained.code == 0, explained.err
    assert max(map(len, explained.out.splitlines())) <= 80
    (tmp_path / "again.toml").write_text(explained.out)
    overrides = [word for word in more if word != "--set"]
    assert load_job("again.toml").job == load_job("job.toml", overrides).job


def test_changed_leaves_out_defaults_and_says_what_follows(cli: Any, tiny_job: Path) -> None:
    explained = cli("job", "explain", "job.toml", "--changed", *MANY)
    lines = {line.partition(" #")[0].strip(): line for line in explained.out.splitlines()}
    assert "recompute = { every = 2 }" in lines and lines["recompute = { every = 2 }"].endswith("# override")
    assert lines['preset = "tiny-llama"'].endswith("# file")
    assert lines["layers = 2"].endswith("# preset tiny-llama")
    assert "micro_batch = 2" in lines and "[log]" not in lines and "betas" not in explained.out
    for derived in ("# warmup_steps = 1", "# decay_steps = 1", "# zero = 2", "# split = [1, 1]", '# gpu = "a100-64gb"'):
        assert lines[derived].endswith("# derived"), derived
    total = " ".join(line.removeprefix("# ") for line in explained.out.rpartition("\n\n")[2].splitlines())
    assert (
        "4 ranks, 1 micro-batch per rank and step (accumulation), 128 tokens per step, 1,280 tokens in 10 st" in total
    )


def test_a_field_that_is_a_table_is_one_with_the_origin_and_meaning_of_every_field(cli: Any, tiny_job: Path) -> None:
    out = cli("job", "explain", "job.toml", *EXPERTS).out
    table = out.partition("[model.experts]")[2].partition("\n[")[0]
    assert "# Experts that each token is sent to.\ntop_k = 2 " in table and "experts = {" not in out
    lines = {line.partition(" #")[0].strip(): line for line in table.splitlines()}
    assert lines["balance_rate = 0.01"].endswith("# override") and lines["z_loss = 0.0"].endswith("# default")
    changed = cli("job", "explain", "job.toml", "--changed", *EXPERTS).out
    assert (
        "balance_rate = 0.01" in changed and "z_loss" not in changed and "parameters, of which a token uses" in changed
    )
    rows = {
        row["field"]: row for row in json.loads(cli("job", "explain", "job.toml", "--json", *EXPERTS).out)["fields"]
    }
    assert rows["model.experts"]["value"]["count"] == rows["model.experts.count"]["value"] == 4
    assert rows["model.experts.count"]["meaning"] == "Experts per layer."


def test_a_key_of_a_table_has_its_own_origin(cli: Any, tiny_job: Path) -> None:
    settings = ["--set", "model.preset=tiny-moe", "--set", "model.experts.balance_rate=0.01"]
    out = cli("job", "explain", "job.toml", "--changed", *settings).out
    lines = {line.partition(" #")[0].strip(): line for line in out.splitlines()}
    assert lines["balance_rate = 0.01"].endswith("# override") and lines["top_k = 2"].endswith("# preset tiny-moe")


@pytest.mark.parametrize(
    ("setting", "sentences"),
    [
        (
            "model.experts={count=4, top_k=2}",
            ["--set: model.experts needs ffn_width; set model.experts.ffn_width (inner size of one expert)"],
        ),
        (
            "model.experts={count=4, top_q=2, ffn_width=8}",
            [
                "--set: model.experts needs top_k; set model.experts.top_k (experts that each token is sent to)",
                "--set: model.experts.top_q is not a known setting; did you mean model.experts.top_k?",
            ],
        ),
        (
            'model.latent={kv_rank="a", rope_dim=4, value_dim=8}',
            ['--set: model.latent.kv_rank = "a" is not allowed; it should be a whole number'],
        ),
    ],
)
def test_mistakes_inside_a_table_name_its_field(cli: Any, tiny_job: Path, setting: str, sentences: list[str]) -> None:
    refused = cli("job", "explain", "job.toml", "--set", setting)
    assert refused.code == 2
    assert refused.err.removeprefix("meshwright: ").splitlines() == sentences


def test_every_field_has_its_meaning_and_no_dash(cli: Any, tiny_job: Path) -> None:
    out = cli("job", "explain", "job.toml").out
    assert "–" not in out and "None" not in out and "{'" not in out
    assert "# Sequences in one optimizer step, over all devices.\nglobal_batch = 4" in out
    assert re.search("# chat_template +# not set", out)
    assert set(tomllib.loads(out)) >= {"model", "optimizer", "log"}


def test_the_json_adds_what_is_derived(cli: Any, tiny_job: Path) -> None:
    rows = {row["field"]: row for row in json.loads(cli("job", "explain", "job.toml", "--json").out)["fields"]}
    assert rows["schedule.warmup_steps"] | {"meaning": ""} == {
        "field": "schedule.warmup_steps",
        "value": None,
        "derived": 1,
        "origin": "default",
        "meaning": "",
    }
    changed = json.loads(cli("job", "explain", "job.toml", "--json", "--changed").out)
    assert {row["field"] for row in changed["fields"]} < rows.keys() and changed["accumulation"] == 2


def test_auto_is_shown_with_what_it_stands_for_and_why(cli: Any, tiny_job: Path) -> None:
    def said(*overrides: str) -> dict[str, str]:
        words = [word for one in overrides for word in ("--set", one)]
        found = json.loads(cli("job", "explain", "job.toml", "--json", *words).out)["fields"]
        rows = {row["field"]: row for row in found if row["field"] in ("precision.compute", "run.compile")}
        assert all(row["value"] == "auto" for row in rows.values())
        return {name: f"{row['derived']}: {row['why']}" for name, row in rows.items()}

    assert said() == {"precision.compute": "fp32: a CPU", "run.compile": "False: a CPU"}
    gpu = {"precision.compute": "bf16: h100 has bf16", "run.compile": "True: h100 is a GPU"}
    assert said("cluster.gpu=h100") == gpu
    assert said("cluster.gpu=v100-sxm-32gb")["precision.compute"] == "fp32: v100-sxm-32gb has no bf16"
    split = said("cluster.gpu=h100", "layout.pp=2", "layout.schedule=zb-h1")["run.compile"]
    assert split.startswith("False: run.compile = true hangs with layout.schedule")
    changed = cli("job", "explain", "job.toml", "--changed", "--set", "cluster.gpu=h100").out
    assert re.search(r'^compute = "auto" +# "bf16": h100 has bf16$', changed, re.MULTILINE)
    assert re.search(r'^compile = "auto" +# true: h100 is a GPU$', changed, re.MULTILINE)
