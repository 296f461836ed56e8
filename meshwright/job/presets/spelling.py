"""Names of models as people write them: the preset that one means, presets near it, mixtures of experts."""

import difflib
import math
import re
import string
from collections.abc import Collection

_HUB = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
    "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0924",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}
"""Where the weights of the presets are."""
_OWNERS = frozenset(name.partition("/")[0].lower() for name in _HUB.values())
_OTHER_NAMES = {
    "gpt2small": "gpt2",
    "gpt3": "gpt3-175b",
    "llama3.370b": "llama-3.1-70b",
    "olmoe1b7b0924": "olmoe-1b-7b",
    "deepseekv30324": "deepseek-v3",
    "deepseekr1": "deepseek-v3",
}
"""By what `_letters` leaves of them; Llama 3.3 has the shape of 3.1, DeepSeek-R1 that of V3."""
# Variants of the same shape. Not "base": that of Qwen3 is made for shorter sequences.
_VARIANT = re.compile(r"(-(hf|chat|instruct))+$")
_TOY = "tiny-"
_LONGEST = 100
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])")
_SUPPORTED_MIXTURE = re.compile(
    r"^(mixtral|olmoe|gpt-oss|qwen3-(coder-)?\d+b-a\d|deepseek-(v2(\.5)?|v3(\.1)?|r1|coder-v2)([-_]|$))"
)
_MIXTURE = re.compile(
    r"^(mixture|switch-|deepseek-(v[2-9]|moe|chat-v2)|llama-?4([-_]|$)|dbrx|grok-|jamba|arctic|kimi-k2|glm-4\.[5-9]"
    r"|minimax-m|minimax-text)"
    r"|(^|[-_.])moe([-_.]|$)|(^|[-_])\d+x\d+(\.\d+)?b|[-_]a\d+(\.\d+)?[bm]([-_.]|$)"
)


def preset_meant(name: str, presets: Collection[str]) -> str | None:
    """The preset that a name stands for: `Llama-3-8B`, `meta-llama/Meta-Llama-3-8B-Instruct`; None if for none."""
    if name in presets:
        return name
    owner, slash, _ = name.rpartition("/")
    if slash and owner.lower() not in _OWNERS:  # someone else's model of this name may be another
        return None
    letters = _letters(name)
    by_letters = {_letters(preset): preset for preset in presets if not preset.startswith(_TOY)}
    return by_letters.get(letters) or _OTHER_NAMES.get(letters)


def weights_of(preset: str) -> str | None:
    """The Hugging Face name of a preset's weights."""
    return _HUB.get(preset)


def is_other_mixture(name: str) -> bool:
    """Whether a name is that of a mixture of experts of a family that is not supported: `dbrx`, `Qwen1.5-MoE-A2.7B`."""
    own = name.rpartition("/")[2].lower()
    return _SUPPORTED_MIXTURE.search(own) is None and _MIXTURE.search(own) is not None


def near_presets(name: str, presets: Collection[str], most: int = 3) -> list[str]:
    """Presets of the same family, the nearest in size and spelling first; none if there is no such family."""
    name = name[:_LONGEST].lower()
    letters, size = _letters(name), _size(name)
    family = letters[: len(letters) - len(letters.lstrip(string.ascii_lowercase))]
    kin = [preset for preset in presets if preset.startswith(_TOY) == name.startswith(_TOY)]
    related = [preset for preset in kin if family and _letters(preset).startswith(family)]
    if not related:
        return difflib.get_close_matches(name, kin, most, 0.7)

    def distance(preset: str) -> tuple[int, float]:
        own = _size(preset)
        octaves = round(abs(math.log2(size / own))) if size and own else 0
        return octaves, -difflib.SequenceMatcher(None, letters, _letters(preset)).ratio()

    return sorted(related, key=distance)[:most]


def _letters(name: str) -> str:
    """A name without owner, case, separators and variant."""
    text = re.sub(r"[\s_]+", "-", name.rpartition("/")[2].strip().lower()).removeprefix("meta-")
    text = text.removesuffix("-v0.1") if text.startswith(("mistral", "mixtral")) else text
    return re.sub(r"[^a-z0-9.]", "", _VARIANT.sub("", text))


def _size(name: str) -> float | None:
    """The parameters that a name claims."""
    found = _SIZE.search(name.lower())
    return None if found is None else float(found[1]) * {"b": 1e9, "m": 1e6}[found[2]]
