"""Serving: many requests share the passes of one model, on a clock of predicted times.

There is no wall clock. A pass takes as long as a cost function says, so that a run is exact and repeats. The
model, where one is given, runs every pass on real batches, and each request gets the tokens it would get alone.

A pass may hold rows that decode and rows that read a piece of their prompt. It runs here as several model calls,
one for the rows that decode and one for each prompt, but is priced as one pass that pushes the tokens of all:
a fused implementation reads the weights once for them.

>>> from tokenbytoken.run import Request, continuous_batching, serve
>>> requests = [Request(arrival=0.0, prompt=(1, 2, 3), max_new_tokens=2), Request(0.5, (4, 5), 1)]
>>> trace = serve(requests, continuous_batching(max_batch=2), cost=lambda rows: 1.0)
>>> [record.times for record in trace.records]
[[1.0, 2.0], [2.0]]
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decoder import Decoder, DecoderState
from .generation import check_tokens, token_ids
from .sampling import Sampling, read_tokens
from .schedule import Cost, PassRecord, Piece, Policy, Record, Request, Row, Trace

__all__ = ["serve"]

_GREEDY = Sampling()


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
        self.device = model.device
        self.rows: list[_Sequence] = []
        self.state: DecoderState | None = None

    def run(self, pieces: Sequence[tuple[_Sequence, int]]) -> dict[_Sequence, int]:
        """Push so many tokens of each sequence; the token chosen for each that has its whole prompt in the cache."""
        reading = [(sequence, count) for sequence, count in pieces if sequence.unread]
        rows = list(self.rows)
        chosen = [self._decode()] if rows else []
        if self.static and reading:
            rows += [sequence for sequence, _ in reading]
            chosen.append(self._read_padded([sequence for sequence, _ in reading]))
        else:
            for sequence, count in reading:
                token = self._read(sequence, count)
                if token is not None:
                    rows.append(sequence)
                    chosen.append(token)
        # One read for all rows of the pass, when the device has everything to do.
        return dict(zip(rows, read_tokens(torch.cat(chosen)), strict=True)) if chosen else {}

    def _decode(self) -> Tensor:
        newest = torch.tensor([[row.record.tokens[-1]] for row in self.rows], device=self.device)
        return self._choose(newest, self.state)

    def _read(self, sequence: _Sequence, count: int) -> Tensor | None:
        prompt, start = sequence.request.prompt, sequence.pushed
        if sequence.state is None:
            sequence.state = self.model.new_state(1, len(prompt))
        piece = torch.as_tensor(prompt[start : start + count], device=self.device)[None]
        if count < sequence.unread:
            self.model(piece, sequence.state, logits="none", checked=True)
            return None
        return self._choose(piece, sequence.state)

    def _read_padded(self, sequences: list[_Sequence]) -> Tensor:
        padding = [sequence.padding for sequence in sequences]
        length = sequences[0].unread
        self.rows = sequences
        self.state = self.model.new_state(len(sequences), length + max(s.remaining for s in sequences), padding)
        prompts = torch.tensor([[0] * s.padding + list(s.request.prompt) for s in sequences], device=self.device)
        return self._choose(prompts, self.state)

    def _choose(self, tokens: Tensor, state: DecoderState | None) -> Tensor:
        return _GREEDY.choose(self.model(tokens, state, logits="last", checked=True)[:, -1])  # (rows,)

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
    ends = set(token_ids(eos_ids, "eos_ids"))
    if model is not None:
        for i, request in enumerate(requests):
            check_tokens(model, token_ids(request.prompt, f"the prompt of request {i}"), f"request {i}: ")
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
                sequence.done = not sequence.remaining or chosen.get(sequence) in ends
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
