"""The floors of other people's systems, recomputed by hand, and what the package says it reached of them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest

from tokenbytoken import world
from tokenbytoken.cost import Placement, footprint_per_gpu, working_memory_per_gpu
from tokenbytoken.world import Measurement, Message, Rate, Room, Timed

TIMES = [row for row in world.measurements if isinstance(row, Timed | Message)]


def name(row: object) -> str:
    assert isinstance(row, Measurement)
    return f"{row.id}-{row.what.replace(' ', '_')}"


def rows(id: str, kind: str, chosen: Callable[[Timed], bool] = lambda row: True) -> list[Timed]:
    return [row for row in TIMES if isinstance(row, Timed) and row.id == id and row.kind == kind and chosen(row)]


def one(id: str, kind: str, chosen: Callable[[Timed], bool] = lambda row: True) -> Timed:
    (row,) = rows(id, kind, chosen)
    return row


# ------------------------------------------------------------------------------------------------ floors by hand


def test_one_request_on_one_card_reads_every_weight_once() -> None:
    row = one("P01", "lone decode")
    read = 8_030_261_248 - 128_256 * 4096  # all but the embedding, of which one row is looked up
    cache = 106 * 32 * 2 * 8 * 128
    assert world.floor(row).seconds == pytest.approx((2 * (read + 4096 + cache)) / 2.039e12, rel=1e-6)
    assert world.ratio(row) == pytest.approx(1 / 93.89 / world.floor(row).seconds)


def test_eight_cards_divide_the_bytes_and_add_messages() -> None:
    row = one("P03", "lone decode", lambda row: row.gpus == 8 and row.model == "llama-3.1-8b")
    alone = world.floor(one("P01", "lone decode")).seconds
    # Two sums a layer and one of the embedding, each one step, and the logits gathered.
    sums = 65 * (3.6e-6 + 7 * 2 * 4096 / 300e9)
    logits = 3.6e-6 + 7 / 8 * 2 * 128_256 / 300e9
    assert world.floor(row).seconds == pytest.approx(alone / 8 + sums + logits, rel=1e-6)


def test_two_experts_of_eight_are_read_for_one_token() -> None:
    row = one("P07", "lone decode", lambda row: row.gpus == 8 and row.recipe == "bf16")
    attention, expert = 2 * 4096 * (4096 + 1024), 3 * 4096 * 14_336
    layer = attention + 2 * expert + 8 * 4096 + 2 * 4096
    read = 32 * layer + 4096 + 32_000 * 4096 + 4096
    cache = 106 * 32 * 2 * 8 * 128
    assert world.floor(row).memory_seconds == pytest.approx(2 * (read + cache) / 8 / 2.039e12, rel=1e-6)


def test_experts_that_lie_whole_on_many_nodes() -> None:
    # DeepSeek-V3 on 18 nodes, 128 requests a GPU, 4,989 tokens each: bytes 20.0 ms, products 15.7, messages 25.5 if
    # eight experts got a copy each; sent once to each node that has some of them, and handed on there, they are fewer.
    row = one("P29", "many nodes")
    floor = world.floor(row)
    assert floor.memory_seconds == pytest.approx(20.0e-3, rel=0.01)
    assert floor.compute_seconds == pytest.approx(15.7e-3, rel=0.01)
    there, back = 128 * 8 * 7168, 2 * 128 * 8 * 7168
    assert 58 * (there + back) / 50e9 == pytest.approx(25.5e-3, rel=0.01)
    nodes = 18 * (1 - (17 / 18) ** 8)
    messages = 58 * ((there + back) * nodes / 8 * (17 / 18) / 50e9 + 2 * (16e-6 + 3.6e-6))
    assert floor.communication_seconds == pytest.approx(messages, rel=1e-6)
    assert floor.seconds == pytest.approx(floor.memory_seconds + messages, rel=1e-6)
    # The bytes, by hand: the state of its own requests, its share of experts, and a copy of the rest.
    state = 128 * 4990 * 61 * (512 + 64) * 2
    experts = 58 * 256 * 3 * 7168 * 2048 / 144
    assert (state + experts) / 3.35e12 < floor.memory_seconds < (state + experts) / 3.35e12 + 20e9 / 3.35e12


def test_distinct_experts_make_a_step_longer() -> None:
    # 8 requests choose 8 of 256 experts each: 256 (1 - (1 - 1/32)^8) distinct ones are read, in all 58 layers.
    few, many = rows("P34", "batch decode", lambda row: row.batch_size in (8, 64))
    distinct = [256 * (1 - (1 - 8 / 256) ** row.batch_size) for row in (few, many)]
    more = (distinct[1] - distinct[0]) * 58 * 3 * 7168 * 2048 / 8 / 4.8e12
    state = 56 * 1537 * 61 * 576 * 2 / 4.8e12  # a latent has no heads: each of the eight keeps and reads all of it
    grown = world.floor(many).memory_seconds - world.floor(few).memory_seconds
    assert grown == pytest.approx(more + state, rel=2e-3)  # and a scale for each block of 128 x 128


def test_four_bits_a_number() -> None:
    row = one("P51", "small computers", lambda row: "Q4_0" in row.what and name_of_machine(row) == "M2 Ultra")
    read, cache = 6_607_343_616, 65 * 2 * 32 * 4096 * 2
    assert world.floor(row).seconds == pytest.approx((read * 18 / 32 + cache) / 800e9, rel=1e-5)
    assert 1 / world.ratio(row) == pytest.approx(0.44, abs=0.005)  # the share of the bandwidth that is reached


def name_of_machine(row: Timed) -> str:
    return row.accelerator if isinstance(row.accelerator, str) else row.accelerator.name


def test_a_prompt_is_bound_by_products() -> None:
    row = one("P27", "prompt on many nodes", lambda row: row.new_tokens == 1_000_000)
    n = row.new_tokens
    fp8 = 2 * n * 124 * 3 * 16_384 * 53_248
    others = 2 * n * (126 * 16_384 * (2 * 16_384 + 2 * 1024) + 2 * 3 * 16_384 * 53_248)
    scores = 126 * 4 * 16_384 * n * (n + 1) / 2
    seconds = (fp8 / 1979e12 + (others + scores) / 989.5e12) / 128
    assert world.floor(row).seconds == pytest.approx(seconds, rel=1e-4)
    assert world.floor(row).communication_seconds == 0
    assert scores / (fp8 + others + scores) > 0.8


def test_a_ring_and_a_switch() -> None:
    (ring,) = (row for row in TIMES if isinstance(row, Message) and row.algorithm == "ring")
    assert world.floor(ring).seconds == pytest.approx(14 * 3.6e-6 + 2 * 7 / 8 * ring.size / 450e9)
    (large,) = (row for row in TIMES if row.id == "P44" and row.seconds < ring.seconds and row.seconds > 0.05)
    assert isinstance(large, Message)
    assert world.floor(large).seconds == pytest.approx(9 / 8 * large.size / 450e9, rel=1e-3)
    assert large.size / large.seconds * 2 * 7 / 8 == pytest.approx(482.25e9)


def test_what_is_left_of_a_node() -> None:
    row = next(row for row in world.measurements if isinstance(row, Room) and row.id == "P15")
    assert row.tokens is not None
    assert row.too_many is not None
    first_and_last = 2 * 3 * 16_384 * 53_248
    in_fp8 = 124 * (3 * 16_384 * 53_248 + 4 * (2 * 53_248 + 16_384))
    weights = (2 * (405_853_388_800 - 126 * 3 * 16_384 * 53_248 + first_and_last) + in_fp8) / 8
    activations = 2 * 8192 * (2 * 16_384 + (2 * 53_248 + 16_384) / 8)
    left = 80e9 - 8e9 - 2 * 2**30 - activations - weights
    assert world.room(row) == pytest.approx(8 * left / 516_096, rel=1e-6)
    assert row.tokens < world.room(row) < row.too_many


def test_what_is_left_for_a_prompt_that_is_read_in_one_pass() -> None:
    row = next(row for row in world.measurements if isinstance(row, Room) and row.id == "P53" and row.gpus == 2)
    tokens = math.floor(world.room(row))

    def needed(tokens: int) -> float:
        used = working_memory_per_gpu(row.config, "a100-80", Placement(gpus=2), tokens).bytes
        return footprint_per_gpu(row.config, gpus=2).bytes(1, tokens) + used

    assert needed(tokens) <= 80e9 < needed(tokens + 1)


# ------------------------------------------------------------------------------------------------ rows and ranges


@pytest.mark.parametrize("row", world.measurements, ids=name)
def test_every_row_has_a_source_and_a_ratio(row: Measurement) -> None:
    assert row.kind in world.KINDS
    assert row.id.startswith("P")
    assert row.what
    assert len(row.source) > 15
    assert 0.5 < world.ratio(row) < 40
    if row.read == "primary" and "github.com" in row.source and not row.sets:
        assert any(letter in row.source for letter in "(#,"), "name the file or the commit"


def test_rows_that_set_a_constant_or_stand_aside_are_in_no_range() -> None:
    setting = [row for row in world.measurements if row.sets]
    assert {row.sets for row in setting} == {"latency of a step inside a node", "latency of a step between nodes"}
    aside = [row for row in world.measurements if row.aside]
    assert {row.id for row in aside} == {"P17"}
    counted = [row for kind in world.KINDS for row in world.rows_of(kind)]
    assert not {id(row) for row in setting + aside} & {id(row) for row in counted}
    assert len(counted) + len(setting) + len(aside) == len(world.measurements)


def test_a_row_stands_aside_only_where_the_same_machine_did_it_in_half_the_time() -> None:
    for row in world.measurements:
        if row.aside:
            assert isinstance(row, Timed)
            times = [other.seconds for other in rows(row.id, row.kind) if other.new_tokens == row.new_tokens]
            assert min(times) < row.seconds / 2


@pytest.mark.parametrize("kind", world.KINDS)
def test_ranges_are_those_of_the_rows_rounded_outward(kind: world.Kind) -> None:
    ratios = sorted(world.ratio(row) for row in world.rows_of(kind))
    low, high = world.reached(kind)
    assert low <= ratios[0] < low * 1.1
    assert high >= ratios[-1] > high / 1.1
    assert ratios[0] <= world.middle(kind) <= ratios[-1]
    for bound in (low, high):
        assert f"{bound:.2g}" == f"{bound:.6g}", "two digits"


def test_a_range_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        world.reached("guesses")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no row of the kind"):
        world.reached("prompt", rows=())


def test_no_floor_is_beaten_or_missed_by_more_than_twice_without_a_reason() -> None:
    ratios = {(row.id, row.what, row.kind, world.ratio(row)) for row in TIMES if not row.sets}
    assert min(ratio for *_, ratio in ratios) >= 1
    assert {(id, kind) for id, _, kind, ratio in ratios if ratio > 2} == set(world.MISSED)


def test_what_starting_the_operations_explains() -> None:
    for row in TIMES:
        if isinstance(row, Timed) and row.launched:
            better = world.launched(row)
            assert better is not None
            assert 1 < better < world.ratio(row)
    few, *_, many = rows("P03", "lone decode", lambda row: row.model == "llama-3.1-8b")
    assert (few.gpus, many.gpus) == (2, 8)
    assert world.ratio(many) > 1.5 * world.ratio(few)  # the fewer bytes a GPU has, the farther from the floor
    assert world.launched(one("P09", "lone decode")) is None  # how it starts its operations is not known


def test_rates_are_below_their_data_sheets() -> None:
    rates = [row for row in world.measurements if isinstance(row, Rate)]
    assert all(world.ratio(row) > 1 for row in rates)
    (product,) = (row for row in rates if row.accelerator == "h100" and row.dtype == "bf16")
    assert world.ratio(product) == pytest.approx(989.5 / 794.5)


def test_the_room_needs_no_torch() -> None:
    code = "import sys; import tokenbytoken.world as w; w.reached('lone decode'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
