"""What a training draws from the socket: energy of the GPUs' boards, of the site where its overhead is known, and CO₂
where the site's electricity is known. None of the site's figures is guessed."""

from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.hardware import gpu_by_key
from meshwright.job.devices import Cluster


@dataclass(frozen=True)
class Energy:
    """The energy of some GPU-hours."""

    watts: float
    """Of one GPU under load."""
    measured: bool
    """Whether cluster.gpu_watts says so; otherwise it is the board's limit, and a run draws at most that."""
    gpu_kwh: float
    """Of the GPUs alone."""
    site_kwh: float | None
    """With cooling and all else of the site, if cluster.pue is known."""
    co2_kg: float | None
    """If cluster.co2_g_per_kwh is known; of the site's energy, or of the GPUs' alone if cluster.pue is not known."""

    @property
    def sentence(self) -> str:
        """In words, with what is not known."""
        limit = "" if self.measured else ", their limit"
        words = f"energy: {in_kwh(self.gpu_kwh)} at {self.watts:,.0f} W per GPU{limit}"
        if self.site_kwh is None:
            words += ", GPU boards only (cluster.pue is not given)"
        else:
            words += f", {in_kwh(self.site_kwh)} of the site"
        if self.co2_kg is None:
            return f"{words}; CO₂ needs cluster.co2_g_per_kwh"
        return f"{words}; {self.co2_kg / 1e3:,.3g} t of CO₂" + (" for the boards" if self.site_kwh is None else "")


def energy_of(gpu_hours: float, cluster: Cluster) -> Energy | None:
    """What so many GPU-hours on these machines take; None if the power of their GPU is not known."""
    watts = cluster.gpu_watts or _board_watts(cluster.gpu)
    if watts is None:
        return None
    kwh = gpu_hours * watts / 1e3
    whole = None if cluster.pue is None else kwh * cluster.pue
    grams = cluster.co2_g_per_kwh
    co2 = None if grams is None else (kwh if whole is None else whole) * grams / 1e3
    return Energy(watts, cluster.gpu_watts is not None, kwh, whole, co2)


def in_kwh(kwh: float) -> str:
    """An amount of energy in the unit that suits it."""
    return f"{kwh / 1e3:,.3g} MWh" if kwh >= 1e3 else f"{kwh:,.3g} kWh"


def _board_watts(gpu: str | None) -> float | None:
    try:
        return None if gpu is None else gpu_by_key(gpu).board_watts
    except UserError:  # known only from a profile, which does not measure power
        return None
