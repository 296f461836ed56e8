"""A job's `[cluster]`: what its site fills in, what the planner takes from it, and what a plan writes."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.hardware import completed, find_site
from meshwright.job import load_job
from meshwright.job.devices import Cluster
from meshwright.plan import machine_of, machines_of, parse_cluster, predict, search, spelled
from meshwright.plan.compare import cluster_here
from meshwright.runs import RunFolder

SEARCH = ["--seq", "2048", "--batch-tokens", "131072", "--top", "1"]


def test_a_site_fills_in_what_the_job_does_not_say() -> None:
    site = find_site("leonardo")
    whole = completed(Cluster(name="leonardo", nodes=16))
    assert whole.model_dump() == parse_cluster("16xleonardo").model_dump()
    assert (whole.gpu, whole.gpus_per_node, whole.host_memory_gib) == (site.gpu, 4, site.host_memory_gib)
    assert whole.links == {"network": site.network_gb_s}
    own = completed(Cluster(name="leonardo", gpu="h100", gpus_per_node=2, links={"node": 200.0}))
    assert (own.gpu, own.gpus_per_node) == ("h100", 2)
    assert own.links == {"network": site.network_gb_s, "node": 200.0}
    assert completed(Cluster(name="leonardo", links={"network": 1.0})).links == {"network": 1.0}
    assert whole.model_fields_set == {"name", "nodes"}, "what was said"


def test_a_profile_of_ones_own_is_a_cluster_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "vega"\ngpus_per_node = 3\n')
    whole = completed(Cluster(name=str(path)))
    assert whole.gpus_per_node == 3 and whole.name == str(path) and machine_of(whole).gpus == 3
    assert parse_cluster(f"2x{path}").name == str(path), "by which it is found again"


@pytest.mark.parametrize(
    ("ranks", "said", "machines"),
    [
        (8, {"name": "leonardo"}, (2, 4)),
        (2, {"name": "leonardo"}, (1, 2)),
        (8, {"name": "leonardo", "nodes": 3}, (3, 4)),
        (16, {"gpu": "h100", "gpus_per_node": 8}, (2, 8)),
        (16, {"gpu": "h100"}, (1, 1)),
    ],
)
def test_machines_that_are_not_counted_are_those_the_layout_fills(
    ranks: int, said: dict[str, Any], machines: tuple[int, int]
) -> None:
    whole = completed(Cluster(**said), ranks)
    assert (whole.nodes, whole.gpus_per_node) == machines


def test_what_no_site_has_is_refused() -> None:
    with pytest.raises(UserError, match=r"cluster\.name = leonrdo is neither .*; use one of leonardo"):
        completed(Cluster(name="leonrdo"))
    with pytest.raises(UserError, match=r"cluster\.name = vega with 61 nodes is not possible; .* has 60 nodes"):
        completed(Cluster(name="vega", nodes=61))
    with pytest.raises(UserError, match="--cluster = 0xvega has no GPU; write at least one node"):
        parse_cluster("0xvega")


def test_a_site_without_a_gpu_has_no_plan(tmp_path: Path) -> None:
    (tmp_path / "cpus.toml").write_text('title = "here"\ngpus_per_node = 2\n')
    with pytest.raises(UserError, match=r"cpus\.toml has no GPU, and a plan needs one"):
        completed(Cluster(name=str(tmp_path / "cpus.toml")))


@pytest.mark.parametrize("cluster", ["2xh100", "2xleonardo"])
def test_a_plan_writes_the_machines_it_is_for(cli, tmp_path: Path, cluster: str) -> None:
    made = cli("plan", "--model", "llama-3.2-1b", "--cluster", cluster, *SEARCH, "--write", "job.toml", "--json")
    assert made.code == 0, made
    [best] = json.loads(made.out)["layouts"]
    text = (tmp_path / "job.toml").read_text()
    said = tomllib.loads(text)["cluster"]
    assert said == (
        {"name": "leonardo", "nodes": 2} if "leo" in cluster else {"nodes": 1, "gpus_per_node": 2, "gpu": "h100"}
    )
    assert f"planned for {cluster}" in text
    checked = cli("plan", "--check", "job.toml", "--json")
    assert checked.code == 0 and json.loads(checked.out)["step_s"] == pytest.approx(best["step_s"])
    again = cli("plan", "--model", "job.toml", *SEARCH, "--json")
    assert again.code == 0 and json.loads(again.out)["layouts"][0]["step_s"] == pytest.approx(best["step_s"])


JOB = """
[model]
preset = "llama-3.2-1b"
[batch]
sequence_length = 2048
global_batch = 64
micro_batch = 8
[layout]
dp_shard = 8
[cluster]
name = "leonardo"
price = 2.0
"""


def test_every_plan_of_a_job_takes_its_own_machines(cli, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    own, spoken = (cli("plan", "--check", "job.toml", *words, "--json") for words in ([], ["--cluster", "2xleonardo"]))
    assert own.code == 0 and own.out == spoken.out
    other = cli("plan", "--check", "job.toml", "--cluster", "8xh100", "--json")
    assert json.loads(other.out)["step_s"] < 0.9 * json.loads(own.out)["step_s"], "what is asked for wins"
    own, spoken = (
        cli("plan", "--check", "job.toml", "--scale", "4,8,16", *words) for words in ([], ["--cluster", "2xleonardo"])
    )
    assert own.code == 0 and own.out == spoken.out
    own, spoken = (
        cli("report", "job.toml", "--out", "plan.html", "--force", *words)
        for words in ([], ["--cluster", "2xleonardo"])
    )
    assert own.code == spoken.code == 0 and "2 × 4 × a100-64gb" in (tmp_path / "plan.html").read_text()
    found = cli("plan", "--model", "job.toml", *SEARCH, "--tokens", "1e12", "--set", "cluster.nodes=2", "--json")
    [best] = json.loads(found.out)["layouts"]
    assert best["training"]["cost"] == pytest.approx(2.0 * best["training"]["gpu_hours"]), "at the job's own price"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--check", "job.toml", "--set", "cluster.name=leonard"], "cluster.name = leonard is neither"),
        (["--check", "job.toml", "--set", "cluster.nodes=3"], "layout needs 8 ranks, but the cluster has 12"),
        (["--check", "demo"], "cluster.gpu is not given, and a plan needs one"),
        (["--model", "demo"], "--cluster is missing, and a search needs it"),
        (["--model", "job.toml", "--set", "cluster.name=none.toml"], "cluster.name = none.toml is neither"),
    ],
)
def test_mistakes_are_one_sentence(cli, tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    refused = cli("plan", *words)
    assert refused.code == 2 and sentence in refused.err and len(refused.err.splitlines()) == 1, refused


def test_a_run_folder_says_no_more_of_its_machines_than_its_job_did(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    loaded = load_job(str(tmp_path / "job.toml"))
    RunFolder.create(tmp_path / "run", loaded.raw, loaded.job.model_dump(mode="json"), [])
    again = load_job(str(tmp_path / "run"), ["layout.dp_shard=16", "batch.micro_batch=4"]).job
    assert again.cluster == loaded.job.cluster and again.cluster.model_fields_set == {"name", "price"}
    assert spelled(machines_of(again)) == "4xleonardo"


def test_a_job_for_other_machines_trains_here(cli, tiny_job: Path) -> None:
    said = ["cluster.name=leonardo", "cluster.nodes=16", "cluster.gpu=h100", "run.steps=1", "evaluation.every_steps=0"]
    done = cli("train", "job.toml", *(word for one in said for word in ("--set", one)))
    assert done.code == 0, done
    assert cli("train", "run", "--resume", "--set", "cluster.name=elsewhere.toml").code == 0


def test_a_run_is_compared_with_the_machine_it_was_on() -> None:
    """The section counts where it speaks of that GPU: its nodes and links; else it is another machine's."""
    job = load_job("demo", ["cluster.name=leonardo"]).job
    assert job.cluster.gpu is None
    here = cluster_here(job, "NVIDIA A100-SXM-64GB", 8)
    assert here is not None and (here.nodes, here.gpus_per_node) == (2, 4) and here.links
    elsewhere = cluster_here(job, "NVIDIA H200", 8)
    assert elsewhere is not None and (elsewhere.nodes, elsewhere.gpus_per_node, elsewhere.links) == (1, 8, None)
    lost = load_job("demo", ["cluster.name=gone.toml"]).job
    assert cluster_here(lost, "NVIDIA H200", 8) == Cluster(gpu="h200", nodes=1, gpus_per_node=8)


def test_what_is_offloaded_must_fit_the_host() -> None:
    job = load_job("10b-2xrtx3090").job
    roomy, tight = (
        predict(job, machines_of(job).model_copy(update={"host_memory_gib": gib})) for gib in (256.0, 128.0)
    )
    assert roomy.fits and roomy.host_over_bytes == 0.0
    assert not tight.fits and 10 * 2**30 < tight.host_over_bytes < 12 * 2**30
    model, two = job.model, parse_cluster("2xrtx-3090")
    for gib, found in ((256.0, True), (64.0, False)):
        cluster = two.model_copy(update={"host_memory_gib": gib})
        assert bool(search(model, cluster, 2048, 8, top=1, allow=("offload",)).best) == found


def test_a_plan_that_cannot_be_written_and_a_sequence_of_nothing_are_refused(cli) -> None:
    asked = ("plan", "--model", "gpt2", "--cluster", "1xh100")
    told = cli(*asked, "--write", "nowhere/job.toml")
    assert told.code == 2 and told.err.startswith("meshwright: --write = nowhere/job.toml cannot be written"), told.err
    assert cli(*asked, "--seq", "-5").code == 2 and cli(*asked, "--batch-tokens", "0").code == 2
