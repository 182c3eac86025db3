"""Serving: times that can be worked out by hand, tokens equal to those of each request alone, books that balance.

The tokens are compared with greedy generation by transformers on the same tiny checkpoint, and on the real model
with this package's own solo runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import llama, ours

import tokenbytoken as tbt
from tokenbytoken.run import (
    BlockAllocator,
    Policy,
    Request,
    Row,
    Trace,
    chunked_prefill,
    continuous_batching,
    queue,
    roofline,
    serve,
    static_batching,
)
from tokenbytoken.run import serving as server
from tokenbytoken.run.sampling import read_tokens

POLICIES = {
    "static": static_batching(3),
    "continuous": continuous_batching(3),
    "chunks of 3": chunked_prefill(3, token_budget=3),
    "chunks of 8": chunked_prefill(3, token_budget=8),
    "one at a time": continuous_batching(1),
}


def one_second(rows: Sequence[Row]) -> float:
    return 1.0


def per_token(rows: Sequence[Row]) -> float:
    return float(sum(row.new_tokens for row in rows))


def mixed_queue(vocab: int = 97, count: int = 7, seed: int = 3) -> list[Request]:
    """Prompts of 1 to 23 tokens, answers of 1 to 9."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(vocab) for _ in range(draw.choice((1, 2, 5, 17, 23)))] for _ in range(count)]
    return queue(prompts, [draw.choice((1, 2, 4, 9)) for _ in range(count)], rate=0.1, seed=seed)


# --- the clock ---------------------------------------------------------------------------------------


def test_static_batch_by_hand() -> None:
    requests = [Request(0.0, (1,) * 4, 3), Request(0.0, (1,) * 2, 1), Request(0.5, (1,) * 3, 2)]
    trace = serve(requests, static_batching(2), per_token)
    # Two rows padded to 4: a prefill of 8 tokens, then two passes of 2, one row of them in vain; then the third.
    assert [record.times for record in trace.records] == [[8.0, 10.0, 12.0], [8.0], [15.0, 16.0]]
    assert [done.tokens for done in trace.passes] == [8, 2, 2, 3, 1]
    kinds = [[piece.kind for piece in done.pieces] for done in trace.passes]
    assert kinds == [["prefill", "prefill"], ["decode", "idle"], ["decode", "idle"], ["prefill"], ["decode"]]
    assert trace.summary().busy == (4 + 2 + 3 + 2 + 0 + 1) / 16


def test_continuous_batch_by_hand() -> None:
    requests = [Request(0.0, (1,) * 4, 3), Request(0.0, (1,) * 2, 1), Request(0.5, (1,) * 3, 2)]
    trace = serve(requests, continuous_batching(2), per_token)
    # The second request leaves after the first pass; the third, seen then, takes its place and is read whole.
    assert [record.times for record in trace.records] == [[6.0, 10.0, 12.0], [6.0], [10.0, 12.0]]
    assert [done.tokens for done in trace.passes] == [6, 4, 2]
    assert trace.summary().busy == 1.0


def test_chunks_by_hand() -> None:
    requests = [Request(0.0, (1,) * 2, 4), Request(1.0, (1,) * 5, 2)]
    trace = serve(requests, chunked_prefill(2, token_budget=3), per_token)
    # The second is read as 2 + 2 + 1 beside the first row's one token a pass; alone at the end it decodes.
    assert [[piece.new_tokens for piece in done.pieces] for done in trace.passes] == [[2], [1, 2], [1, 2], [1, 1], [1]]
    assert [record.times for record in trace.records] == [[2.0, 5.0, 8.0, 10.0], [10.0, 11.0]]
    summary = trace.summary()
    assert summary.time_to_first_token == (2.0 + 9.0) / 2
    assert summary.worst_time_to_first_token == 9.0
    assert summary.longest_gap == 3.0
    assert summary.time_per_token == (3.0 + 3.0 + 2.0 + 1.0) / 4
    assert summary.throughput == 6 / 11


