"""Collectives: each algorithm is carried out among simulated GPUs, which count their steps and what they send."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import tokenbytoken as tbt
from tokenbytoken.cost import (
    ALL_REDUCES,
    Placement,
    accelerators,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    communication_seconds,
    predict,
)
from tokenbytoken.cost.placement import message_seconds

H100, A100 = accelerators["h100"], accelerators["a100-80"]
Numbers = list[list[float]]


class Net:
    """GPUs with numbers of their own. In a step each sends to others, and all arrive at its end."""

    def __init__(self, gpus: int, numbers: int) -> None:
        generator = torch.Generator().manual_seed(gpus)
        self.has = torch.randint(0, 100, (gpus, numbers), generator=generator)
        self.want = self.has.sum(0)
        self.steps, self.sent = 0, [0] * gpus

    def step(self, messages: list[tuple[int, int, torch.Tensor]]) -> list[tuple[int, int, torch.Tensor]]:
        self.steps += 1
        for sender, _, numbers in messages:
            self.sent[sender] += len(numbers)
        return [(sender, receiver, numbers.clone()) for sender, receiver, numbers in messages]


def one_shot(net: Net) -> None:
    gpus = range(len(net.has))
    for _, receiver, numbers in net.step([(g, other, net.has[g]) for g in gpus for other in gpus if g != other]):
        net.has[receiver] += numbers


def two_shot(net: Net) -> None:
    t = len(net.has)
    share = [slice(g * net.has.shape[1] // t, (g + 1) * net.has.shape[1] // t) for g in range(t)]
    pairs = [(g, other) for g in range(t) for other in range(t) if g != other]
    for _, receiver, numbers in net.step([(g, other, net.has[g, share[other]]) for g, other in pairs]):
        net.has[receiver, share[receiver]] += numbers
    for sender, receiver, numbers in net.step([(g, other, net.has[g, share[g]]) for g, other in pairs]):
        net.has[receiver, share[sender]] = numbers


def ring(net: Net) -> None:
    t = len(net.has)
    share = [slice(g * net.has.shape[1] // t, (g + 1) * net.has.shape[1] // t) for g in range(t)]
    for turn in range(2 * (t - 1)):
        adding = turn < t - 1
        place = {g: share[(g - turn + (0 if adding else t)) % t] for g in range(t)}
        for sender, receiver, numbers in net.step([(g, (g + 1) % t, net.has[g, place[g]]) for g in range(t)]):
            if adding:
                net.has[receiver, place[sender]] += numbers
            else:
                net.has[receiver, place[sender]] = numbers


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize(("name", "carry_out"), [("one-shot", one_shot), ("two-shot", two_shot), ("ring", ring)])
def test_algorithms_are_what_simulated_gpus_do(name: str, carry_out: Callable[[Net], None], gpus: int) -> None:
    net = Net(gpus, 8 * gpus)
    carry_out(net)
    assert torch.equal(net.has, net.want.expand_as(net.has))
    told = ALL_REDUCES[name](gpus, 8 * gpus)
    assert (net.steps, max(net.sent)) == (told.steps, told.bytes)


@pytest.mark.parametrize("gpus", [2, 4, 8, 16])
def test_a_tree_rises_and_comes_down(gpus: int) -> None:
    """Sums of a binary tree, whole vectors: as many steps as told. (Pieces of them share the wires evenly.)"""
    net, reach, turns = Net(gpus, 4), 1, 0
    while reach < gpus:
        senders = range(reach, gpus, 2 * reach)
        for _, receiver, numbers in net.step([(g, g - reach, net.has[g]) for g in senders]):
            net.has[receiver] += numbers
        reach, turns = 2 * reach, turns + 1
    while reach > 1:
        reach //= 2
        for _, receiver, numbers in net.step([(g, g + reach, net.has[g]) for g in range(0, gpus, 2 * reach)]):
            net.has[receiver] = numbers
    assert torch.equal(net.has, net.want.expand_as(net.has))
    assert net.steps == 2 * turns == ALL_REDUCES["tree"](gpus, 1).steps
    # all sums are 2 (t - 1) messages of whole vectors, shared evenly by t wires
    assert sum(net.sent) / gpus == ALL_REDUCES["tree"](gpus, 4).bytes


# Microseconds that others measured. One row gave the latency of a step: four GPUs and 16 KiB, which is not among them.
PUBLISHED = [
    # sgl-project/sglang, pull request 2904: H100, a kernel of its own
    *(("h100", 2, size, measured) for size, measured in ((2**11, 3.7), (2**14, 3.9), (2**20, 7.9), (2**22, 19.9))),
    *(("h100", 4, size, measured) for size, measured in ((2**11, 4.8), (2**17, 4.8), (2**20, 13.9), (2**22, 31.1))),
    *(("h100", 8, size, measured) for size, measured in ((2**11, 5.9), (2**14, 5.7), (2**20, 16.7), (2**22, 33.8))),
    # vLLM's kernel, there
    ("h100", 8, 2**14, 9.3),
    ("h100", 8, 2**22, 45.0),
    # stas00/ml-engineering, NCCL on eight H200 (bus bandwidth as time: 2 (t - 1) / t * size / bandwidth)
    ("h200", 8, 2**15, 1.75 * 2**15 / 1.44e3),
    ("h200", 8, 2**24, 1.75 * 2**24 / 219.89e3),
    ("h200", 8, 2**34, 1.75 * 2**34 / 482.26e3),
    # the same, four nodes of eight B200
    ("b200", 32, 2**24, 1.9375 * 2**24 / 64.43e3),
    ("b200", 32, 2**27, 1.9375 * 2**27 / 197.94e3),
    ("b200", 32, 2**34, 1.9375 * 2**34 / 381.80e3),
    # eight A100
    ("a100-80", 8, 2**34, 1.75 * 2**34 / 234.89e3),
]


@pytest.mark.parametrize(("gpu", "gpus", "size", "measured"), PUBLISHED)
def test_published_all_reduces_lie_above_their_floor(gpu: str, gpus: int, size: int, measured: float) -> None:
    floor = 1e6 * all_reduce_seconds(size, gpus, gpu)
    assert floor <= measured
    assert size < 2**30 or measured < 1.5 * floor  # of the large ones the bytes explain most


def test_the_ring_of_a_published_run() -> None:
    measured = 1.75 * 2**34 / 367.61e9
    assert 1 <= measured / all_reduce_seconds(2**34, 8, "h200", "ring") < 1.3


def test_two_nodes_use_all_their_adapters() -> None:
    assert H100.network is not None
    size = 2**30
    seconds = all_reduce_seconds(size, 16, H100)
    steps = 2 * 3.6e-6 + 2 * 16e-6
    # Between nodes each adapter sends an eighth, half of it out and half back; meanwhile NVLink moves 7/8 twice.
    assert seconds == pytest.approx(steps + max(size / 8 / 50e9, 2 * 7 / 8 * size / 450e9))
    assert seconds < size / 50e9 / 4  # one adapter alone would need as long as all eight messages
    # a message of 4 KiB takes the steps: two inside, two between (75 µs are reported, NVIDIA/nccl issue 1453)
    small = all_reduce_seconds(4096, 16, H100)
    assert small == pytest.approx(2 * 3.6e-6 + 2 * 16e-6, rel=0.01)


def test_gathering_and_exchanging() -> None:
    assert H100.link is not None
    assert H100.network is not None
    size = 2**20
    assert all_gather_seconds(size, 8, H100) == 3.6e-6 + 7 / 8 * size / 450e9
    assert all_to_all_seconds(size, 8, H100) == 3.6e-6 + 7 / 8 * size / 450e9
    assert all_to_all_seconds(size, 16, H100) == 16e-6 + 1 / 2 * size / 50e9
    # DeepEP on H800, 128 tokens of 7,168 numbers to 8 experts each: 192 and 194 µs over 128 and 256 GPUs, and twice
    # the bytes on the way back 369 and 360 (README at e0eaaf9)
    for gpus, out, back in ((128, 192, 369), (256, 194, 360)):
        there, home = (1e6 * all_to_all_seconds(128 * 8 * 7168 * width, gpus, H100) for width in (1, 2))
        assert there <= out <= 1.25 * there
        assert home <= back <= 1.3 * home


def test_one_gpu_sends_nothing() -> None:
    for gpu in (H100, replace(H100, link=None, network=None)):
        assert all_reduce_seconds(1e6, 1, gpu) == all_gather_seconds(1e6, 1, gpu) == all_to_all_seconds(1, 1, gpu) == 0


def test_bad_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown algorithm 'star'"):
        all_reduce_seconds(1, 8, H100, "star")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="this switch does not add up"):
        all_reduce_seconds(1, 8, A100, "switch")
    with pytest.raises(ValueError, match="13 GPUs are not dealt evenly to 2 nodes of at most 8"):
        all_reduce_seconds(1, 13, H100)
    with pytest.raises(ValueError, match="has no link to other GPUs"):
        all_reduce_seconds(1, 2, replace(H100, link=None))
    for bad in (-1, math.nan, True):
        with pytest.raises(ValueError, match="size must be a number of at least 0"):
            all_reduce_seconds(bad, 8, H100)


# --- Layouts -----------------------------------------------------------------------------------------


def test_a_cache_along_the_sequence_exchanges_what_it_says() -> None:
    """Attention over tokens dealt to four GPUs, whose results are merged: what travels is counted as it travels."""
    gpus, heads, dim, tokens = 4, 6, 16, 40
    mixer = tbt.AttentionConfig(num_heads=heads, num_kv_heads=2, head_dim=dim)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(heads, dim, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, tokens, dim, generator=generator, dtype=torch.float64).repeat_interleave(3, dim=1)
    want = (k @ q[..., None] / dim**0.5).squeeze(-1).softmax(-1)[:, None] @ v
    parts, back = [], 0
    for keys, values in zip(k.chunk(gpus, 1), v.chunk(gpus, 1), strict=True):
        scores = (keys @ q[..., None] / dim**0.5).squeeze(-1)
        largest = scores.amax(-1, keepdim=True)
        powers = (scores - largest).exp()
        message = torch.cat([(powers[:, None] @ values)[:, 0], largest, powers.sum(-1, keepdim=True)], dim=-1)
        back = message.numel()  # of one GPU's result
        parts.append(message)
    largest = torch.stack([part[:, dim] for part in parts]).amax(0)
    weights = [(part[:, dim] - largest).exp() for part in parts]
    sums = torch.stack([w[:, None] * part[:, :dim] for w, part in zip(weights, parts, strict=True)]).sum(0)
    total = torch.stack([w * part[:, dim + 1] for w, part in zip(weights, parts, strict=True)]).sum(0)
    torch.testing.assert_close(sums / total[:, None], want[:, 0])
    assert mixer.exchanged() == (q.numel(), back)


def test_messages_of_each_layout() -> None:
    v3 = tbt.published["deepseek-v3"]
    hidden, rows = 7168, 64

    def seconds(**layout: str) -> float:
        placement = Placement(gpus=8, recipe="fp8-block", **layout)  # type: ignore[arg-type]
        return message_seconds(v3, H100, placement, rows=rows, logit_rows=rows, bytes_per_element=2, seen=rows * 5000)

    around = all_reduce_seconds(2 * rows * hidden, 8, H100) + all_gather_seconds(2 * rows * 129_280, 8, H100)
    assert seconds(cache="heads") == pytest.approx(around + 122 * all_reduce_seconds(2 * rows * hidden, 8, H100))
    gather = all_gather_seconds(2 * rows * hidden, 8, H100)
    assert seconds(cache="readers") == pytest.approx(around + 61 * 2 * gather)
    queries, results = (all_gather_seconds(2 * rows * 128 * n, 8, H100) for n in (576, 514))
    assert seconds(cache="sequence") == pytest.approx(seconds(cache="heads") + 61 * (queries + results))
    there, back = (all_to_all_seconds(rows / 8 * 8 * hidden * width, 8, H100, 8) for width in (1, 2))
    assert seconds(cache="readers", experts="whole") == pytest.approx(58 * (there + back))


def test_stages_hand_on_their_shares() -> None:
    config = tbt.published["llama-3.1-405b"]
    inside = communication_seconds(config, H100, 1, gpus=8)
    message = 2 * 16384
    assert communication_seconds(config, H100, 1, gpus=16, tensor_parallel=8) == pytest.approx(
        inside + 16e-6 + message / 8 / 50e9 + all_gather_seconds(message, 8, H100)
    )
    # two stages in one node never touch the network
    assert communication_seconds(config, H100, 1, gpus=8, tensor_parallel=4) < inside + 20e-6


def test_405b_over_two_nodes() -> None:
    """Published: 5.1 requests a second in two stages, 4.5 in one group of sixteen (vLLM, July 2024)."""
    config = tbt.published["llama-3.1-405b"]

    def prompt(tensor_parallel: int | None = None) -> float:
        return predict(
            config, "h100", 8, 0, new_tokens=1024, gpus=16, tensor_parallel=tensor_parallel, causal=True
        ).communication_seconds

    assert prompt() < 2 * prompt(tensor_parallel=8)
    one = tbt.predict(config, "h100", 1, 0, new_tokens=131_072, gpus=16, causal=True)
    assert 12 < one.seconds < 20
