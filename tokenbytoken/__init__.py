"""Token by Token: one small decoder, built up to Llama 3.1, DeepSeek-V3 and Jamba 1.5.

Each folder answers one question: what a model is made of (``layers``), what it costs on paper (``cost``) and here
(``measure``), how it writes (``run``), where weights come from (``checkpoints``), what a reader sees (``page``). The
names below are independent of where a file lies. They are imported when they are first used, so that configs, closed
forms and ``tokenbytoken size`` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checkpoints as checkpoints
    from . import config as config
    from . import cost as cost
    from . import decoder as decoder
    from . import layers as layers
    from . import measure as measure
    from . import models as models
    from . import page as page
    from . import run as run
    from . import world as world
    from ._table import table as table
    from .checkpoints import QuantizedExperts as QuantizedExperts
    from .checkpoints import QuantizedLinear as QuantizedLinear
    from .checkpoints import load as load
    from .checkpoints import load_tokenizer as load_tokenizer
    from .checkpoints import quantize_as as quantize_as
    from .checkpoints import quantize_cache as quantize_cache
    from .checkpoints import quantize_model as quantize_model
    from .checkpoints import save as save
    from .checkpoints import stored_bytes as stored_bytes
    from .checkpoints import to_fp8 as to_fp8
    from .config import AttentionConfig as AttentionConfig
    from .config import DecoderConfig as DecoderConfig
    from .config import LatentAttentionConfig as LatentAttentionConfig
    from .config import LayerConfig as LayerConfig
    from .config import Llama3Scaling as Llama3Scaling
    from .config import MambaConfig as MambaConfig
    from .config import MoEConfig as MoEConfig
    from .config import RopeConfig as RopeConfig
    from .config import SwiGLUConfig as SwiGLUConfig
    from .config import YarnScaling as YarnScaling
    from .cost import Accelerator as Accelerator
    from .cost import ParameterCount as ParameterCount
    from .cost import PassCost as PassCost
    from .cost import Prediction as Prediction
    from .cost import accelerators as accelerators
    from .cost import attention_intensity as attention_intensity
    from .cost import count_parameters as count_parameters
    from .cost import max_batch as max_batch
    from .cost import max_context as max_context
    from .cost import pass_cost as pass_cost
    from .cost import predict as predict
    from .cost import prefill_crossing as prefill_crossing
    from .cost import state_bytes as state_bytes
    from .cost import state_bytes_per_token as state_bytes_per_token
    from .cost import weight_bytes as weight_bytes
    from .decoder import Decoder as Decoder
    from .decoder import DecoderState as DecoderState
    from .models import AttentionShape as AttentionShape
    from .models import published as published
    from .page import check as check
    from .page import plot as plot
    from .run import DraftModel as DraftModel
    from .run import PromptLookup as PromptLookup
    from .run import Speculation as Speculation
    from .run import first_layers as first_layers
    from .run import generate as generate
    from .run import sample as sample
    from .run import speculate as speculate
    from .run import stream as stream
    from .world import ledger as ledger

__version__ = "0.1.0"

#: Modules that are read by their own name, and where each lies.
_MODULES = {
    "checkpoints": "checkpoints", "config": "config", "cost": "cost", "decoder": "decoder", "layers": "layers",
    "measure": "measure", "models": "models", "page": "page", "run": "run", "world": "world", "check": "page.check",
    "plot": "page.plot",
}  # fmt: skip
_NAMES = {
    "config": (
        "AttentionConfig", "DecoderConfig", "LatentAttentionConfig", "LayerConfig", "Llama3Scaling", "MambaConfig",
        "MoEConfig", "RopeConfig", "SwiGLUConfig", "YarnScaling",
    ),
    "models": ("AttentionShape", "published"),
    "cost": (
        "ParameterCount", "PassCost", "attention_intensity", "count_parameters", "max_batch", "max_context",
        "pass_cost", "prefill_crossing", "state_bytes", "state_bytes_per_token", "weight_bytes", "Accelerator",
        "Prediction", "accelerators", "predict",
    ),
    "world": ("ledger",),
    "_table": ("table",),
    "decoder": ("Decoder", "DecoderState"),
    "run": (
        "DraftModel", "PromptLookup", "Speculation", "first_layers", "generate", "sample", "speculate", "stream",
    ),
    "checkpoints": (
        "QuantizedExperts", "QuantizedLinear", "load", "load_tokenizer", "quantize_as", "quantize_cache",
        "quantize_model", "save", "stored_bytes", "to_fp8",
    ),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_MODULES, *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
