"""Counting: FLOPs as torch counts them, and each byte of weights and state once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tokenbytoken as tbt
from tokenbytoken import measure
from tokenbytoken.layers.operations import rules
from tokenbytoken.measure import count
from tokenbytoken.measure.storage import Cover

Mode = Callable[[], AbstractContextManager[None]]


def torch_counts(fn: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as mode:
        fn()
    return mode.get_total_flops()


# --- FLOPs -------------------------------------------------------------------------------------------


def products(device: str) -> dict[str, Callable[[], torch.Tensor]]:
    def t(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=device)

    linear, biased = nn.Linear(8, 5, bias=False, device=device), nn.Linear(8, 5, device=device)
    conv = nn.Conv1d(6, 6, 4, groups=6, padding=3, device=device)
    return {
        "mm": lambda: t(3, 8) @ t(8, 5),
        "bmm": lambda: t(2, 3, 8) @ t(2, 8, 5),
        "matmul": lambda: t(2, 4, 3, 8) @ t(8, 5),
        "addmm": lambda: torch.addmm(t(5), t(3, 8), t(8, 5)),
        "baddbmm": lambda: torch.baddbmm(t(2, 3, 5), t(2, 3, 8), t(2, 8, 5)),
        "einsum": lambda: torch.einsum("bhtd,bhsd->bhts", t(2, 3, 4, 8), t(2, 3, 5, 8)),
        "linear": lambda: linear(t(2, 3, 8)),
        "linear with bias": lambda: biased(t(2, 3, 8)),
        "depthwise convolution": lambda: conv(t(2, 6, 9)),
    }


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", products("meta"))
def test_products_as_torch_counts_them(name: str, device: str, mode: Mode) -> None:
    fn = products(device)[name]
    want = torch_counts(fn)
    with mode():
        assert count(fn).flops == want > 0


def test_vector_products() -> None:
    a, x = torch.ones(3, 8), torch.ones(8)
    assert count(lambda: a @ x).flops == 2 * 3 * 8
    assert count(lambda: torch.dot(x, x)).flops == 2 * 8
    assert count(lambda: torch.addmv(torch.ones(3), a, x)).flops == 2 * 3 * 8


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["causal", "full", "masked", "grouped"])
def test_attention_is_counted_full_on_every_device(kind: str, device: str, mode: Mode) -> None:
    B, H, K, T, S, D, Dv = 2, 6, 3, 5, 7, 8, 4
    S = T if kind == "causal" else S
    heads = K if kind == "grouped" else H
    q = torch.zeros(B, H, T, D, device=device)
    k, v = torch.zeros(B, heads, S, D, device=device), torch.zeros(B, heads, S, Dv, device=device)
    options: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "full": {},
        "masked": {"attn_mask": torch.ones(T, S, dtype=torch.bool, device=device)},
        "grouped": {"enable_gqa": True},
    }
    with mode():
        counted = count(lambda: F.scaled_dot_product_attention(q, k, v, **options[kind]))
    assert counted.flops == 2 * B * H * T * S * (D + Dv)


def test_elementwise_work_counts_nothing() -> None:
    x = torch.ones(3, 8)
    counted = count(lambda: F.silu(F.rms_norm(x, (8,))).softmax(-1).cumsum(0).topk(2))
    assert counted.flops == 0
    assert counted.operations > 4
    assert count(lambda: x.view(8, 3).t()[1:].unsqueeze(0)).operations == 0


def test_traffic_is_every_operand_and_result_each_time() -> None:
    a, b, row = torch.ones(8, 10), torch.ones(8, 10), torch.ones(1, 10)

    def work() -> None:
        a + b  # 2 read, 1 written
        a.add_(b).view(-1)  # the same; a view moves nothing
        a.copy_(b)  # 1 read, 1 written: what is overwritten is not looked at
        torch.cat((a, b))  # 2 and 2
        torch.addcmul(a, b, row.expand(8, 10))  # 2 and 1, and a row once

    assert count(work).traffic == 4 * (80 * (3 + 3 + 2 + 4 + 3) + 10)
    table, which = torch.ones(1000, 4), torch.tensor([1, 5, 7])
    assert count(lambda: table[which]).traffic == 2 * 3 * 4 * 4 + 3 * 8  # rows, and their numbers


def test_an_unlisted_operation_is_refused_and_can_be_registered() -> None:
    @torch.library.custom_op("tbt_test::scan", mutates_args=())
    def scan(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)

    x = torch.ones(4, 3)
    with pytest.raises(NotImplementedError, match=r"tbt_test\.scan has no rule"):
        count(lambda: scan(x))
    try:
        measure.rule(torch.ops.tbt_test.scan)(lambda out, x: 6 * x.numel())
        counted = count(lambda: scan(x))
        assert counted.flops == 72
        assert counted.flops_by_operation == {"scan": 72}
    finally:
        rules.pop(torch.ops.tbt_test.scan, None)


def test_context_and_call_agree() -> None:
    linear = nn.Linear(8, 5)
    x = torch.ones(3, 8)
    with count() as cost:
        linear(x)
    assert cost == count(lambda: linear(x))
    assert cost.intensity == cost.flops / cost.bytes


# --- Bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_are_read_once(device: str, mode: Mode) -> None:
    w = nn.Parameter(torch.zeros(64, 32, device=device))
    x = torch.zeros(3, 32, device=device)
    with mode():
        assert count(lambda: (F.linear(x, w), F.linear(x, w), w * 2)).weight_bytes == 64 * 32 * 4
        assert count(lambda: F.linear(x, w[16:48])).weight_bytes == 32 * 32 * 4
        assert count(lambda: (F.linear(x, w[:32]), F.linear(x, w[16:48]))).weight_bytes == 48 * 32 * 4
        assert count(lambda: F.linear(x[:, :8], w[:, 8:16])).weight_bytes == 64 * 8 * 4
        assert count(lambda: w.expand(5, 64, 32) + 1).weight_bytes == 64 * 32 * 4
        assert count(lambda: w.t().view(32, 8, 8)).weight_bytes == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_the_rows_looked_up(device: str) -> None:
    table = nn.Embedding(100, 16, device=device)
    ids = torch.zeros(2, 3, dtype=torch.long, device=device)
    assert count(lambda: table(ids)).weight_bytes == 6 * 16 * 4
    assert count(lambda: table.weight[ids[0]]).weight_bytes == 3 * 16 * 4
    # A head tied to the embedding reads every row anyway.
    assert count(lambda: F.linear(table(ids), table.weight)).weight_bytes == 100 * 16 * 4


def test_tensors_that_are_no_parameters_can_be_named_as_weights() -> None:
    codes = torch.zeros(64, 32, dtype=torch.int8)
    x = torch.zeros(3, 32)
    assert count(lambda: F.linear(x, codes.float())).weight_bytes == 0
    assert count(lambda: F.linear(x, codes.float()), weights=[codes]).weight_bytes == 64 * 32


def test_cover_is_the_union_of_what_views_show() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        base = torch.zeros(240, dtype=torch.int16)
        cover, seen = Cover(), np.zeros(480, dtype=bool)
        for _ in range(rng.integers(1, 6)):
            shape = rng.integers(1, 4, size=3).tolist()
            stride = rng.integers(0, 20, size=3).tolist()
            view = base.as_strided(shape, stride, int(rng.integers(0, 60)))
            before = int(seen.sum())
            index = view.storage_offset() + sum(
                np.arange(n).reshape([-1 if j == i else 1 for j in range(3)]) * s
                for i, (n, s) in enumerate(zip(shape, stride, strict=True))
            )
            for byte in (0, 1):
                seen[2 * np.asarray(index).ravel() + byte] = True
            assert cover.add(view) == int(seen.sum()) - before
            assert cover.bytes == int(seen.sum())


def test_state_read_before_written() -> None:
    cache = torch.zeros(2, 3, 10, 4)  # (B, K, max_length, D)
    recurrent = torch.zeros(2, 5)

    def step() -> None:
        cache[:, :, 6:8] = 1.0
        _ = torch.ones(2, 3, 1, 4) @ cache[:, :, :8].transpose(-1, -2)
        recurrent.mul_(0.5)

    counted = count(step, state={"cache": cache, "other": [recurrent]})
    assert counted.state_bytes_read == 2 * 3 * 6 * 4 * 4 + 2 * 5 * 4
    assert counted.state_bytes_written == 2 * 3 * 2 * 4 * 4 + 2 * 5 * 4


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("batch", "context", "new"), [(1, 0, 1), (1, 0, 7), (2, 5, 1), (3, 9, 1), (2, 5, 4)])
@pytest.mark.parametrize("logits", ["all", "last"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_pass_is_what_the_closed_form_says(
    device: str, batch: int, context: int, new: int, logits: Literal["all", "last"], tied: bool
) -> None:
    published = tbt.published["smollm2-135m"]
    config = dataclasses.replace(published, layers=published.layers[:2], vocab_size=1000, tie_embeddings=tied)
    with torch.device(device):
        model = tbt.Decoder(config).requires_grad_(False)
    state = model.new_state(batch, 32)
    if context:
        model(torch.zeros(batch, context, dtype=torch.long, device=device), state)
    tokens = torch.zeros(batch, new, dtype=torch.long, device=device)
    got = count(lambda: model(tokens, state, logits=logits), state=state)
    want = tbt.pass_cost(config, batch, context, new, recipe="fp32", state_bytes_per_element=4, logits=logits)
    assert (got.flops, got.weight_bytes, got.state_bytes) == (want.flops, want.weight_bytes, want.state_bytes)
    if device == "meta":  # on a CPU torch's own counter misses attention
        state = model.new_state(batch, 32)
        tokens = torch.zeros(batch, context + new, dtype=torch.long, device=device)
        assert count(lambda: model(tokens, state)).flops == torch_counts(lambda: model(tokens))


def test_the_largest_model_is_counted_on_the_meta_device() -> None:
    config = tbt.published["llama-3.1-405b"]
    with torch.device("meta"):
        model = tbt.Decoder(config).to(torch.bfloat16).requires_grad_(False)
    tokens = torch.zeros(1, 128, dtype=torch.long, device="meta")
    got, want = count(lambda: model(tokens, logits="last")), tbt.pass_cost(config, 1, 0, 128)
    assert (got.flops, got.weight_bytes) == (want.flops, want.weight_bytes)
    # 2 FLOPs a weight and token, where the head's weights meet one row only: an estimate of another hand.
    estimate = 2 * 128 * (405_853_388_800 - 2 * 128256 * 16384)
    assert got.flops == pytest.approx(estimate, rel=0.01)
