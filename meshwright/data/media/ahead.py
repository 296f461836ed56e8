"""Decoding one step ahead on the device: while a step trains, a thread decodes the items of the next one."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from meshwright.data.batch import Step


class DecodesAhead:
    """Steps as they are read, each decoded while the one before it trains.

    They are read by the thread that asks for them, since only the main one learns of the deaths of data workers; an
    error of the next step is kept until that step is asked for.
    """

    def __init__(self, read: Callable[[], Step], decode: Callable[[Step], Step]) -> None:
        self._read, self._decode = read, decode
        self._pool = ThreadPoolExecutor(1, "decode")
        self._next: Future[Step] | None = None

    def next(self) -> Step:
        """The next step, decoded; then the decoding of the one after it begins."""
        step = (self._next or self._begun()).result()
        self._next = self._begun()
        return step

    def _begun(self) -> Future[Step]:
        try:
            return self._pool.submit(self._decode, self._read())
        except Exception as error:
            failed: Future[Step] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        """Leave out what was read ahead; wait until nothing is decoded any more."""
        self._next = None
        self._pool.shutdown(cancel_futures=True)
