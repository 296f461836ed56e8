"""Things of a user's own, registered for one test; and installed as a package would be.

Tests import both: a second conftest.py before that of other rooms would take the place of the first.
"""

from collections.abc import Iterator
from pathlib import Path

import own_things
import pytest

from meshwright import registries

REGISTRIES = (registries.OPTIMIZERS, registries.SCHEDULES, registries.LOSSES, registries.SOURCES, registries.SINKS)


@pytest.fixture(name="own")
def registered() -> Iterator[None]:
    """Everything of `own_things`, known by name while the test runs."""
    for name in ("Nesterov", "Normalised", "Whole", "Undeclared"):
        registries.register_optimizer(name.lower())(getattr(own_things, name))
    registries.register_schedule("inverse-root")(own_things.inverse_root)
    registries.register_loss("z-loss")(own_things.z_loss)
    registries.register_source("counted")(own_things.counted)
    registries.register_sink("lines")(own_things.Lines)
    yield
    for registry in REGISTRIES:
        registry._registered.clear()


@pytest.fixture(name="installed")
def package(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH in which the things are installed, with entry points."""
    site = tmp_path / "site"
    about = site / "own_things-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "own_things.py").write_text(Path(own_things.__file__).read_text())
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-things\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[meshwright.optimizers]\nnesterov = own_things:Nesterov\nbroken = own_things:Missing\n\n"
        "[meshwright.schedules]\ninverse-root = own_things:inverse_root\n\n"
        "[meshwright.losses]\nz-loss = own_things:z_loss\n\n"
        "[meshwright.sources]\ncounted = own_things:counted\n\n"
        "[meshwright.sinks]\nlines = own_things:Lines\n"
    )
    return site
