"""Weights that stay as small in memory as they were in the file, and products that read them so."""

from .layers import Packed as Packed
from .loading import WEIGHTS as WEIGHTS
from .loading import Weights as Weights
from .loading import fill_packed as fill_packed
