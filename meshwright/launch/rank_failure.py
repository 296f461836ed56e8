"""The failure of a rank, for those who keep a run going; needs no torch."""


class RankFailure(Exception):
    """A rank crashed; the message is one sentence, and the rank's own traceback is kept with it.

    `rank` is None if none of them is to blame.
    """

    def __init__(self, sentence: str, rank: int | None, rank_traceback: str) -> None:
        super().__init__(sentence)
        self.rank, self.rank_traceback = rank, rank_traceback
