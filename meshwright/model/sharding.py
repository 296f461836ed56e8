"""How a model's modules may be sharded over devices: a table of names and roles, independent of model and device.

Your own model provides its own table in the same terms. A `*` stands for one part of a dotted name.

vocabulary   an embedding sharded by rows; its result is the residual stream
head         the Head sharded by rows of the vocabulary
positions    a table of positions, whole on every rank, looked up for this rank's part of the sequence
norm         works on the residual stream token by token, parameters whole on every rank
head-norm    works on one attention head at a time (dim 2 of its input), parameters whole on every rank
per-head     one number for every attention head, distributed with the heads
latent       works on all of the stream that `gather` provides, or on a latent's result, whole on every rank
shared-key   a projection whole on every rank, whose result the heads of all ranks share
gather       takes the residual stream as its first argument and needs all of it: the entry to a column-row pair
column       a projection sharded by its outputs; attention heads and feed-forward widths are sharded this way
kv-column    the same for key and value heads, which may be fewer
tokens       takes the residual stream as its first argument and needs only some tokens of it, returns them
per-token    works on such a module's tokens one by one, parameters whole on every rank
stream       a projection of the residual stream token by token, whole on every rank
experts      weights of experts, which expert parallelism distributes and tensor parallelism does not
media        encodes pictures or sound on the first stage of a pipeline; its result takes places in the residual stream
row          a projection sharded by its inputs, back to the residual stream: the exit of a column-row pair
"""

import re
from collections.abc import Mapping
from functools import lru_cache

from meshwright.job.encoder import ENCODERS

ROLES = (
    *("vocabulary", "head", "positions", "norm", "head-norm", "gather", "column", "kv-column", "row"),
    *("tokens", "per-token", "stream", "experts", "per-head", "latent", "shared-key", "media"),
)
LOOKED_UP = ("vocabulary", "positions")
"""Roles of what is looked up for every token."""
ENTERING = (*LOOKED_UP, "media")
"""Roles of what belongs to a pipeline's first stage; everything else outside the layers belongs to the last one."""
PROJECTIONS = ("column", "kv-column", "row")
"""Roles of a block's matrices."""

_ENCODER_SHARDING = {
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "column",
    "layers.*.attention.v": "column",
    "layers.*.attention.o": "row",
    "layers.*.ffn_norm": "norm",
    "layers.*.ffn": "gather",
    "layers.*.ffn.up": "column",
    "layers.*.ffn.down": "row",
    "post_norm": "norm",
    "projector": "gather",
    "projector.up": "column",
    "projector.down": "row",
}
"""What every encoder has besides what turns its items into tokens."""

DECODER_SHARDING = {
    "embed": "vocabulary",
    "position_embed": "positions",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gather",
    "layers.*.attention.q": "column",
    "layers.*.attention.k": "kv-column",
    "layers.*.attention.v": "kv-column",
    "layers.*.attention.q_norm": "head-norm",
    "layers.*.attention.k_norm": "head-norm",
    "layers.*.attention.sinks": "per-head",
    "layers.*.attention.q_down": "latent",
    "layers.*.attention.q_down_norm": "latent",
    "layers.*.attention.kv_down": "latent",
    "layers.*.attention.kv_down_norm": "latent",
    "layers.*.attention.kv": "column",
    "layers.*.attention.k_rope": "shared-key",
    "layers.*.attention.o": "row",
    "layers.*.ffn_norm": "norm",
    "layers.*.ffn": "gather",
    "layers.*.ffn.gate": "column",
    "layers.*.ffn.up": "column",
    "layers.*.ffn.down": "row",
    "layers.*.moe": "tokens",
    "layers.*.moe.router.linear": "per-token",
    "layers.*.moe.experts.gate_up": "experts",
    "layers.*.moe.experts.down": "experts",
    "layers.*.hidden_norm": "norm",
    "layers.*.embedding_norm": "norm",
    "layers.*.joined": "stream",
    "layers.*.output_norm": "norm",
    "layers.*.shared": "gather",
    "layers.*.shared.gate": "column",
    "layers.*.shared.up": "column",
    "layers.*.shared.down": "row",
    "vision": "media",
    "vision.patch": "stream",
    "vision.class_token": "stream",
    "vision.positions": "stream",
    "vision.pre_norm": "norm",
    "audio": "media",
    "audio.first": "stream",
    "audio.second": "stream",
    **{f"{section}.{module}": role for section in ENCODERS for module, role in _ENCODER_SHARDING.items()},
    "final_norm": "norm",
    "head": "head",
}


def line_of(sharding: Mapping[str, str], module: str) -> str | None:
    """The first line of a table that matches a module's dotted name."""
    return next((pattern for pattern in sharding if _compiled(pattern).fullmatch(module)), None)


def role_of(sharding: Mapping[str, str], module: str) -> str | None:
    """A module's role by its dotted name: that of the first line that matches."""
    line = line_of(sharding, module)
    return None if line is None else sharding[line]


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
