"""Profiles from other machines: used where they are given, named in the answer, refused where they do not apply."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import UserError
from meshwright.hardware import (
    Profile,
    find_profile,
    profile_of,
    profiles_from,
    read_profile,
    write_profile,
)
from meshwright.plan import machine_of, parse_cluster


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWRIGHT_PROFILES", str(tmp_path / "own"))
    return tmp_path / "own"


def profile(gpu: str, **fields: Any) -> Profile:
    products = [
        {"dtype": "bf16", "kind": kind, "rows": 4096, "columns": 4096, "inner": 4096, "seconds": 1e-3}
        for kind in ("forward", "input", "weight")
    ]
    given = {
        "format": 2, "gpu": gpu, "device": "a GPU", "date": "2026-02-03", "torch": "2.12", "driver": "580.1",
        "host_cpu": "a CPU", "machine": "node7", "how": "by hand", "memory_gib": 80.0, "units": 132, "took_s": 1.0,
        "launch_s": 5e-6, "products": products, "copies": [{"moved_bytes": 1e9, "seconds": 1e-3}],
    }  # fmt: skip
    return Profile.model_validate(given | fields)


def check(*words: str) -> Any:
    return CliRunner().invoke(app, ["plan", "--check", "pretrain-1b", *words])


def test_a_given_profile_is_used_and_named(tmp_path: Path, own_folder: Path) -> None:
    write_profile(profile("h100", date="2025-01-01"), own_folder / "h100.json")
    write_profile(profile("h100"), tmp_path / "theirs.json")
    shown = check("--cluster", "1xh100", "--profile", str(tmp_path / "theirs.json"))
    assert shown.exit_code == 0, shown.output
    said = "profile: h100, measured on 2026-02-03 at node7 with torch 2.12, driver 580.1, host a CPU"
    assert f"{said} (from {tmp_path / 'theirs.json'})" in shown.output
    as_json = json.loads(check("--cluster", "1xh100", "--profile", str(tmp_path / "theirs.json"), "--json").stdout)
    assert as_json["profile"].startswith("h100, measured on 2026-02-03")
    assert "2025-01-01" in check("--cluster", "1xh100").output  # and afterwards this user's own again


def test_a_folder_of_profiles_holds_one_for_each_gpu(tmp_path: Path) -> None:
    for gpu in ("h100", "a100-80gb"):
        write_profile(profile(gpu), tmp_path / "site" / f"{gpu}.json")
    with profiles_from(tmp_path / "site"):
        for gpu in ("h100", "a100-80gb"):
            assert str(tmp_path / "site") in machine_of(parse_cluster(f"8x{gpu}")).profile
        assert "comes with Meshwright" in machine_of(parse_cluster("8xh200")).profile
    assert profile_of("h100") is None
    write_profile(profile("a100-80gb"), tmp_path / "site" / "h100.json")
    with profiles_from(tmp_path / "site"), pytest.raises(UserError, match=r"h100\.json is a profile of a100-80gb, but"):
        machine_of(parse_cluster("8xh100"))


def test_a_profile_of_another_gpu_is_refused(tmp_path: Path) -> None:
    write_profile(profile("h100"), tmp_path / "theirs.json")
    shown = check("--cluster", "1xa100-80gb", "--profile", str(tmp_path / "theirs.json"))
    assert isinstance(shown.exception, UserError)
    with profiles_from(tmp_path / "theirs.json"), pytest.raises(UserError) as refused:
        machine_of(parse_cluster("8xa100-80gb"))
    assert "theirs.json is a profile of h100, but the cluster has a100-80gb; give one" in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"format": 1},
            r"has the old format 1, which does not say how it was measured; write it again",
        ),
        ({"format": 3}, r"has format 3, and this version reads up to 2; use a newer Meshwright, or measure again"),
        ({"warmth": 7}, r"cannot be read by this version \(warmth: .*; measure again with meshwright calibrate"),
    ],
)
def test_other_formats_are_refused_in_a_sentence(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(profile("h100").model_dump(mode="json") | fields))
    with pytest.raises(UserError, match=said), profiles_from(path):
        pass


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[]", b""])
def test_what_is_no_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "theirs.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"), profiles_from(path):
        pass
    with (
        pytest.raises(UserError, match=r"--profile = .*nothing\.json does not exist"),
        profiles_from(tmp_path / "nothing.json"),
    ):
        pass


def test_profiles_from_before_still_work_in_the_own_folder(own_folder: Path) -> None:
    old = profile("h100").model_dump(mode="json", exclude_none=True)
    for name in ("format", "driver", "host_cpu", "machine", "how"):
        del old[name]
    own_folder.mkdir()
    (own_folder / "h100.json").write_text(json.dumps(old))
    found = find_profile("h100")
    assert found is not None and found.profile.format == 1
    assert found.words == f"measured on 2026-02-03 with torch 2.12 (from {own_folder / 'h100.json'})"
    assert "measured on 2026-02-03" in machine_of(parse_cluster("8xh100")).profile


def test_a_profile_is_written_with_all_it_holds(tmp_path: Path) -> None:
    rows = [
        {"kind": "all-reduce", "ranks": ranks, "nodes": nodes, "size_bytes": size, "seconds": 1e-3 * size / 2**20}
        for ranks, nodes in ((8, 1), (16, 2))
        for size in (2**20, 2**24)
    ]
    whole = profile("h100", collectives=rows, host_cores=16, meshwright="1.0")
    write_profile(whole, tmp_path / "h100.json")
    assert read_profile(tmp_path / "h100.json") == whole
    with profiles_from(tmp_path / "h100.json"):
        machine = machine_of(parse_cluster("2x8xh100"))
    assert not any("network" in guess for guess in machine.guessed)  # links between nodes came with it
    assert machine.wires.network_bytes_per_s == pytest.approx(2 * 15 / 16 * 2**20 / 1e-3, rel=0.01)


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ("h200", "h200, measured on 2026-11-15 with torch 2.11.0+cu130 (comes with Meshwright)"),
        ("h100", "h100, none; rates: derived from published rows"),
        ("a100-80gb", "a100-80gb, none; rates: derived from published rows"),
        ("b200", "b200, none; rates: derived from published rows"),
        ("mi300x", "mi300x, none; rates: derived from published rows"),
        ("rtx-3090", "rtx-3090, none; rates: data sheet, with the shares of other GPUs"),
        ("gh200", "gh200-480gb, none; rates: data sheet, with the H100's shares, derived from published rows"),
    ],
)
def test_the_answer_says_what_rates_are_from(gpu: str, said: str) -> None:
    assert machine_of(parse_cluster(f"1x{gpu}")).profile == said


@pytest.mark.thorough
def test_a_search_and_its_relatives_name_the_profile(tmp_path: Path) -> None:
    runner, at = CliRunner(), ["--cluster", "8xh200"]
    for words in (["--top", "1"], ["--days", "3000", "--tokens", "1e9"]):
        shown = runner.invoke(app, ["plan", "--model", "llama-3.2-1b", *at, *words])
        assert "profile: h200, measured on 2026-11-15" in shown.output, shown.output
    shown = runner.invoke(app, ["plan", "--check", "pretrain-1b", "--cluster", "1xh200", "--scale", "1"])
    assert "profile: h200, measured on 2026-11-15" in shown.output
    compared = runner.invoke(app, ["plan", "--model", "llama-3.2-1b", "--compare", "8xh100", "8xh200"])
    assert "profile: h100, none; rates: derived" in compared.output and "profile: h200, measured" in compared.output
