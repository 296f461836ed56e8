"""Slurm sites: every fact has a source, profiles of one's own extend them, the planner knows them."""

from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.hardware import find_site, gpu_by_key, known_sites, unsourced
from meshwright.plan import machine_of, parse_cluster

MEMORY_GIB = {"lumi": 64, "leonardo": 64, "marenostrum5": 64, "meluxina": 40, "vega": 40, "discoverer-plus": 141}
MEMORY_GIB |= {"karolina": 40, "deucalion": 40, "jupiter": 96, "berzelius": 40}


def test_the_named_sites_are_known_with_the_source_of_every_fact() -> None:
    assert set(MEMORY_GIB) == set(known_sites())
    for name, site in known_sites().items():
        assert unsourced(site) == [] and site.partition is not None and site.gpu is not None
        assert gpu_by_key(site.gpu).memory_gib == MEMORY_GIB[name]
    assert unsourced(find_site("lumi").model_copy(update={"sources": {}})), "a fact without one is noticed"


def test_a_profile_of_ones_own_says_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "leonardo"\naccount = "EUHPC_1"\ntime = "24:00:00"\nmodules = ["python/3.11"]\n')
    mine = find_site(str(path))
    assert (mine.name, mine.account, mine.partition) == ("mine", "EUHPC_1", "boost_usr_prod")
    assert machine_of(parse_cluster(f"2x{path}")).gpus == 8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gpus_per_node = [", "is not valid TOML"),
        ('extends = "leonard"', "extends = 'leonard' is not a known site"),
        ('extends = "vega"\ncolour = "red"', "colour is not allowed or missing"),
        ('title = "x"', "gpus_per_node is not allowed or missing"),
        ('gpu = "a101"\ngpus_per_node = 1', "the GPU 'a101' is not in the hardware table"),
    ],
)
def test_a_profile_with_a_mistake_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=sentence):
        find_site(str(path))


def test_the_planner_takes_sites_for_clusters() -> None:
    machine = machine_of(parse_cluster("16xleonardo"))
    assert machine.gpus == 64 and machine.gpu.key == "a100-64gb"
    assert not any("network" in guess for guess in machine.guessed), "the site's own is known"
    assert parse_cluster("lumi").gpus_per_node == 8
    with pytest.raises(UserError, match="has 60 nodes"):
        parse_cluster("61xvega")
    with pytest.raises(UserError, match="neither a known site nor a profile file"):
        parse_cluster("nowhere.toml")
