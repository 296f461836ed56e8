"""`meshwright eval`, and evaluation sets during training: their metrics, and what does not fit together."""

import json
import math
from pathlib import Path

import pytest


@pytest.mark.thorough
def test_sets_are_judged_by_name(cli, tiny_job: Path) -> None:
    """One run of a few steps, judged by two sets on the way, serves every case."""
    Path("other").mkdir()
    Path("other/a.txt").write_text("another kind of text, with words the model has never seen. " * 40)
    two = 'evaluation.sets={code = "corpus", prose = "other/a.txt"}'
    done = cli("train", "job.toml", "--set", two, "--set", "run.steps=6")
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    sets = [row for row in rows if "set" in row]
    assert [(row["step"], row["set"]) for row in sets] == [(s, n) for s in (0, 5, 6) for n in ("code", "prose")]
    for row in sets:
        assert row["perplexity"] == pytest.approx(math.exp(row["set_loss"]))
    code, prose = sets[-2:]
    assert code["set_loss"] < sets[0]["set_loss"] and code["bits_per_byte"] < sets[0]["bits_per_byte"]
    assert code["set_loss"] < prose["set_loss"]

    judged = json.loads(
        cli("eval", "run", "--data", "code=corpus", "--data", "other/a.txt", "--batches", "2", "--json").out
    )
    assert judged["step"] == 6 and list(judged["sets"]) == ["code", "a.txt"]
    assert judged["sets"]["code"]["loss"] == pytest.approx(code["set_loss"], rel=1e-6)
    assert judged["sets"]["a.txt"]["bits_per_byte"] == pytest.approx(prose["bits_per_byte"], rel=1e-6)

    own = json.loads(cli("eval", "run", "--batches", "2", "--json").out)["sets"]["held-out"]
    assert own["loss"] == pytest.approx([row["val_loss"] for row in rows if "val_loss" in row][-1], rel=1e-6)
    assert "bits per byte" in cli("eval", "run", "--data", "corpus").out
    _bits_per_byte_count_the_bytes_of_the_text(cli)
    _a_prepared_set_needs_the_runs_tokenizer(cli)
    _bad_input_is_refused(cli)


def _bits_per_byte_count_the_bytes_of_the_text(cli) -> None:
    from meshwright.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path("run/tokenizer.json"))
    text = "def naïve(ünder):\n    return '→ 日本語'\n"
    assert tokenizer.byte_lengths()[tokenizer.encode(text)].sum() == len(text.encode())
    assert tokenizer.byte_lengths()[tokenizer.end_of_text] == 0
    found = json.loads(cli("eval", "run", "--data", "other/a.txt", "--json").out)["sets"]["a.txt"]
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / found["bytes"])
    size = Path("other/a.txt").stat().st_size
    assert size - 32 * 20 < found["bytes"] <= size, "all windows but the rest of the last"


def _a_prepared_set_needs_the_runs_tokenizer(cli) -> None:
    prepare = ["data", "prepare", "other", "--validation-fraction", "0", "--workers", "1"]
    assert cli(*prepare, "--out", "same", "--tokenizer", "run/tokenizer.json").code == 0
    assert cli(*prepare, "--out", "different", "--vocab-size", "300").code == 0
    scores = json.loads(cli("eval", "run", "--data", "same", "--data", "other", "--json").out)["sets"]
    assert scores["same"] == scores["other"]
    refused = cli("eval", "run", "--data", "different")
    assert refused.code == 2 and "--data = different was prepared with another tokenizer than the model" in refused.err


def _bad_input_is_refused(cli) -> None:
    Path("short.txt").write_text("short")
    for arguments, sentence in [
        (["nowhere"], "nowhere"),
        (["run", "--data", "none.txt"], "none.txt does not exist"),
        (["run", "--data", "https://me:pw@host/a.txt"], "--data = 'https://host/a.txt': Run files would show the user"),
        (["run", "--data", "a=corpus", "--data", "a=other"], 'two texts the name "a"'),
        (["run", "--data", "short.txt"], "--data = short.txt holds"),
    ]:
        done = cli("eval", *arguments)
        assert "--data" not in arguments or done.err.startswith("meshwright: --data"), done
        assert done.code == 2 and sentence in done.err and "Traceback" not in done.err, done


def test_a_set_that_cannot_be_read_is_refused_before_anything_is_written(cli, tiny_job: Path) -> None:
    done = cli("train", "job.toml", "--set", 'evaluation.sets={wiki = "nowhere"}')
    assert done.code == 2 and done.err.startswith("meshwright: evaluation.sets.wiki: ") and not Path("run").exists()
