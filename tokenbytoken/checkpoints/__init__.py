"""Where weights come from, and how few bytes they may take."""

from .gguf_fast import gguf_reader as gguf_reader
from .number_formats import LARGEST as LARGEST
from .number_formats import QuantizedTensor as QuantizedTensor
from .number_formats import quantize as quantize
from .number_formats import to_fp8 as to_fp8
from .quantized_cache import OneByte as OneByte
from .quantized_cache import quantize_cache as quantize_cache
from .quantized_layers import QuantizedExperts as QuantizedExperts
from .quantized_layers import QuantizedLinear as QuantizedLinear
from .quantized_layers import probe as probe
from .quantized_layers import quantize_as as quantize_as
from .quantized_layers import quantize_model as quantize_model
from .quantized_layers import stored_bytes as stored_bytes
from .sources import WEIGHTS as WEIGHTS
from .sources import find as find
from .sources import load as load
from .sources import open_source as open_source
from .sources import save as save
from .sources import stores_four_bits as stores_four_bits
from .tokenizer import Tokenizer as Tokenizer
from .tokenizer import load_tokenizer as load_tokenizer
