"""What the parity tests under fuzz share: settings, the pair of models that is compared, and how it is."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from families import assert_close, feed, ours, random_tokens, reference_logits
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

import tokenbytoken as tbt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Derandomised: the same configs on every machine and in every run, so that a red run can be repeated.
fuzz = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def pair(
    family: Callable[..., PreTrainedModel], config: dict[str, Any], seed: int
) -> tuple[PreTrainedModel, tbt.Decoder]:
    """The reference and this package's model, which read config and weights as transformers wrote them."""
    reference = family(seed, **config)
    with tempfile.TemporaryDirectory() as folder:
        return reference, ours(reference, Path(folder))


def cut(data: st.DataObject, length: int, least: int = 0, most: int = 6) -> list[int]:
    """A random chunking, by ``least`` to ``most`` cuts: any sizes that sum to ``length``."""
    ends = sorted(data.draw(st.sets(st.integers(1, length - 1), min_size=least, max_size=most)))
    return [b - a for a, b in itertools.pairwise([0, *ends, length])]


def equals_however_fed(
    reference: PreTrainedModel, model: tbt.Decoder, tokens: Tensor, chunks: list[int], tolerance: float
) -> None:
    """All tokens (B, T) at once, one by one and in chunks, against the reference's one pass."""
    want = reference_logits(reference, tokens)
    assert want.abs().max() > 0.5  # real numbers, not noise around zero
    assert_close(model(tokens), want, tolerance)
    for sizes in ([1] * tokens.shape[1], chunks):
        assert_close(feed(model, tokens, sizes), want, tolerance)


def left_padded(length: int, padding: Sequence[int], seed: int) -> tuple[list[Tensor], Tensor]:
    """Random rows of unequal length, (1, length - pads) each, and the batch that they make, (B, length)."""
    rows = [random_tokens(1, length - pads, seed=seed + i) for i, pads in enumerate(padding)]
    return rows, torch.cat([F.pad(row, (pads, 0)) for row, pads in zip(rows, padding, strict=True)])
