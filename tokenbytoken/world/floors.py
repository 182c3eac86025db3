"""The floor of a measurement, by the package's own model of time, and how far above it others measured.

>>> from .measurements import measurements
>>> row = next(row for row in measurements if row.id == "P01" and row.gpus == 1)
>>> f"{1e3 * floor(row).seconds:.2f} ms, measured {ratio(row):.2f} times that"
'7.37 ms, measured 1.45 times that'
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..config import DecoderConfig, distinct
from ..cost import (
    PassTime,
    Placement,
    all_reduce_seconds,
    all_to_all_seconds,
    find_accelerator,
    footprint_per_gpu,
    predict,
    state_bytes,
    working_memory_per_gpu,
)  # fmt: skip
from ..cost.prediction import Launched
from .measurements import KINDS, Kind, Measurement, Message, Rate, Room, Stored, Timed, measurements

__all__ = ["binds", "floor", "launched", "middle", "ratio", "reached", "room", "rows_of", "stored", "typical"]


def rows_of(kind: Kind, rows: Iterable[Measurement] = measurements) -> tuple[Measurement, ...]:
    """The rows of a kind that count: not those that set a constant of the package, nor those put aside.

    ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}: one of {', '.join(KINDS)}")
    return tuple(row for row in rows if row.kind == kind and not row.sets and not row.aside)


def reached(kind: Kind, rows: Iterable[Measurement] = measurements) -> tuple[float, float]:
    """The least and the greatest :func:`ratio` of the rows of a kind, rounded outward to two digits.

    A floor of x seconds was measured, elsewhere, as something between ``low * x`` and ``high * x``.
    Which rows count: :func:`rows_of`. ValueError for a kind that has none.
    """
    ratios = [ratio(row) for row in rows_of(kind, rows)]
    if not ratios:
        raise ValueError(f"no row of the kind {kind!r}")
    return _two_digits(min(ratios), math.floor), _two_digits(max(ratios), math.ceil)


def typical(kind: Kind, rows: Iterable[Measurement] = measurements) -> tuple[float, float]:
    """The range of the middle half of the ratios of a kind, between their quartiles, to two digits."""
    ratios = [ratio(row) for row in rows_of(kind, rows)]
    if len(ratios) < 2:
        raise ValueError(f"fewer than two rows of the kind {kind!r}")
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return _two_digits(low, round), _two_digits(high, round)


def middle(kind: Kind, rows: Iterable[Measurement] = measurements) -> float:
    """The median :func:`ratio` of the rows of a kind: half of them lie below it."""
    return statistics.median(ratio(row) for row in rows_of(kind, rows))


def _two_digits(value: float, rounded: Callable[[float], int]) -> float:
    digits = 1 - math.floor(math.log10(value))
    return round(rounded(value * 10**digits) * 10.0**-digits, digits)


def ratio(row: Measurement) -> float:
    """How far the world is from the package: 1 is agreement, 2 is twice the time.

    Seconds measured, for each second of the floor. For a :class:`~tokenbytoken.world.measurements.Room` what the
    package counts as free, for each token or byte that was; for what is
    :class:`~tokenbytoken.world.measurements.Stored` the bytes that were, for each one counted; for a
    :class:`~tokenbytoken.world.measurements.Rate` that of the data sheet, for the one reached.
    """
    if isinstance(row, Timed | Message):
        return row.seconds / floor(row).seconds
    if isinstance(row, Room):
        return room(row) / (row.tokens or row.bytes or math.nan)
    if isinstance(row, Stored):
        return row.bytes / stored(row)
    assert isinstance(row, Rate)
    gpu = find_accelerator(row.accelerator)
    return (gpu.flops_at(row.dtype, math.inf) if row.dtype else gpu.bandwidth_at(0)) / row.per_second


def binds(row: Timed | Message) -> str:
    """The largest term of the floor."""
    return floor(row).binds


