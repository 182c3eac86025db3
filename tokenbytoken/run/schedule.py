"""Who is in a pass of a server, what the pass costs, and what became of each request. Nothing here runs a model.

Requests queue; a policy says who is in the next pass and with how many tokens; a cost function says how long it takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from .._numbers import not_negative, positive, whole
from ..config import DecoderConfig
from ..cost import Accelerator, communication_seconds, find_accelerator, footprint_per_gpu, pass_cost
from ..cost import roofline as pass_time

__all__ = [
    "Cost",
    "PassRecord",
    "Piece",
    "Policy",
    "Record",
    "Request",
    "Row",
    "Summary",
    "Trace",
    "chunked_prefill",
    "continuous_batching",
    "queue",
    "roofline",
    "static_batching",
]


# --- Requests ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A prompt of token ids that arrives at a time (seconds) and asks for so many tokens."""

    arrival: float
    prompt: Sequence[int]
    max_new_tokens: int

    def __post_init__(self) -> None:
        _set(self, arrival=not_negative("arrival", self.arrival))
        if not len(self.prompt):
            raise ValueError("the prompt is empty: it needs at least one token")
        _set(self, max_new_tokens=whole("max_new_tokens", self.max_new_tokens))


def queue(
    prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], *, rate: float, seed: int
) -> list[Request]:
    """The prompts as requests that arrive at random, ``rate`` a second on average (a Poisson process).

    ``max_new_tokens`` is one number for all, or one for each. Equal seeds give equal queues.
    """
    rate = positive("rate", rate)
    given = np.array(max_new_tokens, dtype=object)
    wanted = given.tolist() if given.ndim else [given.item()] * len(prompts)  # each is checked by its request
    if len(wanted) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts, but {len(wanted)} values of max_new_tokens")
    arrivals = np.random.default_rng(seed).exponential(1 / rate, len(prompts)).cumsum().tolist()
    return [Request(*item) for item in zip(arrivals, prompts, wanted, strict=True)]


# --- What a pass costs -------------------------------------------------------------------------------


class Row(NamedTuple):
    """What one sequence brings to a pass: the tokens it holds, and the new ones it pushes."""

    context: int
    new_tokens: int


Cost = Callable[[Sequence[Row]], float]  # seconds of a pass of these rows


def roofline(
    config: DecoderConfig,
    accelerator: Accelerator | str,
    *,
    gpus: int = 1,
    recipe: str = "bf16",
    state_bytes_per_element: float = 2,
    causal: bool = True,
) -> Cost:
    """The cost function of a model on a machine: the pass of :func:`~tokenbytoken.cost.predict`, for unequal rows.

    The weights are read once for all rows; FLOPs and state add up over them. One row of logits is counted
    for each sequence. ``causal`` counts only the pairs of query and key that the mask leaves.
    """
    gpu = find_accelerator(accelerator)
    dtype = gpu.compute_dtype("fp32" if recipe == "fp32" else "bf16")
    size = footprint_per_gpu(config, gpus=gpus, recipe=recipe, state_bytes_per_element=state_bytes_per_element)

    def seconds(rows: Sequence[Row]) -> float:
        n = sum(row.new_tokens for row in rows)
        parts = [
            pass_cost(config, count, context, new_tokens, recipe=recipe, causal=causal)
            for (context, new_tokens), count in Counter(rows).items()
        ]
        fp8 = sum(part.flops_fp8 for part in parts)
        other = sum(part.flops for part in parts) - fp8
        flops = {dtype: other / gpus} | ({"fp8": fp8 / gpus} if fp8 else {})
        moved = pass_cost(config, 1, 0, n, recipe=recipe).weight_bytes / gpus
        moved += sum((row.context + row.new_tokens) * size.per_token + 2 * size.per_sequence for row in rows)
        messages = communication_seconds(config, gpu, n, gpus=gpus, logit_rows=len(rows))
        return pass_time(gpu, moved, flops, n, messages=messages).seconds

    return seconds


