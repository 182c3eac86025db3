"""What a model is, as data: a decoder is a list of layers, a layer is a pair (mixer, feed-forward).

Nothing here needs torch. Each mixer and feed-forward has a file of its own, with its closed forms: its weights, the
state that it keeps, the FLOPs of a pass. Each names, as a string, the module class that realises it. So a new
architecture adds a config and a class, and everything else counts, predicts and builds it as it stands.

>>> config = DecoderConfig.from_hf({"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
...     "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
...     "intermediate_size": 14336, "rope_theta": 500000.0})
>>> config.layers[0].mixer.group_size
4
"""

from __future__ import annotations

from .._algebra import Expression, Number, Symbol, is_symbolic, log2, maximum, minimum, where
from .attention import AttentionConfig
from .closed_forms import FeedForwardConfig, Flops, MixerConfig, Role, StateSize, Weight, distinct, pairs
from .decoder import DecoderConfig, LayerConfig, Model
from .feed_forward import MoEConfig, SwiGLUConfig
from .huggingface import Fields, readers
from .latent_attention import LatentAttentionConfig
from .mamba import MambaConfig
from .rope import Llama3Scaling, RopeConfig, YarnScaling

__all__ = [
    "AttentionConfig",
    "DecoderConfig",
    "Expression",
    "FeedForwardConfig",
    "Fields",
    "Flops",
    "LatentAttentionConfig",
    "LayerConfig",
    "Llama3Scaling",
    "MambaConfig",
    "MixerConfig",
    "MoEConfig",
    "Model",
    "Number",
    "Role",
    "RopeConfig",
    "StateSize",
    "SwiGLUConfig",
    "Symbol",
    "Weight",
    "YarnScaling",
    "distinct",
    "is_symbolic",
    "log2",
    "maximum",
    "minimum",
    "pairs",
    "readers",
    "where",
]