def launched(row: Timed) -> float | None:
    """:func:`ratio` to the floor with what others measured for starting each operation; None where that is not known.

    It is known for NVIDIA's data-centre cards, and counted where the row says how its operations are started.
    """
    if row.launched is None or find_accelerator(row.accelerator).launch is None:
        return None
    return row.seconds / _pass(row, row.launched).seconds


def floor(row: Timed | Message) -> PassTime:
    """The least time that the package's model of time allows a row, from data sheets alone."""
    return _pass(row) if isinstance(row, Timed) else _message(row)


def _message(row: Message) -> PassTime:
    if row.collective == "all-to-all":
        seconds = all_to_all_seconds(row.size, row.gpus, row.accelerator)
    else:
        seconds = all_reduce_seconds(row.size, row.gpus, row.accelerator, row.algorithm)
    return PassTime(memory_seconds=0.0, compute_seconds=0.0, communication_seconds=seconds)


def _pass(row: Timed, started: Launched | None = None) -> PassTime:
    time = predict(
        row.config,
        row.accelerator,
        row.batch_size,
        row.context,
        new_tokens=row.new_tokens,
        gpus=row.gpus,
        tensor_parallel=row.tensor_parallel,
        recipe=row.recipe,
        state_bytes_per_element=row.state_bytes_per_element,
        causal=True,
        cache=row.cache,
        experts=row.experts,
        launched=started,
    )
    if row.weight_sizes is not None:
        fewer = time.cost.weight_bytes - _weights_read(row.config, row.batch_size * row.new_tokens, row.weight_sizes)
        saved = fewer / (row.tensor_parallel or row.gpus)
        rate = find_accelerator(row.accelerator).bandwidth_at(0)
        time = replace(time, memory_seconds=time.memory_seconds - saved / rate)
    return replace(time, communication_seconds=0.0) if row.own_messages else time


def _weights_read(config: DecoderConfig, tokens: int, sizes: Mapping[str, float]) -> float:
    """Bytes of the weights of a pass: of copies those expected, of an embedding only the rows looked up."""
    total = 0.0
    for w in config.weights():
        size = sizes.get(w.role, sizes[""])
        if w.role == "embedding" and not config.tie_embeddings:
            total += min(tokens, w.rows) * w.columns * size
        else:
            total += distinct(w.copies, w.used, tokens) * w.area * size
    return total


def room(row: Room) -> float:
    """Tokens of state that fit in all GPUs, or bytes left in each, by the package's estimate of working memory."""
    placement = Placement(
        gpus=row.gpus,
        tensor_parallel=row.tensor_parallel,
        recipe=row.recipe,
        state_bytes_per_element=row.state_bytes_per_element,
        cache=row.cache,
        experts=row.experts,
    )
    size = footprint_per_gpu(
        row.config,
        gpus=row.gpus,
        tensor_parallel=row.tensor_parallel,
        recipe=row.recipe,
        state_bytes_per_element=row.state_bytes_per_element,
        cache=row.cache,
        experts=row.experts,
    )
    memory = find_accelerator(row.accelerator).memory_bytes

    def left(tokens: int) -> float:
        return memory - working_memory_per_gpu(row.config, row.accelerator, placement, tokens).bytes - size.weights

    if row.tokens is None:
        return left(row.tokens_a_pass or 1)
    if row.tokens_a_pass is not None:
        return left(row.tokens_a_pass) / size.per_token * size.dealt_to
    # The prompt's own pass grows with it: what is left falls in a straight line.
    a_token = left(1) - left(2)
    return (left(1) + a_token - size.per_sequence) / (size.per_token + a_token)


def stored(row: Stored) -> float:
    """Bytes of the weights on each GPU, or of a reader's state."""
    if row.context:
        growing = state_bytes(row.config, 1, row.context, row.state_bytes_per_element)
        return growing - state_bytes(row.config, 1, 0, row.state_bytes_per_element)
    return footprint_per_gpu(row.config, gpus=row.gpus, recipe=row.recipe).weights
