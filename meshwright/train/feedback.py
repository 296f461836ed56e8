"""Gradient compression's state in a checkpoint: each replica's error feedback, and powersgd's directions."""

from collections.abc import Mapping

from meshwright.checkpoint import Checkpoint, Part
from meshwright.parallel import Reduction, ShardIndex, Weights
from meshwright.train.recorder import Recorder


def saved_feedback(reduction: Reduction, shards: Mapping[str, ShardIndex]) -> list[Part]:
    """This rank's share: its replica's error feedback, and the directions, which are equal on all replicas."""
    parts = []
    for name, memory in reduction.memories.items():
        shard = shards[name]
        box = shard.box()
        rows = box[0].stop - box[0].start
        first_in_replica = shard.holder % (shard.copies // reduction.replicas) == 0
        if first_in_replica and rows:
            starts = tuple(span.start for span in box)
            parts.append(Part(_memory_name(reduction.replica, name), shard.shape, starts, memory[:rows]))
        if shard.holder == 0 and name in reduction.starts:
            start = reduction.starts[name]
            parts.append(Part(_start_name(name, shard), tuple(start.shape), (0,) * start.dim(), start))
    return parts


def restore_feedback(weights: Weights, recorder: Recorder, checkpoint: Checkpoint) -> None:
    """Restore each replica's own error feedback; with a different number of replicas, an equal share of the sum.

    Directions belong to a shard's own rows and columns: if those changed, powersgd's search restarts.
    """
    step, before = checkpoint.facts.step, checkpoint.facts.replicas
    saved = any(not name.startswith("feedback/start/") for name in checkpoint.names("feedback/"))
    reduction, shards = weights.reduction, weights.shards()
    if reduction is None:
        if saved:
            recorder.event("feedback_dropped", step=step, reason="gradients are no longer compressed")
        return
    anew = 0
    for name in reduction.memories:
        _restore_memory(reduction, name, shards[name], checkpoint, before)
        anew += name in reduction.starts and not _restore_start(reduction, name, shards[name], checkpoint)
    if before != reduction.replicas or anew:
        report = "its sum is redistributed" if saved else "there was none"
        replicas = [before, reduction.replicas]
        recorder.event("feedback_changed", step=step, memory=report, replicas=replicas, searches_begun_anew=anew)


def _restore_memory(reduction: Reduction, name: str, shard: ShardIndex, checkpoint: Checkpoint, before: int) -> None:
    same = reduction.replicas == before
    sources = [_memory_name(replica, name) for replica in ([reduction.replica] if same else range(before))]
    for source in sources:
        if source in checkpoint.index.tensors:
            values = checkpoint.read(source, shard.box()).to(reduction.memories[name])
            reduction.memories[name][: len(values)].add_(values if same else values / reduction.replicas)


def _restore_start(reduction: Reduction, name: str, shard: ShardIndex, checkpoint: Checkpoint) -> bool:
    start, saved = reduction.starts[name], _start_name(name, shard)
    if saved not in checkpoint.index.tensors or checkpoint.shape(saved) != tuple(start.shape):
        return False
    start.copy_(checkpoint.whole(saved))
    return True


def _memory_name(replica: int, name: str) -> str:
    return f"feedback/{replica:05d}/{name}"


def _start_name(name: str, shard: ShardIndex) -> str:
    edges = ",".join(f"{span.start}:{span.stop}" for span in shard.box())
    return f"feedback/start/{name}@{edges}"
