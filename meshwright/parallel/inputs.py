"""The part of a micro-batch that this rank's model gets: its slice of the sequence, and its dropout key."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data import Batch, Blank, References
from meshwright.data.store import Int64Array
from meshwright.errors import UserError
from meshwright.job import Job
from meshwright.model import Draws, Media, Pairs, Tally
from meshwright.parallel.context.order import zigzag_places
from meshwright.parallel.world import World


class Inputs:
    """Builds a model's arguments from micro-batches; ranks that split the sequence each get their own tokens of it."""

    def __init__(self, job: Job, world: World) -> None:
        self._job, self._device = job, world.device
        self._places = None
        if world.axis_size("cp") > 1:
            sequence = job.batch.sequence_length
            self._places = zigzag_places(sequence, world.axis_rank("cp"), world.axis_size("cp"), world.device)
        self._drawn_places = self._of_residual_stream(world)
        self._held_places = self._where_held()
        self.references: References = Blank()
        """What the reference gives the pairs that are trained on."""
        self.tally = Tally()
        """What the pairs of the forwards since it was last taken add up to."""
        self._context_group, self._sharing = world.context_group, world.axis_size("cp")
        self._replay, self._tp = world.replay, (world.axis_rank("tp"), world.axis_size("tp"))
        self._positions = self._that_models_cannot_count(world)

    def _that_models_cannot_count(self, world: World) -> Tensor | None:
        """Positions (1, S) where a model that counts its own tokens would be wrong."""
        if self._places is not None:
            return self._places.unsqueeze(0)
        if world.axis_size("pp") == 1:
            return None
        # A later stage is given hidden states, of which sequence parallelism leaves it a slice.
        return torch.arange(self._job.batch.sequence_length, device=self._device).unsqueeze(0)

    def _of_residual_stream(self, world: World) -> Tensor | None:
        """Which tokens of a sequence the residual stream on this rank holds: sequence parallelism leaves it a slice."""
        parts = world.axis_size("tp") if self._job.layout.sp else 1
        if parts == 1:
            return self._places
        places = self._places
        if places is None:
            places = torch.arange(self._job.batch.sequence_length, device=self._device)
        return places.chunk(parts)[world.axis_rank("tp")]

    def _where_held(self) -> Tensor | None:
        """For every place of a sequence where the residual stream on this rank has it, -1 if another rank does; None if
        it has all of them."""
        if self._drawn_places is None:
            return None
        held = torch.full((self._job.batch.sequence_length,), -1, device=self._device)
        held[self._drawn_places] = torch.arange(len(self._drawn_places), device=self._device)
        return held

    def training(self, micro: Batch, valid_count: float, step: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Tokens and keyword arguments of a training forward; `step` keys the dropout."""
        draws = None
        model = self._job.model
        if model.dropout or (model.adapter is not None and model.adapter.dropout):
            samples = micro.sample_ids_B.to(self._device)
            draws = Draws(self._job.run.seed, step, samples, self._drawn_places, inner_places=self._places)
        micro = micro.to(self._device)
        tokens, arguments = self._arguments(micro, valid_count, draws, self.references)
        if extra := self._job.model.extra_tokens:
            # Shifted before ranks take their own tokens: a neighbour may belong to another rank.
            arguments["ahead"] = [
                tuple(self._own(each) for each in micro.ahead(places)) for places in range(1, extra + 1)
            ]
        return tokens, arguments | self._routing(micro, step)

    def held_out(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """Tokens and keyword arguments of an evaluation forward: no dropout, and the loss is a sum.

        Of pairs the model then returns sums of log-probabilities, for which it needs no reference.
        """
        tokens, arguments = self._arguments(batch.to(self._device), 1, None, Blank())
        return tokens, arguments | self._routing(batch, None)

    def _routing(self, micro: Batch, step: Tensor | None) -> dict[str, Any]:
        """The experts of the tokens that this rank routes, as a keyword argument, if they are replayed."""
        if self._replay is None:
            return {}
        # Tensor-parallel ranks route their own tokens each, with or without sequence parallelism.
        places = torch.arange(micro.tokens_BS.shape[1]) if self._places is None else self._places.cpu()
        rank, ranks = self._tp
        return {
            "routing": self._replay(None if step is None else int(step), micro.sample_ids_B, places.chunk(ranks)[rank])
        }

    def _arguments(
        self, micro: Batch, valid_count: float, draws: Draws | None, references: References
    ) -> tuple[Tensor, dict[str, Any]]:
        positions = micro.positions_BS
        pairs = {} if micro.pairs is None else {"pairs": self._pairs(micro, micro.pairs, references)}
        return self._own(micro.tokens_BS), {
            "labels": self._own(micro.labels_BS),
            "valid_count": valid_count,
            "positions": self._positions if positions is None else self._own(positions),
            # Attention over a split sequence needs the documents of all of it; see `make_context_attend`.
            "documents": micro.documents(),
            "draws": draws,
            **pairs,
            **self._media(micro),
        }

    def _media(self, micro: Batch) -> dict[str, Media]:
        """Items with the places that this rank has of theirs, as a keyword argument, if the model reads them."""
        media, encoder = micro.media, self._job.model.encoder
        if media is None and encoder is None:
            return {}
        if media is None or encoder is None:
            raise UserError(
                "data.sources deliver pictures or sound, but neither model.vision nor model.audio is set; set one or "
                "name sources of text"
                if encoder is None
                else f"model.{encoder.section} is set, but data.sources deliver no {encoder.items}; name sources with "
                f"{encoder.items} or leave it out"
            )
        if self._held_places is None:
            return {"media": media}
        held = self._held_places[media.places_BKT.clamp(min=0)]
        return {"media": Media(media.items_BK, torch.where(media.places_BKT < 0, -1, held))}

    def _pairs(self, micro: Batch, starts: Sequence[Int64Array], references: References) -> Pairs:
        """The pairs of a micro-batch; every two documents of a sequence are one."""
        assert micro.document_ids_BS is not None
        known = references.of(starts)
        rows, most, _ = known.shape
        answers_BS = torch.arange(rows, device=self._device).unsqueeze(1) * 2 * most + micro.document_ids_BS
        counts_B1 = torch.tensor([len(own) for own in starts], device=self._device).unsqueeze(1)
        return Pairs(
            self._own(torch.where(micro.document_ids_BS < 2 * counts_B1, answers_BS, 0)),
            torch.arange(most, device=self._device) < counts_B1,
            torch.from_numpy(known).to(self._device),
            self._job.preference,
            self.tally,
            None if self._context_group is None else self._add_up,
            self._sharing,
        )

    def _add_up(self, totals: Tensor) -> None:
        dist.all_reduce(totals, group=self._context_group)

    def _own(self, numbers_BS: Tensor) -> Tensor:
        """This rank's places of something that there is for every token."""
        return numbers_BS if self._places is None else numbers_BS[:, self._places]
