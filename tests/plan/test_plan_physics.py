"""What a formula must not get wrong: published activation sizes, messages, methods, formats and odd lengths."""

import json
from typing import Any

import pytest
from plan_jobs import llama, nodes
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import UserError
from meshwright.job import Job, load_job
from meshwright.job.devices import Cluster
from meshwright.plan import Prediction, machine_of, parse_cluster, predict
from meshwright.plan import software as programs
from meshwright.plan.communication import Wires, all_gather_s, all_to_all_s, broadcast_s, group_of
from meshwright.plan.kept import block_bytes
from meshwright.plan.wording import gpt_shape

BATCH = {"sequence_length": 4096, "global_batch": 64, "micro_batch": 1}


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(("layers", "width", "heads"), [(48, 6144, 64), (96, 12288, 96)])
def test_megatron_keeps_what_its_paper_counts(layers: int, width: int, heads: int, mode: str, sp: bool) -> None:
    """Korthikanti et al., Table 2: with sequence parallelism its inputs are kept sharded and gathered again."""
    batch, sequence, tp = 4, 2048, 8
    job = Job.model_validate(
        {
            "model": gpt_shape(layers, width, heads, sequence, 51200), "layout": {"tp": tp, "sp": sp},
            "batch": {"sequence_length": sequence, "global_batch": batch, "micro_batch": batch},
            "memory": {"recompute": mode}, "precision": {"compute": "fp16"},
        }
    )  # fmt: skip
    scores = 5 * heads * sequence / width if mode == "none" else 0.0
    each = {True: (34 + scores) / tp, False: 10 + (24 + scores) / tp}[sp] if mode != "full" else 2 / (tp if sp else 1)
    assert block_bytes(job, programs.MEGATRON, mode)[0] == pytest.approx(sequence * batch * width * each, rel=0.01)


def test_gpipe_s_memory_grows_with_its_micro_batches() -> None:
    """It is fullest after the first backward: one micro-batch less, but gradients of all that it holds."""

    def kept(batch: int) -> float:
        job = llama(batch={**BATCH, "global_batch": batch}, layout={"pp": 8, "schedule": "gpipe"})
        return predict(job, nodes(1)).memory[0].terms["activations"]

    assert kept(256) / 255 == pytest.approx(kept(32) / 31) == pytest.approx(kept(8) / 7)


def test_zero_1_and_2_send_the_same_messages() -> None:
    """Of one micro-batch a step, over 16,384 GPUs: the same bytes in as many collectives."""
    batch = {**BATCH, "global_batch": 16384}
    one, two = (
        predict(llama("llama-3-8b", batch=batch, layout={"dp_shard": 16384, "zero": zero}), nodes(2048)).step_s
        for zero in (1, 2)
    )
    assert one == pytest.approx(two, rel=0.05)


def test_rings_start_and_leave_each_node_once() -> None:
    wires = Wires(8, 300e9, 4e-6, 25e9, 14e-6, 8e-6)
    small = 1.0
    assert all_gather_s(wires, group_of(8, 1, 8), small) == pytest.approx(8e-6 + 7 * 4e-6, rel=1e-3)
    assert all_gather_s(wires, group_of(32, 1, 8), small) == pytest.approx(8e-6 + 28 * 4e-6 + 3 * 14e-6, rel=1e-3)
    assert all_gather_s(wires, group_of(4, 8, 8), small) == pytest.approx(8e-6 + 3 * 14e-6, rel=1e-3)
    assert broadcast_s(wires, group_of(8, 1, 8), 3e9) == pytest.approx(36e-6 + 3e9 / 300e9)
    assert all_to_all_s(wires, group_of(8, 1, 8), 8e9) == pytest.approx(36e-6 + 7e9 / 300e9)