def test_clock_jumps_to_the_next_arrival() -> None:
    trace = serve([Request(5.0, (1,), 1), Request(20.0, (1,), 1)], continuous_batching(4), one_second)
    assert [(done.start, done.seconds) for done in trace.passes] == [(5.0, 1.0), (20.0, 1.0)]
    assert [record.time_to_first_token for record in trace.records] == [1.0, 1.0]
    assert trace.records[0].time_per_token is None


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_nothing_is_lost_or_done_twice(policy: Policy) -> None:
    requests = mixed_queue(count=20)
    trace = serve(requests, policy, per_token)
    for i, (request, record) in enumerate(zip(requests, trace.records, strict=True)):
        pieces = [(done, piece) for done in trace.passes for piece in done.pieces if piece.request == i]
        read = [piece.new_tokens for _, piece in pieces if piece.kind == "prefill"]
        assert sum(read) >= len(request.prompt) if policy.static else sum(read) == len(request.prompt)
        assert sum(piece.kind == "decode" for _, piece in pieces) == request.max_new_tokens - 1
        assert policy.static or not any(piece.kind == "idle" for _, piece in pieces)
        assert len(record.times) == request.max_new_tokens
        assert min(done.start for done, _ in pieces) >= request.arrival == record.arrival
    for before, after in zip(trace.passes, trace.passes[1:], strict=False):
        assert after.start >= before.start + before.seconds
    assert all(len(done.pieces) <= policy.max_batch for done in trace.passes)
    if policy.token_budget:
        assert all(done.tokens <= policy.token_budget for done in trace.passes)
    first_starts = [min(d.start for d in trace.passes for p in d.pieces if p.request == i) for i in range(20)]
    assert first_starts == sorted(first_starts)  # the queue arrives in order, and is served in order


def test_queue_is_seeded_and_poisson() -> None:
    prompts = [(1, 2)] * 4000
    arrivals = [request.arrival for request in queue(prompts, 3, rate=2.0, seed=1)]
    assert arrivals == [request.arrival for request in queue(prompts, 3, rate=2.0, seed=1)]
    assert arrivals != [request.arrival for request in queue(prompts, 3, rate=2.0, seed=2)]
    gaps = torch.tensor(arrivals).diff()
    assert abs(gaps.mean() - 0.5) < 0.03  # mean and deviation of an exponential law are equal
    assert abs(gaps.std() - 0.5) < 0.03


# --- prices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-3.1-8b", {}),
        ("llama-3.1-405b", {"gpus": 8, "recipe": "fp8-ffn", "state_bytes_per_element": 1}),
        ("deepseek-v3", {"gpus": 8, "recipe": "fp8-block"}),
        ("jamba-1.5-large", {"gpus": 8, "recipe": "int8-experts"}),
    ],
)
@pytest.mark.parametrize(("batch", "context", "new"), [(1, 0, 1), (7, 5000, 1), (1, 4096, 512), (3, 0, 2000)])
def test_equal_rows_cost_what_predict_says(
    model: str, options: dict[str, Any], batch: int, context: int, new: int
) -> None:
    config = tbt.published[model]
    want = tbt.predict(config, "h200", batch, context, new_tokens=new, causal=True, **options).seconds
    got = roofline(config, "h200", **options)([Row(context, new)] * batch)
    assert got == pytest.approx(want, rel=1e-6)  # bytes are rounded once for each call


def test_a_mixed_pass_reads_the_weights_once() -> None:
    cost = roofline(tbt.published["llama-3.1-8b"], "h100")
    decode, chunk = [Row(1000, 1)] * 8, [Row(0, 200)]
    together, apart = cost(decode + chunk), cost(decode) + cost(chunk)
    assert cost(decode) < together < 1.02 * cost(decode)  # below the ridge the chunk rides along
    assert apart > 1.9 * cost(decode)


