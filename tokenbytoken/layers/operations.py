"""Operations that count: the rules by which their FLOPs are known, and ``product``, a product of its own.

A layer that computes by an operation of its own registers a rule beside it, and so can be counted
(:func:`tokenbytoken.measure.count`) without an edit anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Rule", "product", "rule", "rules"]

#: The FLOPs of one call, from its result and its own arguments: ``f(out, *args, **kwargs) -> int``.
Rule = Callable[..., int]

#: The rule of each operation that has one. The key is a packet such as ``torch.ops.aten.mm``; its overloads share it.
rules: dict[Any, Rule] = {}


def rule(*operations: Any) -> Callable[[Rule], Rule]:
    """Register the FLOPs of operations: ``f(out, *args, **kwargs) -> int`` with the operation's own arguments.

    An operation is a packet such as ``torch.ops.aten.mm``; all its overloads share the rule, and a later rule takes
    the place of an earlier one. This is how a module that brings its own kernel (a convolution, a scan) makes
    :func:`tokenbytoken.measure.count` know it.
    """

    def register(f: Rule) -> Rule:
        for operation in operations:
            rules[operation] = f
        return f

    return register


# --- a product that counts ----------------------------------------------------------------------------
#
# a * b, as an operation of its own: `count` takes element-wise work for free, and the products of a scan are its
# arithmetic. (Its multiply-adds are `addcmul`, its sums matrix products, which `count` knows by themselves.)

_library = torch.library.Library("tokenbytoken", "FRAGMENT")
_library.define("product(Tensor a, Tensor b) -> Tensor")
_library.impl("product", lambda a, b: a * b, "CompositeExplicitAutograd")


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    return (grad * b).sum_to_size(a.shape), (grad * a).sum_to_size(b.shape)


torch.library.register_autograd("tokenbytoken::product", _backward, setup_context=_keep, lib=_library)
product = torch.ops.tokenbytoken.product


@rule(product)
def _one_a_number(out: Tensor, *_: Any) -> int:
    return out.numel()
