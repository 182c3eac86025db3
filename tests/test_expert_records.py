"""What chapter 11 reads from records: the routers of transformers, and the experiment on balance."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXPERIMENTS = Path(__file__).resolve().parents[1] / "book" / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import balance  # noqa: E402

BALANCE: dict[str, Any] = json.loads((EXPERIMENTS / "balance.json").read_text(encoding="utf-8"))


def test_the_recorded_routers_are_those_of_transformers() -> None:
    import routers

    kept = json.loads((EXPERIMENTS / "routers.json").read_text(encoding="utf-8"))["routers"]
    now = routers.record()["routers"]
    assert set(kept) == set(now) == {"mixtral", "jamba", "deepseek-v2", "deepseek-v3"}
    for name, entry in now.items():
        assert kept[name]["chosen"] == entry["chosen"]
        assert np.allclose(kept[name]["weights"], entry["weights"], rtol=1e-5)


def test_every_run_on_balance_is_there() -> None:
    assert BALANCE["recipe"] == balance.RECIPE
    assert set(BALANCE["runs"]) == {f"{cure}/{seed}" for cure in balance.CURES for seed in balance.SEEDS}


def test_a_router_collapses_without_a_cure_and_with_one_it_does_not() -> None:
    largest = {
        cure: statistics.mean(BALANCE["runs"][f"{cure}/{seed}"]["load"][0] for seed in balance.SEEDS)
        for cure in balance.CURES
    }
    assert largest["none"] > 5 > 2 > max(largest["loss 0.1"], largest["bias 0.01"])


@pytest.fixture
def net() -> balance.NextByte:
    torch.manual_seed(0)
    return balance.NextByte(balance.RECIPE)


def test_the_auxiliary_loss_is_one_when_even_and_lowers_who_is_overloaded(net: balance.NextByte) -> None:
    x = torch.randn(50, 64)
    even = torch.full((16,), 1 / 16)
    assert balance.uneven(net.moe, x, even).item() == pytest.approx(1, abs=1e-5)
    crowded = torch.zeros(16).scatter(0, torch.tensor([3]), 1.0)
    weight = net.moe.router.weight
    balance.uneven(net.moe, x, crowded).backward()
    assert weight.grad is not None
    before, after = ((x @ w.T).sigmoid().mean(0) for w in (weight, weight - 10 * weight.grad))
    assert after[3] < before[3]
    assert (after - before).argmin() == 3


@pytest.mark.parametrize("cure", ["none", "loss 1", "bias 0.01"])
def test_a_short_run_learns_and_its_loads_are_shares(cure: str) -> None:
    data = np.frombuffer(b"abcdefgh" * 100, np.uint8).astype(np.int64)
    entry = balance.run(cure, 0, data, data, {**balance.RECIPE, "steps": 20, "batch_bytes": 32})
    assert entry["passage_nats"] < 1  # from 5.5: eight bytes that follow each other
    assert sum(entry["load"]) == pytest.approx(16, abs=0.1)
    assert entry["load"] == sorted(entry["load"], reverse=True)
    assert [step for step, _ in entry["largest_load_while_training"]] == [10, 20]
