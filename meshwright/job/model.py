"""The [model] section: the shape of a decoder, from a preset, from fields, or from both."""

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from meshwright.job.adapter import Adapter, require_adapter
from meshwright.job.audio import Audio
from meshwright.job.encoder import PARTS, Encoder, require_encoder
from meshwright.job.experts import Experts
from meshwright.job.names import LossName
from meshwright.job.section import Section
from meshwright.job.tokens import SequenceLength
from meshwright.job.vision import Vision

_WIDEST = 10**6


class RopeScaling(Section):
    """A scaling of rotary frequencies for sequences longer than those trained on: Llama 3.1's, or YaRN."""

    kind: Literal["llama3", "yarn"] = "llama3"
    """How frequencies between the slow and the fast ones are blended: over wavelengths, or over pairs (YaRN)."""
    factor: PositiveFloat = Field(le=1e6)
    """The factor by which the context grows."""
    low_freq_factor: PositiveFloat = Field(default=1.0, le=1e6)
    """llama3: wavelengths above original_max_sequence_length / this are scaled in full."""
    high_freq_factor: PositiveFloat = Field(default=4.0, le=1e6)
    """llama3: wavelengths below original_max_sequence_length / this stay unchanged."""
    original_max_sequence_length: SequenceLength = 8192
    """The context the unscaled frequencies were trained for."""
    beta_fast: PositiveFloat = Field(default=32.0, le=1e6)
    """yarn: pairs that turn more often than this in the original context stay unchanged."""
    beta_slow: PositiveFloat = Field(default=1.0, le=1e6)
    """yarn: pairs that turn less often than this in the original context are scaled in full."""
    truncate: bool = True
    """yarn: whether the blend starts and ends at whole pairs (not in gpt-oss)."""
    mscale: NonNegativeFloat = Field(default=0.0, le=1e6)
    """yarn: rotated queries and keys are multiplied by the ratio of 1 + 0.1 · this · ln(factor) to the same with
    mscale_all_dim; by 1 + 0.1 · ln(factor) if either is 0."""
    mscale_all_dim: NonNegativeFloat = Field(default=0.0, le=1e6)
    """yarn: with model.latent, attention scores are multiplied by the square of 1 + 0.1 · this · ln(factor)."""


class Latent(Section):
    """Multi-head latent attention (DeepSeek): keys and values of all heads from one small vector per token."""

    kv_rank: PositiveInt = Field(le=_WIDEST)
    """Size of the vector that keys and values are computed from."""
    q_rank: PositiveInt | None = Field(default=None, le=_WIDEST)
    """Size of the vector that queries are computed from; default none, queries come from the residual stream."""
    rope_dim: PositiveInt = Field(le=10**5)
    """How much of model.head_dim is rotated; this part of the key is shared by all heads."""
    value_dim: PositiveInt = Field(le=10**5)
    """Size of one head of the values; at most model.head_dim."""


