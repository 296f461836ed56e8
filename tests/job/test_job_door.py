"""What a job may never hold, wherever it comes from: control characters, passwords, numbers nothing can work with."""

import json
import re
import string
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.job import job_schema, load_job, model_of_config, read_hf_config
from meshwright.job.convert import read_toml_settings
from meshwright.job.sanitize import secret_in, without_secrets

LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
WEBS = (
    "https://me:hunter2@host/a.txt",
    "https://tok@host/a",
    "https://host/a?X-Amz-Signature=beef",
    "s3://k:hunter2@b/x",
)


def numbers(schema: Any) -> list[dict[str, Any]]:
    """Every number there is in a schema."""
    if isinstance(schema, list):
        return [found for part in schema for found in numbers(part)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") in ("integer", "number") and "enum" not in schema else []
    return own + [found for part in schema.values() for found in numbers(part)]


def test_every_number_of_a_job_has_an_upper_bound() -> None:
    found = numbers(job_schema())
    assert len(found) > 60
    assert [one for one in found if "maximum" not in one and "exclusiveMaximum" not in one] == []


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.lr=inf", "optimizer.lr = Infinity is not allowed; it should be a finite number"),
        ("model.norm_eps=nan", "model.norm_eps = NaN is not allowed; it should be a finite number"),
        ("data.weights=[inf]", "data.weights = Infinity is not allowed; it should be a finite number"),
        ("model.layers=9223372036854775807", "it should be less than or equal to 10000"),
        ("model.width=" + "9" * 3000, "model.width = 9999999"),
        ("model.width=" + "9" * 5000, "it should be a whole number"),
        ("model.width=0x" + "f" * 9000, "a number has too many digits"),
        ("model.width=" + "[" * 5000, "it should be a whole number"),
        ('run.folder="a\\nb"', 'run.folder = "a\\nb" is not allowed; it may not contain the control character U+000A'),
        ('evaluation.sets={"a\\u0007" = "x"}', "U+0007"),
        ('data.sources=["a\\u2028b"]', "U+2028"),
        ("run.folder=" + "x" * 5000, "at most 4096 bytes"),
        ("run.folder=a\udcffb", "is not valid Unicode"),
        ("data.sources.a=1", "data.sources"),
    ],
)
def test_values_nothing_can_work_with_are_refused(override: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        load_job("demo", [override])
    told = str(caught.value)
    assert sentence in told and "\n" not in told and len(told) < 400


def test_a_part_of_a_value_cannot_be_set() -> None:
    with pytest.raises(UserError, match="keep one of them"):
        load_job("demo", ["model.width=4", "model.width.x=4"])


def test_a_prompt_may_have_lines_and_the_kept_job_file_stays_one() -> None:
    prompt = 'evaluation.sample_prompt="""a\nsteps = 5\n"""'
    loaded = load_job("demo", [prompt])
    assert loaded.job.evaluation.sample_prompt == "a\nsteps = 5\n"
    assert loaded.merged is not None and tomllib.loads(loaded.merged)["evaluation"]["sample_prompt"] == "a\nsteps = 5\n"


@pytest.mark.parametrize("name", ["a\nb.toml", "a\x1bb.toml"])
def test_a_job_file_s_name_is_a_plain_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match="contains the control character U\\+00"):
        load_job(str(tmp_path / name))


@pytest.mark.parametrize("text", ["a = " + "[" * 50_000, "a = " + "9" * 5000, "#" * (5 << 20)])
def test_a_job_file_without_end_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(UserError, match=r"job\.toml(: not valid TOML: .*| is larger than 4 MiB)"):
        load_job(str(tmp_path / "job.toml"))


