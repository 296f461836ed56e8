"""What would fit where no layout of a job does: the host's memory, more GPUs, or adapters instead of all weights."""

from collections.abc import Iterator

from pydantic import ValidationError

from meshwright.errors import UserError
from meshwright.job import Adapter, Job
from meshwright.job.devices import Cluster
from meshwright.plan.explain import batch_sequences
from meshwright.plan.search import Candidate, anything_fits, search

GIB = 2**30
_MULTIPLES = (2, 4, 8, 16, 32, 64)
"""How many times the GPUs are tried."""


def what_would_fit(job: Job, cluster: Cluster) -> str | None:
    """The smallest change that makes a job fit as it is: the host's memory, or a multiple of the GPUs."""
    return _with_offload(job, cluster) or _with_more_gpus(job, cluster)


def remedies(job: Job, cluster: Cluster, *, usual_batch: bool) -> str:
    """All changes with which something fits, as the end of a sentence that begins with "give".

    With `usual_batch` nobody gave a batch, and adapters have their own.
    """
    changes = [change for change in (_with_offload(job, cluster), _with_more_gpus(job, cluster)) if change]
    adapters = list(_with_adapters(job, cluster, usual_batch=usual_batch))
    if adapters:
        trained = "" if job.model.adapter is not None else "train adapters of its weights with "
        changes.append(trained + ", or ".join(adapters))
    return "; or ".join(changes or ["more or larger GPUs"])


def _with_offload(job: Job, cluster: Cluster) -> str | None:
    if anything_fits(job, cluster, frozenset({"offload"})):
        return "--allow offload, which keeps optimizer states in the host's memory"
    return None


def _with_more_gpus(job: Job, cluster: Cluster) -> str | None:
    """The smallest multiple of the GPUs with which some layout fits; the batch grows to a sequence for each."""
    for times in _MULTIPLES:
        within_node = min(8, cluster.gpus_per_node * times)
        nodes = cluster.nodes * cluster.gpus_per_node * times // within_node
        larger = cluster.model_copy(update={"nodes": nodes, "gpus_per_node": within_node})
        sequences = max(job.batch.global_batch, within_node * nodes)
        batch = job.batch.model_copy(update={"global_batch": sequences})
        if anything_fits(job.model_copy(update={"batch": batch}), larger, frozenset()):
            return f"--cluster {nodes}x{within_node}x{cluster.gpu}, {times} times the GPUs"
    return None


def _with_adapters(job: Job, cluster: Cluster, *, usual_batch: bool) -> Iterator[str]:
    """LoRA and QLoRA where the model takes them and they fit, each with what its fastest layout takes."""
    before = job.model.adapter
    for name, base in (("LoRA", "compute"), ("QLoRA", "nf4")):
        if before is not None and (before.base != "compute" or base == "compute"):
            continue  # which is what does not fit
        fields = [f"model.adapter.rank={Adapter().rank}"] if before is None else []
        fields += [f"model.adapter.base={base}"] if base != "compute" else []
        if (best := _fastest_with(job, cluster, base, usual_batch=usual_batch)) is not None:
            gib, rate = best.prediction.fullest.device / GIB, best.prediction.tokens_per_s_per_gpu
            words = " ".join(f"--set {field}" for field in fields)
            yield f"{words} ({name}: {gib:.1f} GiB and {rate:,.0f} tokens/s per {best.prediction.per})"


def _fastest_with(job: Job, cluster: Cluster, base: str, *, usual_batch: bool) -> Candidate | None:
    """The fastest layout of a job that trains adapters next to a base of this format; None if there is none."""
    table = job.model_dump(exclude_unset=True, exclude={"layout"})  # which the search chooses
    table["model"]["adapter"] = (table["model"].get("adapter") or {}) | {"base": base}
    try:
        adapted = Job.model_validate(table)
        gpus, sequence = cluster.nodes * cluster.gpus_per_node, job.batch.sequence_length
        tokens = None if usual_batch else job.tokens_per_step
        sequences, _ = batch_sequences(adapted.model, sequence, gpus, tokens)
        batch = adapted.batch.model_copy(update={"global_batch": sequences})
        found = search(adapted.model_copy(update={"batch": batch}), cluster, top=1)
    except (ValidationError, UserError):  # experts, other formats, a model's own file: no adapters of this kind
        return None
    return found.best[0] if found.best else None
