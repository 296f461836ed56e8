"""Gradient compression between replicas."""

from meshwright.parallel.compression.buckets import first_start, pays
from meshwright.parallel.compression.codecs import Codec
from meshwright.parallel.compression.replicas import cut
from meshwright.parallel.compression.weights import make_codec

__all__ = ["Codec", "cut", "first_start", "make_codec", "pays"]