# --- the model behind it -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1, "head_dim": 32}], ids=["gqa", "mqa"])
def test_tokens_equal_those_of_transformers(policy: Policy, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = llama(seed=1, **changes)
    model = ours(reference, tmp_path)
    requests = mixed_queue()
    trace = serve(requests, policy, one_second, model)
    batches = {len(done.pieces) for done in trace.passes}
    assert policy.max_batch == 1 or max(batches) > 1  # rows really shared passes
    for request, record in zip(requests, trace.records, strict=True):
        prompt = torch.tensor([list(request.prompt)])
        whole = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert record.tokens == whole[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_an_end_token_ends_an_answer(policy: Policy, tmp_path: Path) -> None:
    model = ours(llama(seed=1), tmp_path)
    requests = mixed_queue()
    plain = [tbt.generate(model, list(r.prompt), r.max_new_tokens) for r in requests]
    eos = max(plain, key=len)[1]  # a token that does occur
    trace = serve(requests, policy, one_second, model, eos_ids={eos})
    for tokens, record in zip(plain, trace.records, strict=True):
        cut = tokens.index(eos) + 1 if eos in tokens else len(tokens)
        assert record.tokens == tokens[:cut]
        assert len(record.times) == cut
    assert sum(len(record.tokens) for record in trace.records) < sum(map(len, plain))


def test_real_model_with_a_row_joining_and_one_leaving() -> None:
    model, tokenizer = tbt.load("smollm2-135m"), tbt.load_tokenizer("smollm2-135m")
    texts = ("The capital of France is", "Water", "Rivers carry sand. " * 5)
    prompts = [tokenizer.encode(text) for text in texts]
    requests = [Request(0.0, prompts[0], 5), Request(1.5, prompts[1], 2), Request(1.5, prompts[2], 3)]
    trace = serve(requests, chunked_prefill(3, token_budget=8), one_second, model)
    assert max(len(done.pieces) for done in trace.passes) == 3
    for request, record in zip(requests, trace.records, strict=True):
        assert record.tokens == tbt.generate(model, list(request.prompt), request.max_new_tokens)
    assert "Paris" in tokenizer.decode(trace.records[0].tokens)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_host_reads_the_tokens_of_a_pass_once(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ours(llama(), tmp_path)
    reads: list[int] = []

    def read(chosen: torch.Tensor) -> list[int]:
        reads.append(len(chosen))
        return read_tokens(chosen)

    monkeypatch.setattr(server, "read_tokens", read)
    trace = serve(mixed_queue(), policy, one_second, model)
    assert sum(reads) == sum(piece.kind == "idle" for done in trace.passes for piece in done.pieces) + sum(
        len(record.tokens) for record in trace.records
    )
    ends = {done.start + done.seconds for done in trace.passes}
    assert len(reads) == len({time for record in trace.records for time in record.times} & ends)


def test_the_model_changes_no_time(tmp_path: Path) -> None:
    model = ours(llama(), tmp_path)
    for policy in POLICIES.values():
        with_model, without = (serve(mixed_queue(), policy, per_token, m) for m in (model, None))
        assert with_model.passes == without.passes
        assert [r.times for r in with_model.records] == [r.times for r in without.records]
        assert not any(record.tokens for record in without.records)


# --- bad input ---------------------------------------------------------------------------------------


def serving(
    *requests: Request, policy: Policy | None = None, cost: Any = one_second, model: Any = None, eos_ids: Any = ()
) -> Trace:
    return serve(requests, policy or continuous_batching(2), cost, model, eos_ids=eos_ids)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Request(-1.0, (1,), 1), "arrival must be a number of at least 0, not -1.0"),
        (lambda: Request(math.nan, (1,), 1), "arrival must be a number of at least 0, not nan"),
        (lambda: Request("now", (1,), 1), "arrival must be a number of at least 0, not 'now'"),  # type: ignore[arg-type]
        (lambda: Request(0.0, (1,), True), "max_new_tokens must be a positive integer, not True"),
        (lambda: Request(0.0, (1,), 2.0), "max_new_tokens must be a positive integer, not 2.0"),  # type: ignore[arg-type]
        (lambda: queue([(1,)] * 2, True, rate=1.0, seed=0), "max_new_tokens must be a positive integer, not True"),
        (lambda: queue([(1,)] * 2, [2, True], rate=1.0, seed=0), "max_new_tokens must be a positive integer, not True"),
        (lambda: queue([(1,)], 1, rate=math.nan, seed=0), "rate must be a number above 0, not nan"),
        (lambda: continuous_batching(True), "max_batch must be a positive integer, not True"),
        (lambda: chunked_prefill(1, 2.5), "token_budget must be a positive integer, not 2.5"),  # type: ignore[arg-type]
        (lambda: Trace((), ()).summary(), "the trace holds no requests"),
        (lambda: Request(0.0, (), 1), "the prompt is empty"),
        (lambda: Request(0.0, (1,), 0), "max_new_tokens must be a positive integer, not 0"),
        (lambda: queue([(1,)], 1, rate=0.0, seed=0), "rate must be a number above 0, not 0"),
        (lambda: queue([(1,)], [1, 2], rate=1.0, seed=0), "1 prompts, but 2 values of max_new_tokens"),
        (lambda: continuous_batching(0), "max_batch must be a positive integer, not 0"),
        (lambda: chunked_prefill(8, 7), "token_budget 7 is below max_batch 8"),
        (lambda: Policy(max_batch=2, token_budget=4, static=True), "takes no token_budget"),
        (lambda: serving(), "no requests"),
        (lambda: serving(Request(0.0, (1,), 1), cost=lambda rows: -1.0), "the cost function gave -1.0 seconds"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_integers_of_numpy_count_as_integers() -> None:
    n: Callable[[int], Any] = np.int64
    prompts = [(1, 2), (3,), (4, 5, 6)]
    for wanted in (2, [2, 1, 3]):
        kind = [n(w) for w in wanted] if isinstance(wanted, list) else n(wanted)
        assert queue(prompts, kind, rate=1.0, seed=0) == queue(prompts, wanted, rate=1.0, seed=0)
    array: Any = np.array([2, 1, 3])
    assert queue(prompts, array, rate=1.0, seed=0) == queue(prompts, [2, 1, 3], rate=1.0, seed=0)
    assert type(Request(0.0, (1,), n(2)).max_new_tokens) is int
    assert chunked_prefill(n(2), n(4)) == chunked_prefill(2, 4)
    blocks = BlockAllocator(n(4), n(2), n(10))
    blocks.reserve("a")
    assert blocks.append("a", n(3)).slots == [(0, 0), (0, 1), (1, 0)]
    assert blocks.reserved_bytes == 40


def test_a_run_that_takes_no_time_has_a_summary() -> None:
    summary = serving(Request(0.0, (1, 2), 3), Request(0.0, (1,), 1), cost=lambda rows: 0.0).summary()
    assert (summary.throughput, summary.time_per_token, summary.busy) == (math.inf, 0.0, 1.0)


def test_prompts_of_something_else_than_tokens_are_refused_before_any_pass(tmp_path: Path) -> None:
    model = ours(llama(), tmp_path)
    bad: Any
    for bad in ((1.5,), "text"):
        with pytest.raises(ValueError, match="the prompt of request 1 must be a collection of token ids"):
            serving(Request(0.0, (1,), 1), Request(9.0, bad, 1), model=model)
    prompts: list[Any] = [(5, 6), np.array([5, 6]), torch.tensor([5, 6])]
    requests = [Request(0.0, prompt, 3) for prompt in prompts]
    tokens = [record.tokens for record in serving(*requests, model=model).records]
    assert tokens == [tbt.generate(model, [5, 6], 3)] * 3
    ends = serving(requests[0], requests[1], model=model, eos_ids=iter([tokens[0][0]])).records
    assert [len(record.tokens) for record in ends] == [1, 1]  # an iterator serves both rows


def test_a_token_outside_the_vocabulary_is_refused_before_any_pass(tmp_path: Path) -> None:
    calls: list[Sequence[Row]] = []

    def cost(rows: Sequence[Row]) -> float:
        calls.append(rows)
        return 1.0

    with pytest.raises(ValueError, match="request 1: token id 97 is outside the vocabulary of 97"):
        serving(Request(0.0, (1,), 1), Request(9.0, (2, 97), 1), cost=cost, model=ours(llama(), tmp_path))
    assert not calls


# --- the paged cache ---------------------------------------------------------------------------------


class Pool:
    """A paged cache that stores one number for each token, driven by the allocator; what a real one would do."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.blocks = [[None] * allocator.block_size for _ in range(allocator.num_blocks)]

    def append(self, name: str, values: list[Any]) -> None:
        slots, copy = self.allocator.append(name, len(values))
        if copy is not None:
            self.blocks[copy[1]] = list(self.blocks[copy[0]])
        for (block, place), value in zip(slots, values, strict=True):
            self.blocks[block][place] = value

    def read(self, name: str) -> list[Any]:
        table, length = self.allocator.tables[name], self.allocator.lengths[name]
        return [value for block in table for value in self.blocks[block]][:length]


@pytest.mark.parametrize("block_size", [1, 4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_reads_back_what_it_wrote(block_size: int, seed: int) -> None:
    """Random life of many sequences, against plain lists."""
    draw = random.Random(seed)
    allocator = BlockAllocator(num_blocks=60, block_size=block_size, bytes_per_token=10)
    pool, made, refused = Pool(allocator), 0, 0
    want: dict[str, list[Any]] = {}
    for step in range(600):
        action = draw.choice(("reserve", "append", "append", "append", "fork", "free"))
        name = draw.choice(sorted(want)) if want else ""
        try:
            if action == "reserve" or not want:
                made += 1
                allocator.reserve(f"s{made}", draw.choice((0, 0, 9)))
                want[f"s{made}"] = []
            elif action == "append":
                values = [(step, i) for i in range(draw.randrange(1, 9))]
                pool.append(name, values)
                want[name] = want[name] + values
            elif action == "fork":
                made += 1
                tokens = draw.randrange(len(want[name]) + 1)
                allocator.fork(name, f"s{made}", tokens)
                want[f"s{made}"] = want[name][:tokens]
            elif draw.random() < 0.7:
                allocator.free(name)
                del want[name]
        except ValueError as error:
            refused += 1
            assert "more blocks are needed" in str(error)  # noqa: PT017
        assert {name: pool.read(str(name)) for name in allocator.tables} == want
        held = [block for table in allocator.tables.values() for block in table]
        assert [held.count(block) for block in range(60)] == allocator.references
        assert len(set(held)) + allocator.free_blocks == 60
        assert allocator.used_bytes <= allocator.reserved_bytes == len(set(held)) * block_size * 10
        assert allocator.used_bytes + allocator.saved_bytes == 10 * sum(map(len, want.values()))
    assert made > 50
    for name in list(want):
        allocator.free(name)
    assert allocator.free_blocks == 60
    assert allocator.reserved_bytes == allocator.used_bytes == allocator.wasted_bytes == 0
    assert block_size > 1 or refused  # small blocks run out, so that refusal was tried


def test_bytes_by_hand() -> None:
    allocator = BlockAllocator(num_blocks=10, block_size=16, bytes_per_token=100)
    allocator.reserve("a")
    assert allocator.append("a", 20).slots[15:17] == [(0, 15), (1, 0)]
    assert (allocator.reserved_bytes, allocator.used_bytes, allocator.wasted_bytes) == (3200, 2000, 1200)
    allocator.fork("a", "b")
    assert (allocator.used_bytes, allocator.saved_bytes) == (2000, 2000)
    written = allocator.append("b", 1)  # into block 1, which is shared
    assert written == ([(2, 4)], (1, 2))
    assert allocator.tables == {"a": [0, 1], "b": [0, 2]}
    assert allocator.references[:3] == [2, 1, 1]
    assert allocator.append("a", 1) == ([(1, 4)], None)  # now its own again
    assert (allocator.reserved_bytes, allocator.used_bytes, allocator.saved_bytes) == (4800, 2600, 1600)
    allocator.free("a")
    assert (allocator.tables, allocator.free_blocks) == ({"b": [0, 2]}, 8)


def test_reserving_ahead_is_waste_until_it_is_used() -> None:
    allocator = BlockAllocator(num_blocks=128, block_size=16, bytes_per_token=1)
    allocator.reserve("a", 2048)
    assert (allocator.free_blocks, allocator.used_bytes, allocator.wasted_bytes) == (0, 0, 2048)
    allocator.append("a", 300)
    assert (allocator.free_blocks, allocator.used_bytes, allocator.wasted_bytes) == (0, 300, 1748)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: a.reserve("a"), "sequence 'a' exists already"),
        (lambda a: a.reserve("b", -1), "tokens must be an integer of at least 0, not -1"),
        (lambda a: a.reserve("b", True), "tokens must be an integer of at least 0, not True"),
        (lambda a: a.fork("a", "b", -1), "tokens must be an integer of at least 0, not -1"),
        (lambda a: a.reserve("b", 17), "5 more blocks are needed, 2 of 4 are free"),
        (lambda a: a.append("b"), "there is no sequence 'b'"),
        (lambda a: a.append("a", 0), "tokens must be a positive integer, not 0"),
        (lambda a: a.append("a", 12), "3 more blocks are needed, 2 of 4 are free"),
        (lambda a: a.fork("a", "a"), "sequence 'a' exists already"),
        (lambda a: a.fork("a", "b", 6), "holds 5 tokens: 6 of them cannot be shared"),
        (lambda a: a.free("b"), "there is no sequence 'b'"),
        (lambda a: BlockAllocator(4, 0, 1), "block_size must be a positive integer, not 0"),
    ],
)
def test_allocator_names_the_problem_and_changes_nothing(call: Callable[[BlockAllocator], object], words: str) -> None:
    allocator = BlockAllocator(num_blocks=4, block_size=4, bytes_per_token=1)
    allocator.reserve("a")
    allocator.append("a", 5)
    with pytest.raises(ValueError, match=words):
        call(allocator)
    assert (allocator.tables, allocator.lengths, allocator.references) == ({"a": [0, 1]}, {"a": 5}, [1, 1, 0, 0])
    assert allocator.free_blocks == 2
