"""How a decoder writes: sampling, generation, speculation, serving.

Tensor parallelism is imported by its own name, :mod:`tokenbytoken.run.parallel`: it needs ``torch.distributed``.
"""

from __future__ import annotations

from .generation import generate, stream
from .mtp import MTP, load_mtp
from .paging import BlockAllocator, Written
from .sampling import Sampling, distribution, sample
from .schedule import (
    Cost,
    PassRecord,
    Piece,
    Policy,
    Record,
    Request,
    Row,
    Summary,
    Trace,
    chunked_prefill,
    continuous_batching,
    queue,
    roofline,
    static_batching,
)
from .serving import serve
from .speculation import (
    Choose,
    Draft,
    DraftModel,
    Guess,
    PromptLookup,
    Propose,
    Round,
    Speculation,
    accepts,
    first_layers,
    residual,
    speculate,
    verify,
)

__all__ = [
    "MTP",
    "BlockAllocator",
    "Choose",
    "Cost",
    "Draft",
    "DraftModel",
    "Guess",
    "PassRecord",
    "Piece",
    "Policy",
    "PromptLookup",
    "Propose",
    "Record",
    "Request",
    "Round",
    "Row",
    "Sampling",
    "Speculation",
    "Summary",
    "Trace",
    "Written",
    "accepts",
    "chunked_prefill",
    "continuous_batching",
    "distribution",
    "first_layers",
    "generate",
    "load_mtp",
    "queue",
    "residual",
    "roofline",
    "sample",
    "serve",
    "speculate",
    "static_batching",
    "stream",
    "verify",
]
