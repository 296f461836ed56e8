"""A job's cluster section, completed with what is known about its site."""

from typing import Any

from meshwright.errors import UserError
from meshwright.hardware.sites import Site, find_site
from meshwright.job.devices import Cluster


def completed(cluster: Cluster, ranks: int | None = None, field: str = "cluster.name") -> Cluster:
    """The section with its site's GPU, links, host memory and power, and as many machines as the ranks fill.

    Given values stay, and `model_fields_set` still names only those: a job file is written with no more. Where
    a site does not fit, `field` is what named it.
    """
    known: dict[str, Any] = {}
    if cluster.name is not None:
        site = find_site(cluster.name, field)
        known = _of_site(site)
        known["links"] = {**(known["links"] or {}), **(cluster.links or {})} or None
        if (cluster.gpu or site.gpu) is None:
            raise UserError(f"{field} = {cluster.name} has no GPU, and a plan needs one; name another site")
        if site.nodes is not None and cluster.nodes > site.nodes:
            raise UserError(
                f"{field} = {cluster.name} with {cluster.nodes} nodes is not possible; {site.title} has {site.nodes} "
                "nodes; ask for fewer"
            )
    said = cluster.model_fields_set
    values = {name: getattr(cluster, name) for name in type(cluster).model_fields}
    values |= {name: value for name, value in known.items() if name not in said or name == "links"}
    if ranks is not None and "nodes" not in said and ("gpus_per_node" in said or known):
        size = values["gpus_per_node"]
        values |= {"nodes": max(1, ranks // size), "gpus_per_node": min(ranks, size)}
    return Cluster.model_construct(said, **values)


def _of_site(site: Site) -> dict[str, Any]:
    links = None if site.network_gb_s is None else {"network": site.network_gb_s}
    same = ("gpu", "gpus_per_node", "host_memory_gib", "gpu_watts", "pue", "co2_g_per_kwh")
    return {"links": links, **{name: getattr(site, name) for name in same}}
