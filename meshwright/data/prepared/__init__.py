"""A prepared folder: token shards, their manifest and the tokenizer that made them."""

from meshwright.data.prepared.build import build
from meshwright.data.prepared.export import Exported, export_webdataset
from meshwright.data.prepared.fill import Progress, Wishes
from meshwright.data.prepared.folder import Manifest, Prepared, is_prepared, open_prepared
from meshwright.data.prepared.look import Findings, Look, Sampled, inspect, verify

__all__ = [
    "Exported",
    "Findings",
    "Look",
    "Manifest",
    "Prepared",
    "Progress",
    "Sampled",
    "Wishes",
    "build",
    "export_webdataset",
    "inspect",
    "is_prepared",
    "open_prepared",
    "verify",
]
