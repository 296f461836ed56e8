"""Two chains of stages on torch's pipeline runtime, which supports one: how they are numbered, ordered and kept equal.

DualPipe's micro-batches enter at both ends, so every rank holds a stage of one copy of the model and a stage of the
other (arXiv:2412.19437). To torch they are one row of stages with a gap in it.
"""

from collections.abc import Mapping, Sequence

from meshwright.parallel.pipelining.weights import Copy
from meshwright.pipeline import Action, Kind, Table, share_times, simulate
from meshwright.torch_private.pipelining import Action as TorchAction
from meshwright.torch_private.pipelining import ComputationType, add_reduce_grad, add_unshard_reshard, with_send_waits

_TORCH_KINDS = {
    Kind.FORWARD: ComputationType.FORWARD,
    Kind.BACKWARD: ComputationType.FULL_BACKWARD,
    Kind.INPUT: ComputationType.BACKWARD_INPUT,
    Kind.WEIGHT: ComputationType.BACKWARD_WEIGHT,
}
_TORCH_TRANSFERS = {
    Kind.FORWARD: (ComputationType.SEND_F, ComputationType.RECV_F),
    Kind.BACKWARD: (ComputationType.SEND_B, ComputationType.RECV_B),
    Kind.INPUT: (ComputationType.SEND_B, ComputationType.RECV_B),
}


def torch_number(table: Table, stage: int) -> int:
    """A stage's number in torch's one row; one is left out between chains.

    Torch treats consecutive numbers as neighbours, and the end of one chain is on the rank where the next
    starts.
    """
    return stage + table.chains.index(table.chain_of(stage))


def torch_numbers(table: Table) -> int:
    """How long torch's row is, gaps included."""
    return torch_number(table, table.stages - 1) + 1


def torch_ranks(table: Table) -> dict[int, int]:
    """The rank of every number in torch's row. Nothing runs at a gap, but torch 2.15 needs a rank for it: the one
    that it falls within, so that no transfer is prepared across it."""
    ranks = {torch_number(table, stage): rank for stage, rank in enumerate(table.stage_ranks)}
    return {number: ranks.get(number, ranks.get(number - 1, 0)) for number in range(torch_numbers(table))}


def in_torchs_words(table: Table, action: Action) -> TorchAction:
    """An action with torch's stage number, its micro-batch counted within the chain."""
    micro_batch = action.micro_batch - table.micro_batches_of(action.stage).start
    return TorchAction(torch_number(table, action.stage), _TORCH_KINDS[action.kind], micro_batch)


def lower(table: Table) -> dict[int, list[TorchAction]]:
    """Every rank's actions in torch's notation, with those that move activations, gradients and shards between ranks.

    A receive is placed where its rank is when the simulated step sends it: two ranks then issue their transfers in the
    same order, and about when they happen.
    """
    orders: dict[int, list[TorchAction | None]] = {rank: [] for rank in range(table.ranks)}
    sends: dict[TorchAction, TorchAction] = {}
    for span in sorted(simulate(table, share_times(table)).spans, key=lambda span: span.end_s):
        action = in_torchs_words(table, span.action)
        orders[span.rank].append(action)
        target = _sent_to(table, span.action)
        if target is not None:
            send, receive = _TORCH_TRANSFERS[span.action.kind]
            sends[action] = action._replace(computation_type=send)
            arriving = TorchAction(torch_number(table, target), receive, action.microbatch_index)
            orders[table.stage_ranks[target]].append(arriving)
    share = table.micro_batches // table.parameter_copies
    lowered = {
        rank: _with_sends(add_reduce_grad([*add_unshard_reshard(order)], share), sends)
        for rank, order in orders.items()
    }
    return with_send_waits(lowered)


def copies_of_chains(table: Table, names: Mapping[int, Sequence[str]], tied: Sequence[Copy]) -> list[Copy]:
    """Every parameter of later chains as a copy of the first chain's, or of what that one is tied to.

    `names` are the parameters of this rank's stages; copies between other ranks are not listed.
    """
    owners = {(copy.stage, copy.name): (copy.owner_stage, copy.owner_name) for copy in tied}
    first, *others = table.chains
    return [
        Copy(*owners.get((stage, name), (stage, name)), twin, name)
        for chain in others
        for stage, twin in zip(first, chain, strict=True)
        for name in names.get(stage, names.get(twin, ()))
    ]


def _sent_to(table: Table, action: Action) -> int | None:
    """The stage that an action's result is sent to."""
    if action.kind is Kind.WEIGHT:
        return None
    target = action.stage + (1 if action.kind is Kind.FORWARD else -1)
    return target if target in table.chain_of(action.stage) else None


def _with_sends(order: list[TorchAction | None], sends: Mapping[TorchAction, TorchAction]) -> list[TorchAction]:
    """Each send right after the action that computes its tensor, before a reduction of gradients that may follow."""
    steps = [step for action in order if action is not None for step in (action, sends.get(action))]
    return [step for step in steps if step is not None]
