"""What a rehearsal prints, and what the other commands say of its folder."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command import Cli
from rehearsals import ALONE, SHORT, WHOLE, rank, saved

from meshwright.cli.rehearse_text import rehearsal_text
from meshwright.rehearse import Messages, Rehearsal
from meshwright.rehearse.words import summary

LONG = replace(
    WHOLE.ranks[0],
    messages=(
        Messages("reduce_scatter_tensor_coalesced", "dp_replicate·dp_shard·cp·tp·ep", tuple(range(64)), 2**40, 99),
    ),
)


@pytest.mark.parametrize(
    "rehearsal",
    [WHOLE, ALONE, SHORT, replace(WHOLE, ranks=(LONG,), warnings=("a" * 200, "word " * 60))],
    ids=["whole", "alone", "short", "long"],
)
def test_no_line_is_wider_than_a_terminal(rehearsal: Rehearsal) -> None:
    lines = rehearsal_text(rehearsal).splitlines()
    assert max(map(len, lines)) <= 80 and not any(line != line.rstrip() for line in lines)


def row(text: str, name: str) -> list[str]:
    """The cells of the first row of this name."""
    line = next(line for line in text.splitlines() if line.strip().startswith(name + "  "))
    return re.split(r"\s{2,}", line.strip())


def test_memory_is_shown_beside_the_plan_with_its_error() -> None:
    text = rehearsal_text(ALONE)
    assert text.startswith(
        "rehearsed on NVIDIA H200, torch 2.11.0, for 8x8xh100\n\nrank 16 of 64 (stage 1), as 16 ranks"
    )
    assert "median of 10, messages taking no time  2,875.00 ms" in text
    assert row(text, "activations") == ["activations", "26.50", "26.00", "-1.9%"]
    assert row(text, "weights") == ["weights", "15.00", "15.00", "+0.0%"]  # two of the plan's terms
    assert row(text, "allocated at the peak") == ["allocated at the peak", "71.50", "71.06", "-0.6%"]
    assert row(text, "reserved by the allocator")[1:] == ["74.00", "73.06", "-1.3%"]
    assert "planned terms: weights 10.00, working weights 5.00" in text


def test_compute_and_messages_are_shown() -> None:
    text = rehearsal_text(ALONE)
    assert row(text, "backward") == ["backward", "1,800.00 ms", "62.6%"]
    assert "one action of the schedule: F1 119 ms, B1 225 ms" in text
    assert row(text, "all_gather") == ["all_gather", "dp_shard", "2", "224 MiB", "40", "8.75 GiB"]
    assert "its share of a checkpoint: 9 GiB, written in 4.5 s" in text
    assert "loss" not in text.replace("  loss ", "").replace("losses:", "")  # the phase and the limit alone


def test_the_step_says_what_is_measured_and_what_is_modelled() -> None:
    text = rehearsal_text(WHOLE)
    assert "the step on 8x8xh100: 3.75 s, planned 3.6 s (-4.0%); 279,620 tokens/s" in text
    assert row(text, "pipeline bubble") == ["pipeline bubble", "600.00 ms", "16.0%", "modelled"]
    assert row(text, "modelled") == ["modelled", "875.00 ms", "23.3%"]
    assert "warning: rank 48 (last stage) holds 4.0 GiB more" in text
    assert "what a rehearsal cannot show:\n- losses:" in text
    assert "the step on" not in rehearsal_text(ALONE)


def test_a_rank_that_does_not_fit_is_named_with_what_to_lower() -> None:
    unknown = 'lower batch.micro_batch or batch.sequence_length, or set memory.recompute = "full"'
    needs = "rank 48 of 64 (last stage) needs 84.1 GiB, more than a GPU of 8x8xh100 has"
    assert summary(SHORT) == f"out of memory: {needs} and perhaps more still, as it got no further; {unknown}"
    assert "rank 48 of 64 (last stage) needs 84.1 GiB" in rehearsal_text(SHORT)
    known = replace(SHORT, ranks=(*SHORT.ranks[:3], replace(SHORT.ranks[3], memory=WHOLE.ranks[3].memory)))
    states = "raise layout.zero, dp_shard, tp or pp, or set memory.offload"
    assert summary(known) == f"out of memory: {needs} (planned: 75.1 GiB); {states}"
    assert "logits and loss 4.00" in rehearsal_text(known)
    memory = rank(48, 3, logits_gib=40.0).memory
    assert memory is not None
    last = replace(
        SHORT.ranks[3], memory=replace(memory, planned_terms=memory.planned_terms | {"activations": 2.0**33})
    )
    assert "fewer layers with layout.split" in summary(replace(SHORT, ranks=(*SHORT.ranks[:3], last)))
    told = summary(replace(SHORT, cluster="", ranks=(replace(known.ranks[3], needed_bytes=None, place=""),)))
    assert told.startswith("out of memory: rank 48 of 64 needs more than this device has (planned: 75.1 GiB); ")


def test_kernels_are_shown_on_request() -> None:
    top = [{"name": "sm90_xmma_gemm" * 9, "kind": "products", "calls": 96.0, "seconds": 1.25}]
    kernels = {"kinds_s": {"products": 1.5, "copies": 0.25}, "top": top * 30}
    text = rehearsal_text(replace(ALONE, ranks=(replace(ALONE.ranks[0], kernels=kernels),)))
    assert "kernels: products 1,500.00 ms, copies 250.00 ms" in text
    lines = [line for line in text.splitlines() if line.startswith("sm90")]
    assert len(lines) == 20 and lines[0].endswith("…  products     96  1,250.00 ms") and len(lines[0]) == 80


def test_nothing_is_divided_by_what_was_not_measured() -> None:
    assert WHOLE.step is not None
    empty = replace(rank(0, 0), phases_s={}, actions_s={}, memory=None, messages=(), checkpoint_bytes=None)
    step = replace(WHOLE.step, step_s=0.0, phases_s={}, planned_s=None)
    text = rehearsal_text(replace(WHOLE, ranks=(empty,), step=step, limits=()))
    assert "it sends and receives nothing" in text
    assert summary(replace(WHOLE, ranks=(empty,), step=step)) == "nothing was measured"


def test_status_logs_and_lists_say_that_it_was_rehearsed(cli: Cli, tmp_path: Path) -> None:
    saved(tmp_path / "runs" / "r")
    one = json.loads(cli("status", "runs/r", "--json").out)
    assert one["state"] == "rehearsed" and one["why"] == summary(WHOLE)
    shown = cli("status", "--all")
    assert shown.code == 0 and "rehearsed" in shown.out and "0/" not in shown.out
    assert "rehearsed" in cli("logs", "runs/r").out and "3.75 s per step" in cli("logs", "runs/r").out
    assert cli("checkpoint", "list", "runs/r").out == "runs/r has no checkpoints\n"


@pytest.mark.parametrize(
    "words",
    [
        ("train", "r", "--resume"),
        ("train", "r"),
        ("train", "demo", "--resume", "--set", "run.folder=r"),
        ("train", "demo", "--set", "run.folder=r"),
        ("replay", "r", "--step", "1"),
    ],
    ids=" ".join,
)
def test_training_in_its_folder_is_refused_in_one_sentence(words: tuple[str, ...], cli: Cli, tmp_path: Path) -> None:
    saved(tmp_path / "r")
    before = sorted(tmp_path.rglob("*"))
    refused = cli(*words)
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "r is a rehearsal, which trains nothing and saves no checkpoint; train its job with" in refused.err
    assert [path for path in sorted(tmp_path.rglob("*")) if "cache" not in path.parts] == before


def test_weights_are_not_waited_for(cli: Cli, tmp_path: Path) -> None:
    saved(tmp_path / "r")
    refused = cli("checkpoint", "show", "r")
    assert refused.code == 2 and "it is a rehearsal, which saves none: train its job first" in refused.err


def test_its_job_can_be_planned_and_trained_elsewhere(cli: Cli, tmp_path: Path) -> None:
    saved(tmp_path / "r")
    assert cli("job", "explain", "r").code == 0
    assert cli("job", "explain", "r/job.toml").code == 0


def test_a_damaged_one_is_reported_in_one_sentence(cli: Cli, tmp_path: Path) -> None:
    (saved(tmp_path / "r") / "rehearsal.json").write_text("{")
    refused = cli("report", "r")
    assert refused.code == 2 and refused.err == (
        "meshwright: r/rehearsal.json is damaged (it is not JSON); rehearse the job again\n"
    )
    assert json.loads(cli("status", "r", "--json").out)["state"] == "rehearsed"
