"""Token by Token: one small decoder, built up to Llama 3.1, DeepSeek-V3 and Jamba 1.5.

Names are imported when they are first used, so that configs, arithmetic and ``python -m tokenbytoken size``
need no torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import arithmetic as arithmetic
    from . import attention as attention
    from . import check as check
    from . import checkpoint as checkpoint
    from . import config as config
    from . import decoder as decoder
    from . import feed_forward as feed_forward
    from . import hardware as hardware
    from . import latent_attention as latent_attention
    from . import mamba as mamba
    from . import measure as measure
    from . import mtp as mtp
    from . import norm as norm
    from . import parallel as parallel
    from . import plot as plot
    from . import quantize as quantize
    from . import rope as rope
    from . import serving as serving

__version__ = "0.1.0"

_MODULES = (
    "arithmetic", "attention", "check", "checkpoint", "config", "decoder", "feed_forward", "hardware",
    "latent_attention", "mamba", "measure", "mtp", "norm", "parallel", "plot", "quantize", "rope", "serving",
)  # fmt: skip
_NAMES = {
    "config": (
        "AttentionConfig", "DecoderConfig", "LatentAttentionConfig", "LayerConfig", "Llama3Scaling", "MambaConfig",
        "MoEConfig", "RopeConfig", "SwiGLUConfig", "YarnScaling",
    ),
    "published": ("AttentionShape", "published"),
    "arithmetic": (
        "ParameterCount", "PassCost", "attention_intensity", "count_parameters", "max_batch", "max_context",
        "pass_cost", "prefill_crossing", "state_bytes", "state_bytes_per_token", "weight_bytes",
    ),
    "hardware": ("Accelerator", "Prediction", "accelerators", "predict"),
    "ledger": ("ledger",),
    "_table": ("table",),
    "decoder": ("Decoder", "DecoderState"),
    "generate": (
        "DraftModel", "PromptLookup", "Speculation", "first_layers", "generate", "sample", "speculate", "stream",
    ),
    "checkpoint": ("load", "load_tokenizer"),
    "quantize": (
        "QuantizedExperts", "QuantizedLinear", "quantize_as", "quantize_cache", "quantize_model", "stored_bytes",
        "to_fp8",
    ),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_MODULES, *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Lets ``tbt.generate`` stay the function when something imports the submodule of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
