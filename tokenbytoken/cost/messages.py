"""What GPUs say to each other, and how long it takes: steps that wait for one another, and bytes.

An algorithm carries out a collective in ``steps * latency + bytes / bandwidth`` seconds, where the bytes are those
that one GPU sends. Between nodes every GPU has a network adapter of its own, and all of them work at once.

>>> from tokenbytoken.cost.hardware import accelerators
>>> h100 = accelerators["h100"]
>>> for algorithm in ("one-shot", "two-shot", "ring", "switch"):
...     small, large = (1e6 * all_reduce_seconds(size, 8, h100, algorithm) for size in (2**14, 2**22))
...     print(f"{algorithm:9}{small:6.1f}{large:7.1f} µs")
one-shot    3.9   68.8 µs
two-shot    7.3   23.5 µs
ring       50.5   66.7 µs
switch      7.2   17.7 µs
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Literal, NamedTuple

from .._numbers import not_negative, whole
from ..config import Number, distinct, is_symbolic, log2, maximum, minimum, where
from .hardware import Accelerator, Link, find_accelerator

__all__ = ["ALL_REDUCES", "Algorithm", "Collective", "all_gather_seconds", "all_reduce_seconds", "all_to_all_seconds"]

Algorithm = Literal["fastest", "one-shot", "two-shot", "ring", "tree", "switch"]


class Collective(NamedTuple):
    """Steps that wait for one another, and the bytes that one GPU sends in all of them."""

    steps: Number
    bytes: Number

    def seconds(self, link: Link) -> Number:
        return self.steps * link.latency + self.bytes / link.bandwidth


#: All-reduce of m bytes among t GPUs, so that each has the sum.
#:
#: ``one-shot``: each sends all of its numbers to every other. ``two-shot``: each adds up a t-th of the numbers, and
#: sends the sums to every other. ``ring``: the same in t - 1 steps each, to its neighbour only. ``tree``: sums rise
#: through a binary tree and come down again, piece after piece. ``switch``: the switch adds what passes through it.
#:
#: :meta hide-value:
ALL_REDUCES: dict[str, Callable[[Number, Number], Collective]] = {
    "one-shot": lambda t, m: Collective(1, (t - 1) * m),
    "two-shot": lambda t, m: Collective(2, 2 * (t - 1) / t * m),
    "ring": lambda t, m: Collective(2 * (t - 1), 2 * (t - 1) / t * m),
    "tree": lambda t, m: Collective(2 * math.ceil(log2(t)), 2 * (t - 1) / t * m),
    "switch": lambda t, m: Collective(2, (1 + 1 / t) * m),
}

#: What libraries use inside a node, where each GPU reaches every other, and between nodes.
INSIDE, BETWEEN = ("one-shot", "two-shot", "ring"), ("ring", "tree")


class _Group(NamedTuple):
    """``gpus`` dealt evenly to ``nodes``, ``per_node`` in each."""

    gpus: Number
    nodes: Number
    per_node: Number
    link: Link
    network: Link


def _group(gpu: Accelerator | str, gpus: Number) -> _Group:
    found = find_accelerator(gpu)
    gpus = whole("gpus", gpus)
    if found.link is None or found.network is None:
        if not is_symbolic(gpus) and gpus == 1:
            nowhere = Link(latency=0.0, bandwidth=math.inf)
            return _Group(1, 1, 1, nowhere, nowhere)
        raise ValueError(f"{found.name} has no link to other GPUs: only gpus=1 can be predicted")
    nodes = math.ceil(gpus / found.gpus_per_node)
    if not is_symbolic(gpus) and gpus % nodes:
        raise ValueError(f"{gpus} GPUs are not dealt evenly to {nodes} nodes of at most {found.gpus_per_node}")
    return _Group(gpus, nodes, gpus / nodes, found.link, found.network)


def all_reduce_seconds(
    size: Number, gpus: Number, gpu: Accelerator | str, algorithm: Algorithm = "fastest"
) -> Number:
    """Seconds until each of ``gpus`` has the sum of the ``size`` bytes that each brings.

    Over several nodes: each node adds up (a scatter of sums over its GPUs), the nodes add theirs up, each adapter
    for its share of the numbers, and the sums are gathered in each node. The steps wait for one another; of a large
    message one piece moves between nodes while the next moves inside. ``algorithm`` names one of
    :data:`ALL_REDUCES`, inside the node or, where there are several, between them; "fastest" takes the best of those
    that libraries use there. Raises ValueError for another name, for "switch" where the switch does not add, and for
    GPUs that nodes cannot share evenly.
    """
    size = not_negative("size", size)
    group = _group(gpu, gpus)
    if algorithm != "fastest" and algorithm not in ALL_REDUCES:
        raise ValueError(f"unknown algorithm {algorithm!r}: fastest or one of {', '.join(ALL_REDUCES)}")
    if algorithm == "switch" and not group.link.adds:
        raise ValueError("algorithm 'switch': this switch does not add up")
    inside: tuple[str, ...] = INSIDE + (("switch",) if group.link.adds else ())
    between: tuple[str, ...] = BETWEEN
    if algorithm != "fastest":
        inside, between = (algorithm,), (algorithm,)
    alone = _fastest([ALL_REDUCES[name](group.gpus, size).seconds(group.link) for name in inside])
    half = _scatter(group.per_node, size)
    twice = Collective(2 * half.steps, 2 * half.bytes)
    over = (ALL_REDUCES[name](group.nodes, size / group.per_node) for name in between)
    together = _fastest([_in_pieces(twice, nodes, group) for nodes in over])
    return where(group.gpus <= 1, 0.0, where(group.nodes <= 1, alone, together))


def _fastest(seconds: list[Number]) -> Number:
    return reduce(minimum, seconds)


def _in_pieces(inside: Collective, between: Collective, group: _Group) -> Number:
    """All steps, and the bytes of whichever takes longer: the other's move meanwhile."""
    latencies = inside.steps * group.link.latency + between.steps * group.network.latency
    return latencies + maximum(inside.bytes / group.link.bandwidth, between.bytes / group.network.bandwidth)


