"""What every measurement of the kit works with: a device, models of random weights, and two readings of the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from ...config import DecoderConfig
from ...cost import pass_cost
from ...decoder import Decoder
from ...layers import devices
from ...models import published
from ..calibration import Calibration
from ..counting import count
from ..timing import Timing, interleaved, timed

__all__ = ["Bench", "Case", "Unavailable"]


class Unavailable(Exception):
    """This device cannot do what is to be measured; the message says what it would need."""


@dataclass(frozen=True)
class Case:
    """A call to time, and the seconds that the calibration predicts for it, where it predicts any."""

    run: Callable[[], object]
    predicted: float | None = None


@dataclass
class Bench:
    """``where`` to measure; ``quick``: fewer and smaller cases; ``source``: real weights instead of random ones.

    ``layers`` cuts every model to so many (for tests).
    """

    where: torch.device
    quick: bool = False
    source: str | None = None
    layers: int | None = None
    calibrations: dict[torch.dtype, Calibration] = field(default_factory=dict)

    @cached_property
    def kind(self) -> devices.Kind:
        return devices.kind(self.where)

    def model(self, config: DecoderConfig) -> Decoder:
        """A decoder of this shape, in float32, with random weights (on a CPU the same million over and over)."""
        if self.layers is not None:
            config = dataclasses.replace(config, layers=config.layers[: self.layers])
        with torch.device("meta"):
            model = Decoder(config)
        made: dict[int, Tensor] = {}  # by what it replaces: a head may be the embedding
        kept: list[Tensor] = []  # so that no id comes twice
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        if id(tensor) not in made:
                            made[id(tensor)] = self._like(tensor)
                            kept.append(tensor)
                        held[name] = made[id(tensor)]  # type: ignore[assignment]
        return model

    def _like(self, tensor: Tensor) -> Tensor:
        """Numbers in place of a tensor that has none: ones for norms and biases."""
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.where)
        if tensor.dim() < 2:
            new.fill_(1)
        else:
            self._fill(new)
        return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new

    def smollm2(self) -> Decoder:
        """SmolLM2-135M in float32: of random weights, or the real ones."""
        if self.source is None:
            return self.model(published["smollm2-135m"])
        from ...checkpoints import load

        return load(self.source, torch.float32, self.where).requires_grad_(False)

    def _fill(self, tensor: Tensor) -> None:
        if not self.kind.on_host:
            tensor.normal_(std=0.02)
            return
        flat, block = tensor.view(-1), 2**20
        some = torch.randn(block, generator=torch.Generator().manual_seed(0)).mul_(0.02)
        for first in range(0, len(flat), block):
            flat[first : first + block].copy_(some[: len(flat) - first])

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers that are not all alike: a constant draws less power."""
        made = torch.empty(shape, dtype=dtype, device=self.where)
        self._fill(made)
        return made

    def passes(self, model: Decoder, batch: int, context: int, new: int) -> Case:
        """A pass of ``new`` tokens for each of ``batch`` sequences that hold ``context``; always at the same place."""
        tokens = torch.ones(batch, new, dtype=torch.int64, device=self.where)
        state = model.new_state(batch, context + new)
        state.length = context  # the clock does not care what a cache holds
        mark = state.mark()

        def run() -> Tensor:
            state.rewind(mark)
            return model(tokens, state, logits="last", checked=True)

        size = model.dtype.itemsize
        cost = pass_cost(
            model.config, batch, context, new, recipe="fp32" if size == 4 else "bf16", state_bytes_per_element=size
        )
        calibration = self.calibrations.get(model.dtype)
        if calibration is None:
            return Case(run)
        operations = count(run, state=state).operations
        flops = cost.flops
        return Case(
            run, float(calibration.predict_pass(cost.weight_bytes, flops, batch * new, operations, cost.state_bytes))
        )

    def reading(self) -> dict[str, float]:
        """Bytes/s of one large matrix, FLOP/s of one large product: large enough that starting them does not count."""
        rows, side = (40_000, 1024) if self.kind.on_host else (65_536, 8192)
        if self.layers is not None:
            rows, side = 64, 64
        dtype = torch.float32 if self.kind.on_host else self.kind.half
        columns = 640 if self.kind.on_host else 8192
        tall, square = self.random(rows, columns, dtype=dtype), self.random(side, side, dtype=dtype)
        one = self.random(1, columns, dtype=dtype)
        ways: Mapping[str, Callable[[], object]] = {
            "bandwidth": lambda: nn.functional.linear(one, tall),
            "rate": lambda: square @ square,
        }
        times = {name: timed(way, repeats=5, warmup=2, device=self.where).median for name, way in ways.items()}
        return {"bandwidth": tall.nbytes / times["bandwidth"], "rate": 2 * side**3 / times["rate"]}

    def time(self, cases: Mapping[str, Case]) -> dict[str, Timing]:
        """Medians of five interleaved rounds (three where quick), after two to warm up."""
        calls = {name: case.run for name, case in cases.items()}
        return interleaved(calls, repeats=3 if self.quick else 5, warmup=2, device=self.where)
