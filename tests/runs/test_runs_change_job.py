"""A resume with other settings changes the run folder's job file, so that it still gives the run."""

from pathlib import Path

from meshwright.job import load_job
from meshwright.runs import RunFolder
from meshwright.runs.change_job import change_job

OURS = '# mine\n[model]\npreset = "tiny-llama"\n\n[batch]\nsequence_length = 64\n\n[run]\nsteps = 5\nfolder = "run"\n'


def run(tmp_path: Path, job_file: str, *overrides: str) -> RunFolder:
    (tmp_path / "mine.toml").write_text(OURS)
    job = load_job(str(tmp_path / "mine.toml"), overrides).job
    return RunFolder.create(tmp_path / "run", job_file, job.model_dump(mode="json"), [])


def test_a_change_is_a_value_of_the_job_file_and_the_first_file_is_kept(tmp_path: Path) -> None:
    folder = run(tmp_path, OURS)
    changed = change_job(folder, load_job(str(folder.path), ["run.steps=9"]).job)
    assert changed == {"run.steps": [5, 9], "run.folder": ["run", str(folder.path)]}
    text = folder.job_file()
    assert "steps = 9" in text and 'folder = "run"' in text and "width" not in text
    assert (folder.path / "job.original.toml").read_text() == OURS

    change_job(folder, load_job(str(folder.path), ["run.steps=11"]).job)
    assert "steps = 11" in folder.job_file() and (folder.path / "job.original.toml").read_text() == OURS


def test_a_moved_run_keeps_its_job_file(tmp_path: Path) -> None:
    folder = run(tmp_path, OURS)
    assert set(change_job(folder, load_job(str(folder.path)).job)) == {"run.folder"}
    assert folder.job_file() == OURS and not (folder.path / "job.original.toml").exists()


def test_a_job_file_of_version_0_2_which_left_overrides_as_comments_becomes_the_run_s(tmp_path: Path) -> None:
    folder = run(tmp_path, OURS + "\n# --set run.seed=3\n", "run.seed=3")
    job = load_job(str(folder.path), ["run.steps=9"]).job
    change_job(folder, job)
    again = load_job(str(folder.path / "job.toml")).job
    assert again == job and again.run.seed == 3


def test_a_damaged_job_file_does_not_stop_a_run(tmp_path: Path) -> None:
    folder = run(tmp_path, "[run\n")
    change_job(folder, load_job(str(folder.path), ["run.steps=9"]).job)
    assert load_job(str(folder.path / "job.toml")).job.run.steps == 9
