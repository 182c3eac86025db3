"""Serving: requests that queue, policies that make passes of them, a clock of predicted times; and a paged cache.

There is no wall clock. A pass takes as long as a cost function says, so that a run is exact and repeats. The
model, where one is given, runs every pass on real batches, and each request gets the tokens it would get alone.

A pass may hold rows that decode and rows that read a piece of their prompt. It runs here as several model calls,
one for the rows that decode and one for each prompt, but is priced as one pass that pushes the tokens of all:
a fused implementation reads the weights once for them.

>>> requests = [Request(arrival=0.0, prompt=(1, 2, 3), max_new_tokens=2), Request(0.5, (4, 5), 1)]
>>> trace = serve(requests, continuous_batching(max_batch=2), cost=lambda rows: 1.0)
>>> [record.times for record in trace.records]
[[1.0, 2.0], [2.0]]
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch

from .._numbers import not_negative, positive, whole
from ..config import DecoderConfig
from ..cost import Accelerator, communication_seconds, find_accelerator, footprint_per_gpu, pass_cost
from ..decoder import Decoder, DecoderState
from .generation import _ids, sample

__all__ = [
    "BlockAllocator",
    "PassRecord",
    "Piece",
    "Policy",
    "Record",
    "Request",
    "Row",
    "Summary",
    "Trace",
    "Written",
    "chunked_prefill",
    "continuous_batching",
    "queue",
    "roofline",
    "serve",
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
        compute = (fp8 / gpu.flops_at("fp8", n) if fp8 else 0.0) + other / gpu.flops_at(dtype, n)
        moved = pass_cost(config, 1, 0, n, recipe=recipe).weight_bytes / gpus
        moved += sum((row.context + row.new_tokens) * size.per_token + 2 * size.per_sequence for row in rows)
        messages = communication_seconds(config, gpu, n, gpus=gpus, logit_rows=len(rows))
        return max(moved / gpu.bandwidth_at(round(moved)), compute / gpus) + messages

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


# --- The server --------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Sequence:
    """A request under way."""

    index: int
    request: Request
    record: Record
    padding: int = 0
    pushed: int = 0  # tokens in its cache, pads included
    done: bool = False
    state: DecoderState | None = None  # its own while its prompt is read, then a row of the batch

    @property
    def unread(self) -> int:
        """Tokens of the padded prompt not pushed yet."""
        return max(0, self.padding + len(self.request.prompt) - self.pushed)

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - len(self.record.times)


class _Runner:
    """Runs the pieces of a pass on the model; ``rows`` decode together, in the order of the state's rows."""

    def __init__(self, model: Decoder, static: bool) -> None:
        self.model = model
        self.static = static
        self.device = model.embed.weight.device
        self.rows: list[_Sequence] = []
        self.state: DecoderState | None = None

    def run(self, pieces: Sequence[tuple[_Sequence, int]]) -> dict[_Sequence, int]:
        """Push so many tokens of each sequence; the token chosen for each that has its whole prompt in the cache."""
        chosen = self._decode() if self.rows else {}
        reading = [(sequence, count) for sequence, count in pieces if sequence.unread]
        if self.static and reading:
            return self._read_padded([sequence for sequence, _ in reading])
        for sequence, count in reading:
            chosen |= self._read(sequence, count)
        return chosen

    def _decode(self) -> dict[_Sequence, int]:
        newest = torch.tensor([[row.record.tokens[-1]] for row in self.rows], device=self.device)
        return self._choose(self.rows, self.model(newest, self.state, logits="last"))

    def _read(self, sequence: _Sequence, count: int) -> dict[_Sequence, int]:
        prompt, start = sequence.request.prompt, sequence.pushed
        if sequence.state is None:
            sequence.state = self.model.new_state(1, len(prompt))
        piece = torch.tensor([list(prompt[start : start + count])], device=self.device)
        if count < sequence.unread:
            self.model(piece, sequence.state, logits="none")
            return {}
        return self._choose([sequence], self.model(piece, sequence.state, logits="last"))

    def _read_padded(self, sequences: list[_Sequence]) -> dict[_Sequence, int]:
        padding = [sequence.padding for sequence in sequences]
        length = sequences[0].unread
        self.rows = sequences
        self.state = self.model.new_state(len(sequences), length + max(s.remaining for s in sequences), padding)
        prompts = torch.tensor([[0] * s.padding + list(s.request.prompt) for s in sequences], device=self.device)
        return self._choose(sequences, self.model(prompts, self.state, logits="last"))

    @staticmethod
    def _choose(sequences: Sequence[_Sequence], logits: torch.Tensor) -> dict[_Sequence, int]:
        return dict(zip(sequences, sample(logits[:, -1]).tolist(), strict=True))

    def regroup(self, running: Sequence[_Sequence], leaving: bool) -> None:
        """Rows that finished leave the batch (if ``leaving``), sequences whose prompt has just been read join it."""
        stay = [i for i, row in enumerate(self.rows) if not (leaving and row.done)]
        if len(stay) < len(self.rows):
            self.state = self.state.select(stay) if self.state is not None and stay else None
            self.rows = [self.rows[i] for i in stay]
        joining = [s for s in running if s.state is not None and not s.unread and not s.done]
        if joining:
            self.rows = self.rows + joining
            states = [state for state in (self.state, *(s.state for s in joining)) if state is not None]
            length = max(state.length for state in states)
            self.state = DecoderState.concat(states, length + max(row.remaining for row in self.rows))
            for sequence in joining:
                sequence.state = None


