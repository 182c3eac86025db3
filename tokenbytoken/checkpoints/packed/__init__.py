"""Weights that stay as small in memory as they were in the file, and products that read them so."""

from .kernels import has_kernel as has_kernel
from .layers import FourBitLinear as FourBitLinear
from .layers import Packed as Packed
from .layers import is_packed as is_packed
from .loading import WEIGHTS as WEIGHTS
from .loading import Weights as Weights
from .loading import fill_packed as fill_packed