def _scatter(gpus: Number, size: Number) -> Collective:
    """Each sends every other its share, in one step: half of an all-reduce. Gathering sends the same bytes."""
    return Collective(where(gpus > 1, 1, 0), (gpus - 1) / gpus * size)


def all_gather_seconds(size: Number, gpus: Number, gpu: Accelerator | str) -> Number:
    """Seconds until each of ``gpus`` has all ``size`` bytes, of which each brings an even share.

    As long as it takes to add up in the opposite direction, so that each is left with its share of the sums.
    """
    size = not_negative("size", size)
    group = _group(gpu, gpus)
    between = Collective(group.nodes - 1, (group.nodes - 1) / group.nodes * size / group.per_node)
    return where(group.gpus <= 1, 0.0, _in_pieces(_scatter(group.per_node, size), between, group))


def all_to_all_seconds(size: Number, gpus: Number, gpu: Accelerator | str, copies: Number = 1) -> Number:
    """Seconds until each of ``gpus`` has sent ``size`` bytes, an even share to each GPU, itself included.

    What stays in the node and what leaves it go at the same time. Where the bytes are ``copies`` of the same numbers,
    for as many places drawn at random, they may also go once to each node and be copied there: the faster way counts.
    """
    size, copies = not_negative("size", size), whole("copies", copies)
    group = _group(gpu, gpus)
    near = Collective(1, (group.per_node - 1) / group.gpus * size).seconds(group.link)
    far = Collective(1, (group.gpus - group.per_node) / group.gpus * size).seconds(group.network)
    once = distinct(group.nodes, 1, copies) / copies * (group.nodes - 1) / group.nodes * size
    spread = Collective(1, (group.per_node - 1) / group.per_node * size)
    between = minimum(maximum(near, far), _in_pieces(spread, Collective(1, once), group))
    return where(group.gpus <= 1, 0.0, where(group.nodes <= 1, near, between))