@torch.inference_mode()
def serve(
    requests: Sequence[Request],
    policy: Policy,
    cost: Cost,
    model: Decoder | None = None,
    *,
    eos_ids: Collection[int] = (),
) -> Trace:
    """Serve all requests; the clock advances by ``cost(rows)`` seconds a pass.

    With a ``model`` every pass is run, greedily, and an answer ends early at a token of ``eos_ids``; without
    one only the times are worked out, and each answer has its ``max_new_tokens``. Requests that arrive during
    a pass are seen after it. Raises ValueError, before anything is run, for an empty queue or a token outside
    the vocabulary.
    """
    if not requests:
        raise ValueError("there are no requests to serve")
    eos_ids = _ids(eos_ids, "eos_ids")
    if model is not None:
        _check_tokens(requests, model.config.vocab_size)
    runner = None if model is None else _Runner(model, policy.static)
    records = [Record(request.arrival, len(request.prompt)) for request in requests]
    arriving = sorted(range(len(requests)), key=lambda i: requests[i].arrival)
    waiting = deque(_Sequence(i, requests[i], records[i]) for i in arriving)
    running: list[_Sequence] = []
    passes: list[PassRecord] = []
    clock = 0.0
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0].request.arrival)
        _admit(waiting, running, policy, clock)
        pieces = _plan(running, policy)
        seconds = cost([Row(sequence.pushed, count) for sequence, count in pieces])
        if not 0 <= seconds < math.inf:
            raise ValueError(f"the cost function gave {seconds!r} seconds for a pass")
        passes.append(PassRecord(clock, seconds, tuple(_piece(*piece) for piece in pieces)))
        clock += seconds

        chosen = {} if runner is None else runner.run(pieces)
        for sequence, count in pieces:
            sequence.pushed += count
            if not sequence.unread and not sequence.done:
                sequence.record.times.append(clock)
                if runner is not None:
                    sequence.record.tokens.append(chosen[sequence])
                sequence.done = not sequence.remaining or chosen.get(sequence) in eos_ids
        done = all(sequence.done for sequence in running)
        leaving = done or not policy.static
        if runner is not None:
            runner.regroup(running, leaving)
        if leaving:
            running = [sequence for sequence in running if not sequence.done]
    return Trace(tuple(records), tuple(passes))


def _admit(waiting: deque[_Sequence], running: list[_Sequence], policy: Policy, clock: float) -> None:
    if policy.static and running:
        return
    while waiting and waiting[0].request.arrival <= clock and len(running) < policy.max_batch:
        running.append(waiting.popleft())
    if policy.static:
        longest = max(len(sequence.request.prompt) for sequence in running)
        for sequence in running:
            sequence.padding = longest - len(sequence.request.prompt)


def _plan(running: Sequence[_Sequence], policy: Policy) -> list[tuple[_Sequence, int]]:
    """The next pass: (sequence, tokens it pushes). One for each that decodes, the rest of the budget to prompts."""
    pieces = [(sequence, 1) for sequence in running if not sequence.unread]
    left = math.inf if policy.token_budget is None else policy.token_budget - len(pieces)
    for sequence in running:
        if sequence.unread and left:
            count = int(min(sequence.unread, left))
            pieces.append((sequence, count))
            left -= count
    return pieces


def _piece(sequence: _Sequence, count: int) -> Piece:
    return Piece(sequence.index, "prefill" if sequence.unread else "idle" if sequence.done else "decode", count)


def _check_tokens(requests: Sequence[Request], vocab_size: int) -> None:
    for i, request in enumerate(requests):
        prompt = _ids(request.prompt, f"the prompt of request {i}")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < vocab_size:
                raise ValueError(f"request {i}: token id {token} is outside the vocabulary of {vocab_size}")


