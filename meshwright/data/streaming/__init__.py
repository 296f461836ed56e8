"""Training straight from files: tokenised on the way, shuffled in blocks, resumed exactly from a cursor per shard."""

from meshwright.data.streaming.flow import Flow, MemoryTokens, open_flow
from meshwright.data.streaming.loader import StreamLoader
from meshwright.data.streaming.shard import Cursor, VirtualShard

__all__ = ["Cursor", "Flow", "MemoryTokens", "StreamLoader", "VirtualShard", "open_flow"]
