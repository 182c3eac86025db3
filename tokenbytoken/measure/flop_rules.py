"""What :func:`count` knows of PyTorch's own operations: the FLOPs of products, which are free, which look up or write.

A module that brings an operation of its own registers its rule beside it, with :func:`rule`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..layers.operations import rule

__all__ = ["LOOKUPS", "OVERWRITES", "SCATTERS", "VIEWS", "is_free"]


def _packets(*names: str) -> list[Any]:
    """The operations of this version of torch among ``names``."""
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


@rule(*_packets("mm", "bmm", "mv", "dot", "vdot", "linear", "_int_mm", "_scaled_mm", "_grouped_mm"))
def _product(out: Tensor, a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * out.numel() * a.shape[-1]  # every number of the output is a sum of that many products


@rule(*_packets("addmm", "baddbmm", "addmv"))
def _product_with_sum(out: Tensor, start: Tensor, a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * out.numel() * a.shape[-1]  # the bias is added, not multiplied


@rule(*_packets("addcmul", "addcmul_"))
def _elementwise_multiply_add(out: Tensor, *_: Any, **__: Any) -> int:
    return 2 * out.numel()


@rule(*_packets("convolution"))
def _convolution(out: Tensor, x: Tensor, weight: Tensor, *_: Any) -> int:
    return 2 * out.numel() * math.prod(weight.shape[1:])  # weight: (out, in ÷ groups, *kernel)


@rule(
    *_packets(
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
)
def _attention(out: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    # (…, H, T, D) · (…, S, D) → scores, then scores · (…, S, Dv): every pair, the masked ones too
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


# A table that is looked up, by the position of its argument: only the rows that come out were read.
LOOKUPS: dict[Any, int] = dict.fromkeys(_packets("embedding", "index_select", "index", "gather", "take"), 0)

# Writes to places that are data, by the position of what is written.
SCATTERS: dict[Any, int] = {
    **dict.fromkeys(_packets("index_copy_", "index_add_", "scatter_", "scatter_add_"), 3),
    **dict.fromkeys(_packets("index_put_", "_index_put_impl_"), 2),
}

# In-place operations that do not look at what they overwrite.
OVERWRITES = set(_packets("copy_", "fill_", "zero_", "index_copy_", "index_put_", "_index_put_impl_", "scatter_"))

VIEWS = set(_packets("_unsafe_view", "lift_fresh", "_reshape_alias"))  # beside those that say so themselves

# No products here: moving, choosing, reducing, drawing, making. Element-wise operations and most reductions
# carry a tag in PyTorch and need no entry.
_FREE_NAMES = """
    _softmax _safe_softmax _log_softmax logsumexp cumsum cumprod logcumsumexp cummax cummin
    rms_norm _fused_rms_norm native_layer_norm mean sum prod amax amin aminmax max min argmax argmin any all var std
    linalg_vector_norm floor_divide equal topk sort kthvalue searchsorted bucketize _unique2 bincount histc nonzero
    cat stack repeat repeat_interleave roll flip constant_pad_nd tril triu tril_ triu_ tril_indices triu_indices
    index_copy index_copy_ index_put index_put_ _index_put_impl_ index_add index_add_ index_fill index_fill_
    scatter scatter_ scatter_add scatter_add_ slice_scatter select_scatter split_with_sizes_copy
    masked_select masked_fill masked_fill_ masked_scatter one_hot copy_ _to_copy clone fill_ zero_
    arange linspace full full_like zeros zeros_like ones ones_like empty empty_like empty_strided empty_permuted
    new_empty new_empty_strided new_zeros new_ones new_full eye scalar_tensor
    rand rand_like randn randn_like randint randperm multinomial normal normal_ uniform_ exponential_ bernoulli
    native_dropout _local_scalar_dense _assert_async _assert_scalar
"""
_FREE = set(_packets(*_FREE_NAMES.split()))


def is_free(func: Any) -> bool:
    packet = func.overloadpacket
    return (
        func.is_view
        or packet in _FREE
        or packet in VIEWS
        or torch.Tag.pointwise in func.tags
        or getattr(torch.Tag, "reduction", None) in func.tags
    )
