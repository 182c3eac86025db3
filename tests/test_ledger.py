"""The ledger: the rows to which the book's chapters come, and text that stays the same where it must."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tokenbytoken as tbt
from tokenbytoken.cost import Accelerator, predict
from tokenbytoken.world import Ledger, book, ledger, row, typical

CONFIG = tbt.published["llama-3.1-405b"]


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f}"


def test_the_rows_of_the_book() -> None:
    found = [
        (_gigabytes(r.weight_bytes), _gigabytes(r.reader_bytes), r.weights_fit, r.readers, r.served) for r in book()
    ]
    assert found == [
        ("811.7", "1,082.3", False, 0, 0),  # 405B, a KV head for each of 128 query heads
        ("811.7", "67.6", False, 0, 0),
        ("487.2", "67.6", True, 2, 0),  # the paper's FP8
        ("487.2", "33.8", True, 4, 1),  # with an FP8 cache
        ("688.6", "9.2", False, 0, 0),  # DeepSeek-V3 on eight H100
        ("688.6", "9.2", True, 5, 4),  # on eight H200, the latent on each GPU
        ("688.6", "9.2", True, 32, 16),  # each reader on one GPU
        ("688.6", "9.2", True, 47, 33),  # each reader's tokens on all
        ("427.5", "4.9", True, 43, 25),  # Jamba 1.5 Large in INT8
    ]


def test_a_row_predicts_what_predict_predicts() -> None:
    answer = row("llama-3.1-405b", recipe="fp8-ffn")
    step = predict(CONFIG, "h100", 1, 131_072, gpus=8, recipe="fp8-ffn")
    prompt = predict(CONFIG, "h100", 1, 0, new_tokens=131_072, gpus=8, recipe="fp8-ffn", causal=True)
    assert answer.token_seconds == step.seconds
    assert answer.first_token_seconds == prompt.seconds
    assert row("llama-3.1-405b").token_seconds is None


def test_kv_heads_change_the_cache_and_not_the_weights() -> None:
    whole, grouped = row("smollm2-135m", kv_heads=9, gpus=1), row("smollm2-135m", gpus=1)
    assert whole.reader_bytes == 3 * grouped.reader_bytes
    assert whole.weight_bytes == grouped.weight_bytes
    # on a machine with room for exactly the published weights and two such readers
    exact = Accelerator(
        name="x", memory_bytes=whole.weight_bytes + 2 * whole.reader_bytes, bandwidth=1e12, flops={"bf16": 1e15}
    )
    assert row("smollm2-135m", kv_heads=9, gpus=1, gpu=exact).readers == 2
    assert whole.token_seconds is None
    assert whole.label == "smollm2-135m bf16, 9 KV heads"
    assert row("smollm2-135m", kv_heads=1, gpus=1).label == "smollm2-135m bf16, 1 KV head"
    for model in ("deepseek-v3", "mamba-2.8b"):
        with pytest.raises(ValueError, match="no attention layers whose KV heads could be set"):
            row(model, kv_heads=8)


def test_text() -> None:
    text = str(ledger())
    lines = text.split("\n")
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 120
    assert repr(ledger()) == text
    low, high = typical("lone decode")
    assert lines[0] == (
        "131,072 tokens in; state and times of one reader; "
        f"times are floors (half of published tokens took {low} to {high} times that)"
    )
    body = [re.split(r" {2,}", line.strip()) for line in lines[2:]]
    assert [cells[0] for cells in body] == [r.label for r in book()]
    assert [cells[5] for cells in body] == [f"{r.readers}" for r in book()]
    assert len({line.rindex(cells[-1]) + len(cells[-1]) for line, cells in zip(lines[2:], body, strict=True)}) == 1


def test_ledgers_add_up() -> None:
    both = ledger("llama-3.1-405b", recipe="fp8-ffn") + ledger("smollm2-135m", gpu="t4", gpus=1, context=8192)
    assert isinstance(both, Ledger)
    assert [r.config.name for r in both.rows] == ["llama-3.1-405b", "smollm2-135m"]
    assert (len(both), both[1].readers) == (2, 83)
    assert "8,192 or 131,072 tokens in" in str(both)
    assert str(ledger(row(CONFIG))) == str(ledger(CONFIG)) == str(ledger("llama-3.1-405b"))


def test_what_depends_on_a_calibrated_machine_is_marked_at_a_fixed_width() -> None:
    texts = set()
    for bandwidth, memory in ((9e9, 8e9), (900e9, 512e9)):
        machine = Accelerator(name="cpu", memory_bytes=memory, bandwidth=bandwidth, flops={"fp32": 1e11}, measured=True)
        text = str(ledger("smollm2-135m", gpu=machine, recipe="fp32", context=2000))
        assert text.count("⟨") == 4
        texts.add(re.sub(r"⟨[^⟩]*⟩", "⟨⟩", text))
        assert len(re.findall(r"⟨ *[\d,.]+( GB| s| ms| µs)?⟩", text)) == 4
    assert len(texts) == 1
    assert "this machine" in texts.pop()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama-4", {}, "unknown model 'llama-4'"),
        ("gpt-3", {}, "shape of its attention only"),
        ("llama-3.1-8b", {"recipe": "fp4"}, "unknown recipe"),
        ("smollm2-135m", {"gpu": "h1"}, "unknown accelerator"),
        ("smollm2-135m", {}, "tensor_parallel = 8 does not divide 9 query heads and 3 KV heads"),
        ("llama-3.1-8b", {"context": 0}, "context must be a positive integer, not 0"),
        ("llama-3.1-8b", {"context": True}, "context must be a positive integer, not True"),
        ("llama-3.1-8b", {"gpus": 0}, "gpus must be a positive integer, not 0"),
        ("llama-3.1-8b", {"kv_heads": 1.5}, "kv_heads must be a positive integer, not 1.5"),
        ("llama-3.1-8b", {"state_bytes_per_element": -1}, "state_bytes_per_element must be a number above 0"),
        (ledger("llama-3.1-8b"), {}, "a row is a model's name, a DecoderConfig or what"),
    ],
)
def test_bad_rows_are_refused(model: Any, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ledger(model, **options)


def test_options_need_a_model() -> None:
    with pytest.raises(ValueError, match="name a model"):
        ledger(recipe="bf16")


def test_options_never_pass_by_a_finished_row() -> None:
    finished = row("llama-3.1-405b")
    with pytest.raises(ValueError, match=r"'llama-3\.1-405b bf16' is finished: recipe, gpu would not change it"):
        ledger("llama-3.1-8b", finished, recipe="fp8-ffn", gpu="h200")
    assert ledger(finished).rows == (finished,)


def test_integers_of_numpy_count_as_integers() -> None:
    options = {"gpus": 8, "context": 8192, "kv_heads": 8}
    got, want = (
        ledger("llama-3.1-8b", **{k: kind(v) for k, v in options.items()}, state_bytes_per_element=kind(1))
        for kind in (np.int64, int)
    )
    assert str(got) == str(want)