@pytest.mark.parametrize(
    "text",
    [
        "a." * 100_000 + "a = 1",
        "[" + ' \'a\' . "b\\"" .' * 10_000 + "a]",
        "x = {" + "a." * 16 + "a = 1}",
        "[a]\nb = 1\n" + "[[a.b]]\n" * 40_000,
    ],
)
def test_keys_that_take_the_square_of_their_length_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(UserError, match=r"more than 16 names with dots|more than 256 Ki characters"):
        load_job(str(tmp_path / "job.toml"))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('"model.width" = 64', "model.width"),
        ("'a.b' = 1", "a.b"),
        ('[model]\n"rope.theta" = 1.0', "rope.theta"),
        ('data = [{"x\\u002ey" = 1}]', "x.y"),
    ],
)
def test_a_quoted_key_with_a_dot_is_no_field_of_a_table(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(UserError, match=rf"job.toml: the quotes make one name of '{re.escape(key)}'"):
        load_job(str(tmp_path / "job.toml"))
    with pytest.raises(UserError, match=re.escape(repr(key))):
        read_toml_settings(tmp_path / "job.toml")


def test_sets_of_an_evaluation_may_have_a_dot_in_their_name(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[evaluation.sets]\n"wiki.v2" = "builtin:stdlib"\n')
    assert load_job(str(tmp_path / "job.toml")).job.evaluation.sets == {"wiki.v2": "builtin:stdlib"}


def test_dots_in_strings_and_comments_are_no_keys(tmp_path: Path) -> None:
    dots, three = "a." * 40, '"' * 3
    text = f'# {dots}\n[run]\nfolder = "{dots}b" # {dots}\n[evaluation]\nsample_prompt = {three}\n"{dots}\n{three}\n'
    (tmp_path / "job.toml").write_text(text)
    job = load_job(str(tmp_path / "job.toml")).job
    assert (job.run.folder, job.evaluation.sample_prompt) == (f"{dots}b", f'"{dots}\n')


@given(st.text(st.characters(categories=["Cc", "Cs", "Zl", "Zp", "L", "P"]), min_size=1, max_size=8))
def test_no_control_character_passes(text: str) -> None:
    try:
        folder = load_job("demo", [f"run.folder={json.dumps(text)}"]).job.run.folder
    except UserError:
        return
    assert folder is not None and all(unicodedata.category(one)[0] != "C" and one.isprintable() for one in folder)


@pytest.mark.parametrize("address", WEBS)
def test_a_password_does_not_get_into_a_job(address: str) -> None:
    for field in ('data.sources=["%s"]', 'checkpoint.backup_to="%s"', 'evaluation.sets={a="%s"}'):
        with pytest.raises(UserError, match="run files would show the") as caught:
            load_job("demo", [field % address])
        assert "hunter2" not in str(caught.value) and "beef" not in str(caught.value)


@pytest.mark.parametrize("plain", ["https://h/a.parquet?download=true", "s3://b/a?.txt", "sftp://me@h/x", "a@b:c", "x"])
def test_plain_addresses_stay(plain: str) -> None:
    assert without_secrets(plain) == plain
    assert load_job("demo", [f'data.sources=["{plain}"]']).job.data.sources == (plain,)


@given(st.lists(st.text(string.ascii_letters + string.digits + ":@/?&=#.[]% ", max_size=12), max_size=4))
def test_what_is_hidden_holds_no_secret_any_more(parts: list[str]) -> None:
    text = "https://".join(parts)
    assert secret_in(without_secrets(text)) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rope_theta": 0}, "rope_theta = 0: Input should be greater than 0"),
        ({"rope_theta": float("inf")}, "rope_theta = inf"),
        ({"rope_theta": 10**400}, "rope_theta = 1000000"),
        ({"rms_norm_eps": float("nan")}, "norm_eps = nan"),
        ({"hidden_size": int("9" * 4001)}, "width = 99999"),
        ({"num_hidden_layers": 2**63 - 1}, "layers = 9223372036854775807"),
        ({"num_key_value_heads": 0}, "kv_heads = 0"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false' where true or false is needed"),
        ({"rope_scaling": []}, "rope_scaling = \\[\\] where a table is needed"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"layer_types": [{}]}, "layer_types with {}"),
        ({"num_attention_heads": -4}, "num_attention_heads = -4 where a positive whole number"),
    ],
)
def test_a_config_says_what_it_says_or_is_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(UserError, match=sentence) as caught:
        model_of_config(read_hf_config(tmp_path))
    assert len(str(caught.value)) < 300
    assert model_of_config(LLAMA).rope_theta == 10000.0


def test_a_config_is_read_by_plan_too(cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 2**63 - 1}))
    refused = cli("plan", "--model", "config.json", "--cluster", "8xh100")
    assert refused.code == 2 and "config.json is not a valid model (layers = 92233" in refused.err
