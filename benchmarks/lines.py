"""One line of the comparison: a kind of work, the ways to do it, and how long each took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

import tokenbytoken as tbt
from tokenbytoken.layers import MoE
from tokenbytoken.measure import interleaved

__all__ = ["OURS", "Line", "Ways", "line", "products"]

#: What is compared, by name. The first is this package's way.
Ways = dict[str, Callable[[], object]]

OURS = "this package"


@dataclass(frozen=True)
class Line:
    """``seconds`` of one call of each way; the first is this package's."""

    model: str
    work: str
    seconds: dict[str, float]

    def faster_than(self, way: str) -> float:
        """How many times this package's speed is that of ``way``: above 1 it is faster."""
        return self.seconds[way] / next(iter(self.seconds.values()))

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        own, *rest = self.seconds
        beside = "".join(f"\n    {self.faster_than(way):6.2f} × the speed of {way}" for way in rest)
        return f"{self.model}, {self.work}: {1e3 * self.seconds[own]:.1f} ms ({own}){beside}"


def line(model: str, work: str, ways: Ways, where: torch.device, *, repeats: int) -> Line:
    """Medians of interleaved calls, after two of each that do not count."""
    times = interleaved(ways, repeats=repeats, warmup=2, device=where)
    return Line(model, work, {name: time.median for name, time in times.items()})


def products(model: tbt.Decoder, rows: int, last_rows: int) -> Callable[[], object]:
    """A call that pushes ``rows`` rows through each matrix of the layers, and ``last_rows`` through the head.

    Of a mixture of experts one row needs k experts and the shared one; only for one row is it known how many all need.
    Raises ValueError for more rows of a mixture.
    """
    matrices: list[torch.Tensor] = []
    for module in model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            matrices.append(module.weight)
        elif isinstance(module, MoE):
            if rows > 1:
                raise ValueError("how many experts several rows need depends on the rows")
            chosen = range(module.config.experts_per_token)
            experts = (module.experts.gate_proj, module.experts.up_proj, module.experts.down_proj)
            matrices += [weight[e] for weight in experts for e in chosen]
    where = model.head.weight.device
    inputs = {width: torch.ones(rows, width, device=where) for width in {m.shape[1] for m in matrices}}
    last = torch.ones(last_rows, model.config.hidden_size, device=where)

    def run() -> None:
        for matrix in matrices:
            F.linear(inputs[matrix.shape[1]], matrix)
        F.linear(last, model.head.weight)

    return run