class Model(Section):
    """The shape of a decoder-only transformer; defaults are Llama's choices."""

    preset: str | None = None
    """A public shape by name (`llama-3.2-1b`, `gpt2`, …); other fields of this section override it."""
    init_from: str | None = None
    """A Hugging Face folder, or a name (`org/name`, `org/name@revision`), to start from instead of random weights;
    shape and tokenizer come from it too."""
    file: str | None = None
    """A Python file with your own model: build(shape) and its sharding table; this section is its shape."""
    vocab_size: PositiveInt = Field(default=4096, le=10**8)
    """Rows of the embedding table."""
    width: PositiveInt = Field(default=256, le=_WIDEST)
    """Size of the residual stream."""
    layers: PositiveInt = Field(default=4, le=10**4)
    """Number of transformer blocks."""
    heads: PositiveInt = Field(default=4, le=10**5)
    """Query heads."""
    kv_heads: PositiveInt = Field(default=4, le=10**5)
    """Key and value heads (grouped-query attention if fewer than heads); default heads."""
    head_dim: PositiveInt = Field(default=64, le=10**5)
    """Size of one head; default width / heads."""
    ffn_width: PositiveInt = Field(default=1024, le=10**7)
    """Inner size of the feed-forward; default 4 × width."""
    experts: Experts | None = None
    """A mixture of experts in place of the feed-forward; none by default."""
    adapter: Adapter | None = None
    """Low-rank adapters (LoRA), which are trained instead of the model's weights; none by default."""
    vision: Vision | None = None
    """An encoder of pictures whose output takes places among the tokens; none by default."""
    audio: Audio | None = None
    """An encoder of sound whose output takes places among the tokens; none by default."""
    max_sequence_length: SequenceLength = 2048
    """The longest supported sequence (and the number of learned positions)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation: RMSNorm (scale only) or LayerNorm (scale and shift)."""
    norm_eps: PositiveFloat = Field(default=1e-5, le=1.0)
    """Added to the variance inside every norm."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward kind: gated SiLU (three matrices) or tanh-approximated GELU (two)."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary positions in every attention layer, or learned positions added to the embedding."""
    rope_theta: PositiveFloat = Field(default=10000.0, le=1e12)
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's frequency scaling or YaRN; none by default."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2, GPT-2)."""
    linear_bias: bool = False
    """Bias on the attention output and feed-forward projections (GPT-2), on routers and experts too (gpt-oss)."""
    qk_norm: bool = False
    """RMSNorm on queries and keys before the rotation (Qwen3)."""
    qk_norm_over: Literal["heads", "width"] = "heads"
    """Whether qk_norm norms every head by itself (Qwen3) or all heads together (OLMoE)."""
    sliding_window: SequenceLength | None = None
    """Sliding window: each token attends to at most this many last tokens, itself included (Mistral); default all."""
    window_layers: Literal["all", "alternate"] = "all"
    """The layers with the sliding window: all, or every second, beginning with the first (gpt-oss)."""
    sinks: bool = False
    """A learned logit per head that takes part in the softmax of attention without a value (gpt-oss)."""
    latent: Latent | None = None
    """Multi-head latent attention (DeepSeek); none by default."""
    tied: bool = False
    """The output head shares the embedding's weights."""
    init_std: PositiveFloat = Field(default=0.02, le=100.0)
    """Standard deviation of random matrices; divided by √(2 · layers) for those that write to the residual stream."""
    embed_std: PositiveFloat | None = Field(default=None, le=100.0)
    """That of the embedding, and of a head tied to it; default init_std. torchtitan draws an embedding with 1.0."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout after the embedding and on both residual branches, keyed by seed, step, layer and position."""
    loss: LossName = "cross-entropy"
    """What the head computes of its logits and the labels: cross-entropy, or one of your own."""
    extra_tokens: NonNegativeInt = Field(default=0, le=8)
    """Multi-token prediction (MTP): tokens after the next one that training also predicts, each with a block of its own
    after the last; 1 in DeepSeek-V3. Evaluation and generation do not use them."""
    extra_tokens_weight: NonNegativeFloat = Field(default=0.3, le=1e6)
    """Weight of the loss of extra_tokens, their mean, next to the main loss (DeepSeek-V3: 0.3, at the end 0.1)."""

    @property
    def base(self) -> "Model":
        """The model without its adapters."""
        return self.model_copy(update={"adapter": None})

    @property
    def freezes(self) -> bool:
        """Whether some weights are not trained: those next to adapters, or parts of a model with an encoder."""
        return self.adapter is not None or (self.encoder is not None and set(self.encoder.train) != set(PARTS))

    @property
    def encoder(self) -> Encoder | None:
        """What encodes pictures or sound, if anything does."""
        return self.vision or self.audio

    @property
    def decoder(self) -> "Model":
        """The model without an encoder."""
        return self.model_copy(update={"vision": None, "audio": None})

    @property
    def drawn(self) -> "Model":
        """The model with weights that come from no folder."""
        audio = None if self.audio is None else self.audio.model_copy(update={"init_from": None})
        return self.model_copy(update={"init_from": None, "audio": audio})

    @property
    def resumed(self) -> "Model":
        """The model as a run continues with it: from a checkpoint, which has all weights that are trained."""
        if not self.freezes:
            return self.drawn
        if self.adapter is None:
            return self
        return self.model_copy(update={"adapter": self.adapter.model_copy(update={"init_from": None})})

    @property
    def trains_decoder(self) -> bool:
        """Whether more is trained than an encoder and its projector."""
        return self.encoder is None or "decoder" in self.encoder.train

    @property
    def blocks(self) -> int:
        """Number of transformer blocks, those of extra tokens included, which come last."""
        return self.layers + self.extra_tokens

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer >= self.experts.first_dense

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, if it has one."""
        return None if self.window_layers == "alternate" and layer % 2 else self.sliding_window

    @property
    def rope_dim(self) -> int:
        """How much of a head is rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Size of one head of the values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        """Fill in kv_heads, head_dim and ffn_width from other fields if not given."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        width = filled.get("width", cls.model_fields["width"].default)
        heads = filled.get("heads", cls.model_fields["heads"].default)
        if isinstance(width, int) and width <= _WIDEST and isinstance(heads, int) and heads > 0:
            filled.setdefault("kv_heads", heads)
            filled.setdefault("head_dim", max(1, width // heads))
            filled.setdefault("ffn_width", 4 * width)
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}; "
                f"choose a divisor of {self.heads}"
            )
        if self.experts is not None and self.experts.first_dense >= self.layers:
            raise ValueError(
                f"model.experts.first_dense = {self.experts.first_dense} leaves none of model.layers = {self.layers} "
                "with experts; lower it or leave model.experts out"
            )
        if self.experts is not None and self.activation != "swiglu":
            raise ValueError(
                f'model.activation = "{self.activation}" is not supported by model.experts; set it to "swiglu"'
            )
        if self.positions == "rope" and self.rope_dim % 2:
            field = "head_dim" if self.latent is None else "latent.rope_dim"
            raise ValueError(
                f"model.{field} = {self.rope_dim} is odd, and rotary positions need pairs; choose an even number"
            )
        if self.rope_scaling is not None and self.rope_scaling.kind == "yarn" and self.rope_theta == 1.0:
            raise ValueError(
                'model.rope_theta = 1 turns all pairs alike, and rope_scaling.kind = "yarn" needs them unlike'
            )
        if self.latent is not None:
            self._require_latent(self.latent)
        if self.extra_tokens and self.file is not None:
            raise ValueError(
                f"model.extra_tokens = {self.extra_tokens} adds blocks to Meshwright's own decoder, but model.file = "
                f"{self.file} builds its own; set model.extra_tokens = 0"
            )
        if self.embed_std is not None and self.file is not None:
            raise ValueError(
                f"model.embed_std = {self.embed_std} is for Meshwright's own decoder, but model.file = {self.file} "
                "builds its own; leave it out"
            )
        if self.adapter is not None:
            require_adapter(self, self.adapter)
        if self.encoder is not None:
            require_encoder(self, self.encoder)
        return self

    def _require_latent(self, latent: Latent) -> None:
        if self.positions != "rope":
            raise ValueError(f'model.positions = "{self.positions}" is not supported by model.latent; set it to "rope"')
        if self.kv_heads != self.heads:
            raise ValueError(
                f"model.kv_heads = {self.kv_heads} differs from model.heads = {self.heads}, and with model.latent "
                "every head has its own keys and values; leave kv_heads out"
            )
        for field, size in (("rope_dim", latent.rope_dim), ("value_dim", latent.value_dim)):
            if size > self.head_dim:
                raise ValueError(
                    f"model.latent.{field} = {size} is more than model.head_dim = {self.head_dim}; lower it"
                )
        for field, on in (
            ("qkv_bias", self.qkv_bias),
            ("linear_bias", self.linear_bias),
            ("qk_norm", self.qk_norm),
            ("sinks", self.sinks),
        ):
            if on:
                raise ValueError(f"model.{field} = true is not supported by model.latent; set it to false")
