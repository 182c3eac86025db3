"""How a decoder writes: sampling, generation, speculation, serving, several GPUs."""

from .generation import accepts as accepts
from .generation import distribution as distribution
from .generation import residual as residual
from .generation import verify as verify
from .mtp import MTP as MTP
from .mtp import load_mtp as load_mtp
from .serving import BlockAllocator as BlockAllocator
from .serving import Request as Request
from .serving import Row as Row
from .serving import chunked_prefill as chunked_prefill
from .serving import continuous_batching as continuous_batching
from .serving import queue as queue
from .serving import roofline as roofline
from .serving import serve as serve
from .serving import static_batching as static_batching
