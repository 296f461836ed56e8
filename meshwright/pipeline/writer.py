"""Builds the order of a rank that holds two stages, each with its own stream of micro-batches."""

from collections import deque

from meshwright.pipeline.table import Action, Kind


class RankOrder:
    """A rank's actions so far; each stream's micro-batches are taken in turn, forward and backward."""

    def __init__(self, stages: tuple[int, int], streams: tuple[range, range]) -> None:
        self.actions: list[Action] = []
        self.overlapped: list[tuple[Action, Action]] = []
        self.weights_due: deque[Action] = deque()
        self._stages = stages
        self._to_forward = [iter(stream) for stream in streams]
        self._to_backward = [iter(stream) for stream in streams]

    def forward(self, stream: int) -> None:
        """The forward of the stream's next micro-batch."""
        self.actions.append(Action(Kind.FORWARD, next(self._to_forward[stream]), self._stages[stream]))

    def backward(self, stream: int) -> None:
        """The whole backward of the stream's next micro-batch."""
        self.actions.append(Action(Kind.BACKWARD, next(self._to_backward[stream]), self._stages[stream]))

    def input(self, stream: int) -> None:
        """The first half of that backward; its weight half becomes due."""
        action = Action(Kind.INPUT, next(self._to_backward[stream]), self._stages[stream])
        self.actions.append(action)
        self.weights_due.append(Action(Kind.WEIGHT, action.micro_batch, action.stage))

    def weight(self) -> None:
        """The weight half that has been due longest."""
        self.actions.append(self.weights_due.popleft())

    def all_weights(self) -> None:
        """Every weight half still due."""
        while self.weights_due:
            self.weight()

    def overlap(self, forward_stream: int, backward_stream: int) -> None:
        """One stream's forward and the other's backward, overlapped where the machine can."""
        self.forward(forward_stream)
        self.backward(backward_stream)
        self.overlapped.append((self.actions[-2], self.actions[-1]))
