"""Numbers of tokens as people write them: one reading in job files, overrides and options."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.amounts import NoAmount, amount, length, tokens
from meshwright.errors import UserError
from meshwright.job import load_job


@pytest.mark.parametrize(
    ("written", "count"),
    [
        ("15T", 15 * 10**12),
        ("2e12", 2 * 10**12),
        ("1.4M", 1_400_000),
        ("300B", 300 * 10**9),
        ("300 G", 300 * 10**9),
        ("16k", 16_000),
        ("1_000_000", 10**6),
        ("0.3T", 3 * 10**11),  # exactly, which floats do not give
        ("1.1e3", 1100),
        (" 7 ", 7),
        (2e12, 2 * 10**12),
        (4096, 4096),
        ("2E+3", 2000),
    ],
)
def test_an_amount_is_read(written: object, count: int) -> None:
    assert tokens(written) == count and amount(written) == count


@pytest.mark.parametrize(
    "written", ["", "T", "1.5", "15TB", "1,4M", "-3", "1e-3", "0x10", "inf", "nan", "1e999", "9" * 50, True, None, 0.5]
)
def test_anything_else_is_not(written: object) -> None:
    with pytest.raises(NoAmount, match="write a whole number as 15T, 2e12 or 1400000"):
        tokens(written)


def test_a_length_is_written_out() -> None:
    assert length("8192") == length(8192.0) == length("8.192e3") == 8192
    with pytest.raises(NoAmount, match="write out a length: k may be 1,000 or a power of two"):
        length("8k")


STAGED = """
[model]
preset = "tiny-llama"
[data]
sources = ["a", "b"]
weights = [1, 2]
stages = [{tokens = "1.5T", weights = [1, 1]}, {tokens = 2e12, weights = [2, 1]}]
[batch]
sequence_length = 6.4e1
[evaluation]
sample_tokens = "2k"
"""


def test_fields_and_overrides_take_them(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(STAGED)
    job = load_job(str(path)).job
    assert [stage.tokens for stage in job.data.stages] == [15 * 10**11, 2 * 10**12]
    assert (job.batch.sequence_length, job.evaluation.sample_tokens) == (64, 2000)
    over = ["evaluation.sample_tokens=1.2k", "model.max_sequence_length=1e2", "batch.sequence_length=100"]
    job = load_job(str(path), [*over, "data.stages=[{tokens='3B', weights=[1,1]}]"]).job
    assert job.data.stages[0].tokens == 3 * 10**9 and type(job.data.stages[0].tokens) is int
    assert (job.evaluation.sample_tokens, job.model.max_sequence_length) == (1200, 100)
    path.write_text('[model]\nmax_sequence_length = "1e2"\n')
    assert load_job(str(path)).job.batch.sequence_length == 100, "a short model has short sequences"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("batch.sequence_length=8k", 'batch.sequence_length = "8k" is not allowed; write out a length: k may be 1,000'),
        ("batch.sequence_length=many", '"many" is not allowed; write a whole number as 15T, 2e12 or 1400000'),
        ("batch.sequence_length=0", "batch.sequence_length = 0 is not allowed; it should be greater than 0"),
        ("batch.sequence_length=true", "batch.sequence_length = true is not allowed; it should be a whole number"),
        ("evaluation.sample_tokens=0.5", "evaluation.sample_tokens = 0.5 is not allowed; write a whole number as 15T"),
        ("evaluation.sample_tokens=1T", "it should be less than or equal to 1000000"),
    ],
)
def test_mistakes_name_the_field(override: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        load_job("demo", [override])
    assert sentence in str(caught.value)


def test_options_take_them(cli: Any) -> None:
    plan = ["plan", "--model", "llama-3.2-1b", "--cluster", "2xh100", "--top", "1", "--json", "--seq", "2048"]
    written = cli(*plan, "--batch-tokens", "0.131072M", "--tokens", "1.5T")
    plain = cli(*plan, "--batch-tokens", "131072", "--tokens", "1500000000000")
    assert written.code == plain.code == 0, written.err
    assert json.loads(written.out)["layouts"] == json.loads(plain.out)["layouts"]
    assert json.loads(written.out)["layouts"][0]["training"]["tokens"] == 1.5e12
    for words, sentence in (
        (["--seq", "8k"], "--seq = 8k is not a number of tokens; write out a length: k may be 1,000 or a power of two"),
        (["--tokens", "15TB"], "--tokens = 15TB is not a number of tokens; write a whole number as 15T, 2e12 or"),
        (["--batch-tokens", "0"], "--batch-tokens = 0 must be greater than 0"),
    ):
        refused = cli(*plan, *words)
        assert refused.code == 2 and refused.err.startswith(f"meshwright: {sentence}"), refused.err
    refused = cli("generate", "nowhere", "--tokens", "few")
    assert refused.code == 2 and "--tokens = few is not a number of tokens" in refused.err
