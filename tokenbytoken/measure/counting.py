"""What a pass does: the FLOPs of its products, and the bytes of weights and state that it moves."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, overload

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..layers.operations import rules
from .flop_rules import LOOKUPS, OVERWRITES, SCATTERS, VIEWS, is_free
from .storage import Cover, shown, storage, tensors

__all__ = ["Count", "count"]


@dataclass
class Count:
    """What a pass did: the FLOPs of its products, and the bytes that had to come from memory or go there.

    ``weight_bytes``  each byte of a weight once, however often it was read; of a table only the rows looked up
    ``state_bytes_read``  each byte of the state that was read before the pass itself had written it, once
    ``state_bytes_written``  each byte of the state that was written, once
    ``operations``  calls that do work (views are free)
    ``traffic``  bytes of all that these calls read and write, each time: what moves if nothing stays in a cache
    ``flops_by_operation``, ``calls_by_operation``  the same, by PyTorch's name of the operation
    """

    flops: int = 0
    weight_bytes: int = 0
    state_bytes_read: int = 0
    state_bytes_written: int = 0
    operations: int = 0
    traffic: int = 0
    flops_by_operation: Counter[str] = field(default_factory=Counter)
    calls_by_operation: Counter[str] = field(default_factory=Counter)

    @property
    def state_bytes(self) -> int:
        return self.state_bytes_read + self.state_bytes_written

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.state_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.bytes if self.bytes else math.inf


@overload
def count(fn: Callable[[], object], *, weights: object = None, state: object = None) -> Count: ...
@overload
def count(fn: None = None, *, weights: object = None, state: object = None) -> _Counter: ...
def count(fn: Callable[[], object] | None = None, *, weights: object = None, state: object = None) -> Count | _Counter:
    """Count the FLOPs and bytes of a pass, on real tensors or on the meta device.

    ``count(lambda: model(tokens, state), state=state)`` returns the :class:`Count`; without ``fn`` it is a
    context manager: ``with count(state=state) as cost: model(tokens, state)``.

    FLOPs are those of the products that run, a multiply-add as 2; a fused attention is counted full, masked
    scores included; sums, norms, activations and other element-wise work count 0. ``weights`` (modules or
    tensors) adds to what is taken for a weight; every ``nn.Parameter`` is one anyway. ``state`` is any object
    that holds tensors. Count one pass at a time: a weight that two passes read is still counted once.

    Raises NotImplementedError for an operation it has no rule for, rather than take it for free (:func:`rule`).
    """
    counter = _Counter(weights, state)
    if fn is None:
        return counter
    with counter as cost:
        fn()
    return cost


class _Counter(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Counting never meets torch.compile; told so, torch does not import its compiler (2 s) at first use."""
        return False

    def __init__(self, weights: object, state: object) -> None:
        super().__init__()
        self.count = Count()
        # Views share a storage, so a storage is what a weight or a state is known by. The tensors are kept:
        # a freed storage could be allocated again at the same address, for something else.
        self.weights = {storage(t): t for t in tensors(weights)}
        self.state = {storage(t): t for t in tensors(state)}
        self.read: dict[int, Cover] = defaultdict(Cover)  # of weights
        self.bytes_read = 0  # of all of them
        self.looked_up: Counter[int] = Counter()  # bytes of rows, by table
        self.touched: dict[int, Cover] = defaultdict(Cover)  # of the state, read or written
        self.written: dict[int, Cover] = defaultdict(Cover)

    def __enter__(self) -> Count:
        super().__enter__()
        return self.count

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        listed = packet in rules
        if not listed and packet not in LOOKUPS and not is_free(func):
            if func._can_decompose():  # inference mode hands over composites such as matmul whole
                with self:
                    return func.decompose(*args, **kwargs)
            raise NotImplementedError(
                f"{packet} has no rule: register its FLOPs with tokenbytoken.measure.rule(torch.ops.{packet})"
            )
        out = func(*args, **kwargs)
        for tensor in tensors([args, kwargs]):
            if isinstance(tensor, nn.Parameter):
                self.weights.setdefault(storage(tensor), tensor)
        if func.is_view or packet in VIEWS:
            return out
        name = packet.__name__
        self.count.operations += 1
        self.count.calls_by_operation[name] += 1
        if listed:
            flops = rules[packet](out, *args, **kwargs)
            self.count.flops += flops
            self.count.flops_by_operation[name] += flops
        self._move(func, packet, out, args, kwargs)
        return out

    def _move(self, func: Any, packet: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the bytes of weights and state that the operation reads and writes."""
        arguments = [
            (i, tensor, argument.alias_info is not None and argument.alias_info.is_write)
            for i, argument in enumerate(func._schema.arguments)
            for tensor in tensors(args[i] if i < len(args) else kwargs.get(argument.name))
        ]
        in_place = {storage(tensor) for _, tensor, writes in arguments if writes}
        self.count.traffic += sum(shown(tensor) for tensor in tensors(out) if storage(tensor) not in in_place)
        reads_first = sorted(arguments, key=lambda entry: entry[2])  # as the operation does
        for i, tensor, writes in reads_first:
            key = storage(tensor)
            rows = out.numel() * out.element_size() if LOOKUPS.get(packet) == i else None
            passes = writes + (not writes or packet not in OVERWRITES)  # over these bytes
            self.count.traffic += shown(tensor) * passes if rows is None else rows
            if key in self.weights:
                if rows is None:
                    self.bytes_read += self.read[key].add(tensor)
                else:
                    self.looked_up[key] += rows
            elif key in self.state:
                if not writes or packet not in OVERWRITES:
                    self.count.state_bytes_read += self.touched[key].add(tensor) if rows is None else rows
                if writes and packet in SCATTERS:  # where it writes is data: only how much is known
                    self.count.state_bytes_written += args[SCATTERS[packet]].numel() * tensor.element_size()
                elif writes:
                    self.touched[key].add(tensor)
                    self.count.state_bytes_written += self.written[key].add(tensor)
        # A row that was looked up and read again with the whole table (tied weights) is one row.
        self.count.weight_bytes = self.bytes_read + sum(
            min(rows, self.weights[key].untyped_storage().nbytes() - self.read[key].bytes)
            for key, rows in self.looked_up.items()
        )