def _set(frozen: object, **values: float) -> None:
    """Put what was checked in the place of what was given, in an object that is being made."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


# --- The paged cache ---------------------------------------------------------------------------------


class Written(NamedTuple):
    """Where appended tokens go: a slot (block, place in it) for each, and the block to copy first, if any."""

    slots: list[tuple[int, int]]
    copy: tuple[int, int] | None  # (from, to): the old block is shared, and was about to be written


class BlockAllocator:
    """Hands out a cache in blocks of equal size, and knows which are shared (Kwon et al. 2023, arXiv 2309.06180).

    A sequence has a *block table*: entry i is the block that holds its tokens i · block_size and the following.
    Blocks lie anywhere. :meth:`fork` lets a new sequence begin with the blocks of another; a shared block is
    copied when one of its holders writes to it. The allocator keeps the books and holds no keys and values.

    All errors are ValueErrors that name the sequence or the shortage, and leave everything as it was.
    """

    def __init__(self, num_blocks: int, block_size: int, bytes_per_token: int) -> None:
        self.num_blocks, self.block_size = whole("num_blocks", num_blocks), whole("block_size", block_size)
        self.bytes_per_token = whole("bytes_per_token", bytes_per_token)
        self.tables: dict[Hashable, list[int]] = {}
        self.lengths: dict[Hashable, int] = {}
        self.references = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))  # the lowest block is handed out first

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def reserve(self, name: Hashable, tokens: int = 0) -> None:
        """Begin the sequence ``name`` with room for ``tokens`` tokens, none of them written yet."""
        if name in self.tables:
            raise ValueError(f"sequence {name!r} exists already")
        self.tables[name] = self._take(-(-whole("tokens", tokens, 0) // self.block_size))
        self.lengths[name] = 0

    def append(self, name: Hashable, tokens: int = 1) -> Written:
        """Add tokens at the end of a sequence, taking blocks as they are needed.

        If the block that the first of them falls into is shared, it is replaced by a new one: copy its content as
        ``copy`` says before writing to the slots.
        """
        table, length, tokens = self._table(name), self.lengths[name], whole("tokens", tokens)
        first = length // self.block_size
        shared = first < len(table) and self.references[table[first]] > 1
        missing = max(0, -(-(length + tokens) // self.block_size) - len(table))
        fresh = self._take(missing + shared)
        copy = None
        if shared:
            copy = table[first], fresh.pop(0)
            self.references[copy[0]] -= 1
            table[first] = copy[1]
        table.extend(fresh)
        self.lengths[name] = length + tokens
        where = (divmod(i, self.block_size) for i in range(length, length + tokens))
        return Written([(table[block], place) for block, place in where], copy)

    def fork(self, source: Hashable, name: Hashable, tokens: int | None = None) -> None:
        """Begin the sequence ``name`` with the first ``tokens`` tokens of ``source`` (all of them), copying nothing."""
        table, length = self._table(source), self.lengths[source]
        tokens = length if tokens is None else whole("tokens", tokens, 0)
        if name in self.tables:
            raise ValueError(f"sequence {name!r} exists already")
        if tokens > length:
            raise ValueError(f"sequence {source!r} holds {length} tokens: {tokens} of them cannot be shared")
        self.tables[name] = table[: -(-tokens // self.block_size)]
        self.lengths[name] = tokens
        for block in self.tables[name]:
            self.references[block] += 1

    def free(self, name: Hashable) -> None:
        """End a sequence; blocks that no other one holds can be handed out again."""
        for block in reversed(self._table(name)):
            self.references[block] -= 1
            if not self.references[block]:
                self._free.append(block)
        del self.tables[name], self.lengths[name]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the blocks in use, each counted once."""
        return (self.num_blocks - self.free_blocks) * self.block_size * self.bytes_per_token

    @property
    def used_bytes(self) -> int:
        """Bytes that hold a token, those of a shared token counted once."""
        filled: dict[int, int] = {}
        for name, table in self.tables.items():
            for i, block in enumerate(table):
                inside = min(self.block_size, max(0, self.lengths[name] - i * self.block_size))
                filled[block] = max(filled.get(block, 0), inside)
        return sum(filled.values()) * self.bytes_per_token

    @property
    def wasted_bytes(self) -> int:
        """Bytes reserved that hold no token."""
        return self.reserved_bytes - self.used_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that the sequences would use in addition if nothing were shared."""
        return sum(self.lengths.values()) * self.bytes_per_token - self.used_bytes

    def _table(self, name: Hashable) -> list[int]:
        if name not in self.tables:
            raise ValueError(f"there is no sequence {name!r}")
        return self.tables[name]

    def _take(self, count: int) -> list[int]:
        if count > self.free_blocks:
            raise ValueError(f"{count} more blocks are needed, {self.free_blocks} of {self.num_blocks} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self.references[block] = 1
        return taken
