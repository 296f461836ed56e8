"""Single-device model code: the decoder, its initial values, and Hugging Face's names for its parts."""

from meshwright.model.attend import Attend, CausalAttend
from meshwright.model.cache import KVCache
from meshwright.model.custom import Architecture, build_architecture, count_parameters
from meshwright.model.decoder import Decoder
from meshwright.model.documents import Documents
from meshwright.model.dropout import Draws
from meshwright.model.huggingface import (
    HfTensor,
    full_hf_names,
    hf_head,
    hf_rows,
    hf_tensors,
    load_hf_state,
    preference_sizes,
    require_hf_tensors,
    to_hf_state,
    written_hf_tensors,
)
from meshwright.model.initialise import initial_rows, initialise
from meshwright.model.media import Media
from meshwright.model.numbers import IGNORE
from meshwright.model.preference import Pairs, Tally, pair_losses, tallied
from meshwright.model.router import Router, routers

__all__ = [
    "IGNORE",
    "Architecture",
    "Attend",
    "CausalAttend",
    "Decoder",
    "Documents",
    "Draws",
    "HfTensor",
    "KVCache",
    "Media",
    "Pairs",
    "Router",
    "Tally",
    "build_architecture",
    "count_parameters",
    "full_hf_names",
    "hf_head",
    "hf_rows",
    "hf_tensors",
    "initial_rows",
    "initialise",
    "load_hf_state",
    "pair_losses",
    "preference_sizes",
    "require_hf_tensors",
    "routers",
    "tallied",
    "to_hf_state",
    "written_hf_tensors",
]
