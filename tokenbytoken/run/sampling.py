"""From logits to a token: the distribution that is drawn from, and the draw.

On a GPU the host runs ahead of the device until it reads a result. What is inside here reads none: a row whose logits
are not finite gets the token −1, and whoever reads the tokens learns of it in the same read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._numbers import not_negative, whole
from ..layers import devices

__all__ = ["Sampling", "distribution", "draw", "read_tokens", "sample"]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits; :func:`sample` says what the three numbers mean.

    Raises ValueError for a ``temperature`` below 0, ``top_k`` below 1, ``top_p`` outside 0 … 1, and what is no number.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        plain = {
            "temperature": not_negative("temperature", self.temperature),
            "top_k": None if self.top_k is None else whole("top_k", self.top_k),
            "top_p": not_negative("top_p", self.top_p),
        }
        if self.top_p > 1:
            raise ValueError(f"top_p must lie between 0 and 1, not {self.top_p}")
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, and nothing drawn."""
        return self.temperature < torch.finfo(torch.float32).tiny or self.top_p == 0 or self.top_k == 1

    def choose(self, logits: Tensor, generators: Sequence[torch.Generator | None] = (None,)) -> Tensor:
        """One token for each row of logits (B, V) → (B,) int64 on their device; −1 for a row that is not finite.

        ``generators``: one for all rows, or one for each.
        """
        if self.is_greedy:
            return _likeliest(logits).where(_finite(logits), -1)
        candidates, order = self._candidates(logits)
        places = draw(candidates, generators)
        return order.gather(-1, places.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(places >= 0, -1)

    def distribution(self, logits: Tensor) -> Tensor:
        """What :meth:`choose` draws from: logits (…, V) → (…, V), float32 or float64; NaN where they are not finite."""
        if self.is_greedy:
            certain = torch.zeros(logits.shape, dtype=_wide(logits), device=logits.device)
            certain.scatter_(-1, _likeliest(logits).unsqueeze(-1), 1)
            return certain.masked_fill(~_finite(logits).unsqueeze(-1), torch.nan)
        candidates, order = self._candidates(logits)
        candidates = candidates / candidates.sum(-1, keepdim=True)
        return torch.zeros_like(candidates).scatter(-1, order, candidates)

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What a draw may choose from, likeliest first: probabilities (…, V), not normalised again; their tokens."""
        logits = logits.to(_wide(logits))
        # Shifted first: the largest stays 0, not inf. One that is not finite makes the whole row NaN.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        # A stable sort keeps the lowest index first among equals, so that cuts at a tie agree with greedy choice.
        sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            sorted_logits[..., self.top_k :] = -torch.inf
        probabilities = sorted_logits.softmax(-1)
        if self.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities  # mass of all likelier tokens
            beyond = before >= self.top_p
            beyond[..., 0] = False  # the likeliest token stays, however small top_p is
            probabilities = probabilities.masked_fill(beyond, 0)
        return probabilities, order


def draw(weights: Tensor, generators: Sequence[torch.Generator | None] = (None,)) -> Tensor:
    """A place of each row of weights (…, n), with probability in proportion → (…,) int64; −1 where one is not finite.

    As :func:`torch.multinomial` draws: of exponential clocks with these rates, the one that rings first. But that
    reads its input on the host, twice. ``generators``: one for all rows, or one for each row of the first axis.
    """
    clocks = torch.empty_like(weights)
    if len(generators) == 1:
        clocks.exponential_(generator=generators[0])
    else:
        for row, generator in zip(clocks, generators, strict=True):
            row.exponential_(generator=generator)
    return (weights / clocks).argmax(-1).where(weights.isfinite().all(-1), -1)


def read_tokens(chosen: Tensor) -> list[int]:
    """The chosen tokens (B,) on the host: the one time in a pass that it waits for the device.

    Raises ValueError if one of them is −1, which says that its logits were not finite.
    """
    tokens: list[int] = devices.read(chosen)
    _check_finite(all(token >= 0 for token in tokens))
    return tokens


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose one token for each row of logits (B, V) → (B,) int64.

    ``temperature`` 0 takes the largest logit, the lowest index on ties. Otherwise logits / temperature are cut
    to the ``top_k`` largest, then to the smallest set whose probability reaches ``top_p`` (the token that
    crosses the threshold stays; Holtzman et al. 2019, arXiv 1904.09751), and one token is drawn. Raises ValueError
    as :class:`Sampling` does, and for logits that are not finite.
    """
    chosen = Sampling(temperature, top_k, top_p).choose(logits, (generator,))
    _check_finite(bool(devices.read((chosen >= 0).all())))
    return chosen


def distribution(logits: Tensor, temperature: float = 0.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """The probabilities with which :func:`sample` draws: logits (…, V) → (…, V), float32 or float64.

    At temperature 0 all of it lies on the greedy token. Raises ValueError as :func:`sample` does.
    """
    probabilities = Sampling(temperature, top_k, top_p).distribution(logits)
    _check_finite(bool(devices.read(probabilities.isfinite().all())))
    return probabilities


def _likeliest(logits: Tensor) -> Tensor:
    """Index of the largest entry of each row, the lowest on ties (torch leaves that choice open)."""
    return (logits == logits.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)


def _finite(logits: Tensor) -> Tensor:
    return logits.amax(-1).isfinite()  # amax hands a NaN on


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _check_finite(finite: bool) -> None:
    if not finite:
        raise ValueError("the logits are not finite: the model's weights or its dtype are at fault")
