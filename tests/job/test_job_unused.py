"""Fields without an effect are warned of, and a real training reads every other field."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.job import load_job
from meshwright.job.load import field_names
from meshwright.job.section import Section
from meshwright.job.unused import READERS, UnusedFieldWarning

SMALL = ["model.vocab_size=300", "model.width=32", "model.layers=2", "batch.sequence_length=32", "run.steps=3"]
SMALL += ["data.sources=['text.txt']", "data.cache='cache'", "data.workers=0", "run.folder='run'"]
SMALL += ["evaluation.every_steps=2", "evaluation.sample_tokens=4", "checkpoint.every_steps=2"]

READ_ELSEWHERE = {
    **dict.fromkeys(["model.preset", "model.init_from"], "where the job is loaded"),
    **dict.fromkeys(["layout.zero", "schedule.warmup_steps"], "by a property of the job"),
    **dict.fromkeys(["run.max_restarts"], "by what starts the ranks"),
    "run.on_bad_step": "when a step is bad",
    "data.stages": "with data.weights, without which it is refused",
    **dict.fromkeys(["cluster.name", "cluster.nodes", "cluster.gpus_per_node", "cluster.gpu"], "by plan and submit"),
    **dict.fromkeys(["cluster.links", "cluster.host_memory_gib", "cluster.storage_gb_s", "cluster.price"], "by plan"),
    **dict.fromkeys(["cluster.gpu_watts", "cluster.pue", "cluster.co2_g_per_kwh"], "by plan"),
}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["optimizer.momentum=0.5"], "optimizer.momentum = 0.5"),
        (["optimizer.adamw_lr=0.5"], "optimizer.adamw_lr = 0.5"),
        (["precision.fp8_scales=row"], "precision.fp8_scales = row"),
        (["precision.fp8_head=true"], "precision.fp8_head = True"),
        (["precision.compute=fp8", "precision.fp8_gather=true"], "precision.fp8_gather = True"),
        (["layout.bucket_mb=3"], "layout.bucket_mb = 3.0"),
        (["schedule.decay_steps=3"], "schedule.decay_steps = 3"),
        (["optimizer.name='lion'", "optimizer.eps=1e-3"], "optimizer.eps = 0.001"),
        (["layout.cp_method='ulysses'"], "layout.cp_method = ulysses"),
    ],
)
def test_a_field_without_effect_is_named(overrides: list[str], named: str) -> None:
    with pytest.warns(UnusedFieldWarning) as caught:
        load_job("demo", overrides)
    assert [str(warning.message).split(" has no effect")[0] for warning in caught] == [named]


def test_a_field_that_acts_is_not_named(recwarn: pytest.WarningsRecorder) -> None:
    load_job(
        "demo", ["optimizer.name='sgd'", "optimizer.momentum=0.5", "schedule.name='wsd'", "schedule.decay_steps=3"]
    )
    load_job("demo", ["optimizer.momentum=0.95", "layout.sp=true"])  # what they are anyway
    assert not [warning for warning in recwarn if issubclass(warning.category, UnusedFieldWarning)]


@pytest.mark.filterwarnings("default")
def test_the_command_says_it_in_one_line(cli) -> None:
    done = cli("job", "explain", "demo", "--set", "optimizer.momentum=0.5")
    assert done.code == 0
    assert done.err == (
        "meshwright: warning: optimizer.momentum = 0.5 has no effect: it is read only with "
        'optimizer.name = "sgd" or "muon"\n'
    )


def test_a_training_reads_every_other_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.launch.worker import run_job

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words to learn from\n\n" * 3000)
    loaded, read, plain = load_job("demo", SMALL), set[str](), Section.__getattribute__

    def recorded(self: Section, name: str) -> object:
        if name in type(self).model_fields and "/meshwright/job/" not in sys._getframe(1).f_code.co_filename:
            read.add(f"{type(self).__name__.lower()}.{name}")
        return plain(self, name)

    monkeypatch.setattr(Section, "__getattribute__", recorded)
    run_job(loaded, Console(quiet=True))
    monkeypatch.undo()
    without = {field for field in field_names() if field not in read}
    unread = {field for field, (_, reads) in READERS.items() if not reads(loaded.job)}
    assert without - unread == set(READ_ELSEWHERE)