# --- Policies ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Who is in the next pass, and with how many tokens.

    ``max_batch``: sequences admitted at one time, first come, first served.
    ``token_budget``: tokens a pass may push; rows that decode come first, what is left goes to prompts.
    None reads every prompt whole, in one pass.
    ``static``: a batch is one tensor from its first pass to its last. Prompts are padded to the longest,
    nobody joins, and a row that has finished is computed on until the last one has.
    """

    max_batch: int
    token_budget: int | None = None
    static: bool = False

    def __post_init__(self) -> None:
        _set(self, max_batch=whole("max_batch", self.max_batch))
        if self.token_budget is None:
            return
        _set(self, token_budget=whole("token_budget", self.token_budget))
        if self.static:
            raise ValueError("a static batch reads its prompts whole: it takes no token_budget")
        if self.token_budget < self.max_batch:
            raise ValueError(
                f"token_budget {self.token_budget} is below max_batch {self.max_batch}: a full batch could not decode"
            )


def static_batching(max_batch: int) -> Policy:
    """Whoever has arrived forms a batch; the next batch starts when the last row of this one has finished."""
    return Policy(max_batch=max_batch, static=True)


def continuous_batching(max_batch: int) -> Policy:
    """Rows join and leave between any two passes (Yu et al. 2022, Orca, OSDI); prompts are read whole."""
    return Policy(max_batch=max_batch)


def chunked_prefill(max_batch: int, token_budget: int) -> Policy:
    """Continuous batching with prompts cut to the budget of a pass (Agrawal et al. 2024, arXiv 2403.02310)."""
    return Policy(max_batch=max_batch, token_budget=token_budget)


# --- What happened -----------------------------------------------------------------------------------


class Piece(NamedTuple):
    """One row of a pass: which request, doing what, with how many tokens (pads included; "idle": all in vain)."""

    request: int
    kind: Literal["prefill", "decode", "idle"]
    new_tokens: int


@dataclass(frozen=True)
class PassRecord:
    """One pass: when it started, how long it took, and its rows."""

    start: float
    seconds: float
    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        """Tokens pushed through the weights, the pass's n."""
        return sum(piece.new_tokens for piece in self.pieces)


@dataclass
class Record:
    """What became of a request: its tokens, and when each one came. Without a model ``tokens`` stays empty."""

    arrival: float
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        return self.times[0]

    @property
    def finish(self) -> float:
        return self.times[-1]

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival to the first token: waiting, and reading the prompt."""
        return self.first_token - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Seconds between each token and the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def time_per_token(self) -> float | None:
        """Mean seconds of a token after the first; None for an answer of one token."""
        return sum(self.gaps) / len(self.gaps) if self.gaps else None


@dataclass(frozen=True)
class Summary:
    """A run in numbers; times in seconds.

    ``throughput``: tokens of answers a second, from the first arrival to the last token; ``math.inf`` where no
    time passed.
    ``busy``: share of the pushed tokens that were neither padding nor rows already finished.
    """

    time_to_first_token: float  # mean over requests
    worst_time_to_first_token: float
    time_per_token: float  # mean over all gaps
    longest_gap: float
    throughput: float
    busy: float


@dataclass(frozen=True)
class Trace:
    """A run: one record for each request, in the order they were given, and every pass."""

    records: tuple[Record, ...]
    passes: tuple[PassRecord, ...]

    def summary(self) -> Summary:
        """The run in numbers. Raises ValueError for a trace without requests."""
        if not self.records:
            raise ValueError("the trace holds no requests: there is nothing to sum up")
        first = [record.time_to_first_token for record in self.records]
        gaps = [gap for record in self.records for gap in record.gaps] or [0.0]
        seconds = max(record.finish for record in self.records) - min(record.arrival for record in self.records)
        # A token is pushed to good purpose if it belongs to a prompt or to an answer; the last of an answer never is.
        useful = sum(record.prompt_tokens + len(record.gaps) for record in self.records)
        return Summary(
            time_to_first_token=sum(first) / len(first),
            worst_time_to_first_token=max(first),
            time_per_token=sum(gaps) / len(gaps),
            longest_gap=max(gaps),
            throughput=sum(len(record.times) for record in self.records) / seconds if seconds else math.inf,
            busy=useful / sum(done.tokens for done in self.passes),
        )


def _set(frozen: object, **values: float) -> None:
    """Put what was checked in the place of what was given, in an object that is being made."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)