def test_each_method_of_context_parallelism_has_its_price() -> None:
    """A ring hides its transfers behind long attention, an all-gather never; none of them is free."""

    def added(method: str, cp: int) -> float:
        batch = {"sequence_length": 65536, "global_batch": 8, "micro_batch": 1}
        layout: dict[str, Any] = {"cp": cp, "cp_method": method, "dp_shard": 8 // cp}
        job = llama(model={"max_sequence_length": 65536}, batch=batch, layout=layout)
        return predict(job, nodes(1)).phases["tensor and context transfers"]

    assert added("ring", 1) == 0.0
    assert 0 < added("ring", 8) < added("allgather", 8)
    assert added("ulysses", 8) != added("allgather", 8)
    assert added("ring", 8) > 1.5 * added("ring", 2)


def test_transfers_in_pieces_leave_the_first() -> None:
    batch = {**BATCH, "micro_batch": 4}
    job = llama("llama-3-70b", batch=batch, layout={"tp": 8, "sp": True})
    whole, pieces = (
        predict(job, nodes(1), program).phases["tensor and context transfers"]
        for program in (programs.FSDP_COMPILED, programs.replace(programs.FSDP_COMPILED, tensor_overlap=True))
    )
    assert whole / 8 < pieces < whole / 3


def test_asynchronous_tensor_parallelism_is_modelled_and_said_to_be_a_guess() -> None:
    def planned(gpus: int, model: str = "llama-3-70b", **layout: Any) -> Prediction:
        whole = {"tp": gpus, "kv_replicate": True} | layout
        job = llama(model, batch={**BATCH, "global_batch": 4, "micro_batch": 4}, layout=whole, run={"compile": True})
        return predict(job, nodes(gpus // 8))

    name = "tensor and context transfers"
    whole, pieces = planned(8), planned(8, async_tp=True)
    assert whole.phases[name] / 8 < pieces.phases[name] < whole.phases[name] / 3
    assert {one: whole.phases[one] for one in whole.phases if one != name} == pytest.approx(
        {one: pieces.phases[one] for one in pieces.phases if one != name}, rel=0.05
    )
    [guess] = [line for line in pieces.guessed if "async_tp" in line]
    assert "not measured between GPUs" in guess and "all but the first of 8 pieces" in guess
    assert not any("async_tp" in line for line in whole.guessed)
    assert [line.partition(":")[0] for line in pieces.not_modelled] == ["layout.async_tp = true"]
    apart = [planned(16, async_tp=asked) for asked in (False, True)]  # of two nodes
    assert apart[0].phases == apart[1].phases
    assert any("hides nothing between nodes" in line for line in apart[1].guessed)


@pytest.mark.parametrize(("gpu", "compute"), [("a100-80gb", "fp8"), ("v100-sxm-32gb", "bf16"), ("mi250x", "fp8")])
def test_a_format_the_card_has_not_is_refused(gpu: str, compute: str) -> None:
    job = llama(batch={**BATCH, "global_batch": 1}, precision={"compute": compute})
    with pytest.raises(UserError, match=rf"precision\.compute = {compute} is not a format of {gpu}, which has fp32"):
        predict(job, Cluster(gpu=gpu))


def test_a_search_on_older_cards_takes_the_format_they_have() -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "gpt2", "--cluster", "8xv100-sxm-32gb", "--json"])
    assert json.loads(done.stdout)["layouts"][0]["precision"]["compute"] == "fp16"


def test_what_is_not_modelled_is_said() -> None:
    silent = predict(llama(batch=BATCH, layout={"dp_shard": 8}), nodes(1))
    assert silent.not_modelled == ()
    layout = {"dp_shard": 4, "dp_replicate": 2, "zero": 3, "prefetch": 3}
    told = predict(llama(batch=BATCH, layout=layout, data={"mask_documents": True}), nodes(1)).not_modelled
    assert [line.partition(" =")[0] for line in told] == ["layout.prefetch", "data.mask_documents"]
    asked = ["plan", "--check", "pretrain-1b", "--cluster", "1xh200", "--set", "data.mask_documents=true"]
    assert "not modelled: data.mask_documents = true" in CliRunner().invoke(app, asked).stdout
    assert '"not_modelled": [\n    "data.mask_documents' in CliRunner().invoke(app, [*asked, "--json"]).stdout


def test_what_training_refuses_is_said() -> None:
    asked = [
        "plan",
        "--check",
        "pretrain-1b",
        "--cluster",
        "4xh200",
        "--set",
        "layout.pp=4",
        "--set",
        "run.compile=true",
    ]
    asked += ["--set", "batch.global_batch=8", "--set", "batch.micro_batch=1", "--set"]
    for schedule in ("zb-h1", "1f1b"):
        field = f"layout.schedule={schedule}"
        refused = json.loads(CliRunner().invoke(app, [*asked, field, "--json"]).stdout)["refused"]
        shown = CliRunner().invoke(app, [*asked, field]).stdout
        assert (f"train refuses this job: {refused}" in shown) == (schedule == "zb-h1") == bool(refused)


def test_an_mfu_says_which_pairs_it_counts() -> None:
    batch = {"sequence_length": 131072, "global_batch": 8, "micro_batch": 1}
    job = llama(model={"max_sequence_length": 131072}, batch=batch, layout={"dp_shard": 8})
    prediction = predict(job, nodes(1))
    assert prediction.mfu is not None and prediction.mfu_causal is not None
    assert 0.5 < prediction.mfu_causal / prediction.mfu < 0.7
    shown = CliRunner().invoke(app, ["plan", "--check", "pretrain-1b", "--cluster", "1xh200"]).stdout
    assert "attention over every pair;" in shown and "over causal ones" in shown


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_a_token_more_or_less_costs_a_token(gpu: str) -> None:
    def each(sequence: int) -> float:
        job = load_job("pretrain-1b", [f"batch.sequence_length={sequence}"]).job
        return predict(job, Cluster(gpu=gpu)).step_s / sequence

    assert each(4095) == pytest.approx(each(4096), rel=0.02) == pytest.approx(each(4097), rel=0.02)


def test_two_cards_do_not_differ_by_their_hosts() -> None:
    """A step that its host bounds takes as long on a card with a profile as on one without."""
    tiny = ['model.preset="gpt2"', "batch.sequence_length=256", "batch.micro_batch=1", "batch.global_batch=1"]
    job = load_job("pretrain-1b", [*tiny, "run.compile=false"]).job
    times = [predict(job, Cluster(gpu=gpu)).step_s for gpu in ("h100", "h200")]
    assert times[0] == pytest.approx(times[1], rel=0.05)


def test_every_card_of_a_node_has_a_network() -> None:
    guess = machine_of(parse_cluster("2x4xgb300")).guessed
    assert any("one 800 Gb/s card a GPU" in line for line in guess)
