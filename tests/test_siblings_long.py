"""The long training of the siblings: the n-gram beside it, the fast forms, runs that are stopped, weights in 8 bits."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tokenbytoken as tbt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "experiments"))

import fast_training  # noqa: E402
import siblings  # noqa: E402
import siblings_long as long  # noqa: E402
from kneser_ney import KneserNey, packed  # noqa: E402

NAMES = list(siblings.SIBLINGS)
TEXT = np.frombuffer((ROOT / "book" / "experiments" / "siblings_prose.txt").read_bytes(), np.uint8)
compiled = pytest.mark.skipif(fast_training.COMPILER is None, reason="the scan needs a C compiler")


# --- Kneser–Ney --------------------------------------------------------------------------------------


@pytest.mark.parametrize("modified", [False, True])
def test_probabilities_of_all_bytes_sum_to_one(modified: bool) -> None:
    tables, rng = KneserNey(TEXT[:60_000], modified=modified), np.random.default_rng(0)
    for order in range(1, 9):
        for context in (TEXT[70_000 : 70_000 + order - 1], rng.integers(0, 256, order - 1).astype(np.uint8)):
            grams = np.concatenate([packed(np.append(context, byte).astype(np.uint8), order) for byte in range(256)])
            p = tables.probabilities(grams, order)
            assert p.sum() == pytest.approx(1, abs=1e-12)
            assert (p > 0).all()


def test_two_orders_by_hand() -> None:
    """abracadabra, one discount an order: a 5, b 2, r 2, c 1, d 1 and ab 2, br 2, ra 2, ac, ca, ad, da 1."""
    text = np.frombuffer(b"abracadabra", np.uint8)
    one = 2 / (2 + 2 * 2)  # counts of one: c, d; of two: b, r
    tables = KneserNey(text, 2, modified=False)
    uniform = 5 * one / 11 / 256  # five kinds of byte, 11 bytes
    assert tables.probabilities(packed(text[:1], 1), 1)[0] == pytest.approx((5 - one) / 11 + uniform)
    # Order 2, "ab": after a stand three kinds of byte, four in all.
    two = 4 / (4 + 2 * 3)
    # Below it, before b stood one kind of byte, before a three; of seven kinds of pair.
    before = Counter(pair[1] for pair in {bytes(text[i : i + 2]) for i in range(10)})
    assert sorted(before.values()) == [1, 1, 1, 1, 3]
    low = 4 / (4 + 2 * 1)  # none has two kinds before it: their number is taken as one
    below = (1 - low) / 7 + (5 * low / 7) / 256
    want = (2 - two) / 4 + (3 * two / 4) * below
    assert tables.probabilities(packed(text[:2], 2), 2)[0] == pytest.approx(want)


def test_a_context_that_was_never_seen_leaves_it_to_the_shorter_ones() -> None:
    tables = KneserNey(TEXT[:20_000], 3)
    unseen = packed(np.array([0, 255, ord("e")], np.uint8), 3)
    shorter = tables.below[0].refine(packed(np.array([ord("e")], np.uint8), 1), np.array([1 / 256]))
    assert tables.probabilities(unseen, 3) == pytest.approx(shorter)
    with pytest.raises(ValueError, match="1 to 8, not 9"):
        KneserNey(TEXT[:100], 9)


def test_longer_orders_predict_better_and_each_byte_but_the_first_is_counted() -> None:
    tables, held = KneserNey(TEXT[:100_000]), TEXT[100_000:110_000]
    nats = [tables.nats_per_byte(held, order) for order in (1, 2, 3, 4)]
    assert nats == sorted(nats, reverse=True)
    p = [tables.probabilities(packed(held[max(0, i - 2) : i + 1], min(3, i + 1)), min(3, i + 1)) for i in range(1, 50)]
    assert tables.nats_per_byte(held[:50], 3) == pytest.approx(-np.log(p).mean())


# --- The fast forms ----------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("length", [1, 16, 41])
def test_the_scan_equals_the_packages_loop(length: int) -> None:
    from tokenbytoken.layers import selective_scan

    rng = np.random.default_rng(length)
    shapes = ((2, length, 64), (2, length, 64), (64, 16), (2, length, 16), (2, length, 16))
    found: list[tuple[torch.Tensor, ...]] = []
    values = [torch.from_numpy(rng.standard_normal(shape)) for shape in shapes]
    values[1], values[2] = F.softplus(values[1]), -values[2].exp()
    weight = torch.from_numpy(rng.standard_normal(shapes[0]))
    for fast in (False, True):
        x, delta, A, B, C = inputs = [v.clone().requires_grad_() for v in values]
        if fast:
            y = fast_training.scan(x, delta, A, B, C)
        else:
            y, _ = selective_scan(x, delta, A, B, C, torch.zeros(2, 64, 16, dtype=torch.float64), scan="loop")
        found.append((y.detach(), *torch.autograd.grad((y * weight).sum(), inputs)))
    for want, got in zip(*found, strict=True):
        assert (got - want).abs().max() <= 1e-12 * max(1.0, want.abs().max())
    assert found[0][0].abs().max() > 1


@compiled
def test_the_scan_says_what_it_cannot_do() -> None:
    x, B = torch.zeros(1, 2, 48), torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match=r"multiple of 32.*\(48, 16\)"):
        fast_training.scan(x, x, torch.zeros(48, 16), B, B)
    with pytest.raises(ValueError, match="float16"):
        fast_training.scan(x.half(), x.half(), torch.zeros(48, 16).half(), B.half(), B.half())


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_the_package(name: str) -> None:
    """In float64; 72 bytes are four chunks of the scan and a half."""
    tokens = torch.from_numpy(TEXT[:146].astype(np.int64)).view(2, 73)
    found: list[tuple[float, dict[str, torch.Tensor]]] = []
    for quick in (False, True):
        model = siblings.fresh(siblings.SIBLINGS[name], 0).double()
        if quick:
            fast_training.quicken(model)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        found.append((loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (want, gradients), (got, quickened) = found
    assert got == pytest.approx(want, abs=1e-10)
    assert set(gradients) == set(quickened)
    for parameter, gradient in gradients.items():
        assert (quickened[parameter] - gradient).abs().max() <= 1e-8 * gradient.abs().max(), parameter


# --- Runs --------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {**long.RECIPE, "lengths": [32, 64], "batch_bytes": 128, "warmup": 2}


def test_an_epoch_sees_each_byte_once_and_seeds_differ() -> None:
    data = np.random.default_rng(0).integers(0, 256, 2000).astype(np.uint8)  # no 32 bytes of it occur twice
    run = list(long.batches(data, TINY, 0))
    assert len(run) == long.steps(len(data), TINY) == 30
    offsets = []
    for length, rows, part in ((32, 4, run[:15]), (64, 2, run[15:])):
        windows = np.lib.stride_tricks.sliding_window_view(data, length + 1)
        starts = [int((windows == row.numpy()).all(1).nonzero()[0].item()) for row in chain.from_iterable(part)]
        assert len(set(starts)) == len(starts) == 15 * rows
        assert starts != sorted(starts)
        (offset,) = {start % length for start in starts}  # one grid, so that no two sequences overlap
        offsets.append(offset)
    assert offsets[0] != offsets[1] % 32
    assert not torch.equal(run[0], next(long.batches(data, TINY, 1)))
    assert torch.equal(run[0], next(long.batches(data, TINY, 0)))


@pytest.mark.parametrize("name", ["mla-moe", "hybrid"])
def test_a_run_that_was_stopped_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    data, path = TEXT[:900], tmp_path / "run.pt"
    whole = long.Training(name, 0, data, TINY)
    want = whole.run(tmp_path / "other.pt", every=math.inf).state_dict()
    for after in (3, 8):  # stopped twice, each time in a process that knows nothing of the one before
        stop: Iterator[bool] = chain(repeat(False, after - 1), [True])
        with pytest.raises(long.Stopped):
            long.Training(name, 0, data, TINY).run(path, every=math.inf, stop=stop)
    again = long.Training(name, 0, data, TINY)
    got = again.run(path, every=math.inf).state_dict()
    assert whole.step == again.step == long.steps(900, TINY) > 11
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert again.curve == whole.curve
    assert again.curve[-1][1] < again.curve[0][1]
    with pytest.raises(SystemExit, match="another recipe"):
        long.Training(name, 0, data, {**TINY, "warmup": 3}).run(path)


def test_checkpoints_are_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = long.Training("mqa", 0, TEXT[:600], TINY), tmp_path / "run.pt"
    run.save(path)
    before = path.read_bytes()

    def broken(values: Any, file: Path) -> None:
        file.write_bytes(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(OSError, match="disk full"):
        run.save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["mamba", "mla-moe"])
def test_eight_bits_err_no_more_than_plain_rounding_to_127_steps(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    hf = siblings.SIBLINGS[name]
    model = siblings.fresh(hf, 0)
    save_file(long.compact(model, hf), tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").stat().st_size <= 1.2e6
    loaded = dict(tbt.load(long.expanded(tmp_path / "weights.safetensors", hf, tmp_path / "hf")).named_parameters())
    for key, weight in model.named_parameters():
        squared = (loaded[key] - weight).square()
        if weight.dim() < 2:
            assert torch.equal(loaded[key], weight), key
        elif weight.shape[-1] < 24:
            assert (squared <= (2**-11 * weight).square() + 1e-14).all(), key  # float16
        else:
            step = weight.abs().amax(-1, keepdim=True) / 127
            rounded = ((weight / step).round() * step - weight).square()
            assert squared.sum() <= 1.01 * rounded.sum(), key  # the scale itself is rounded, to float16
    halves = long.compact(model, hf, bits=16)
    assert not any(key.endswith(".scale") for key in halves)


def test_context_that_is_cut_is_what_a_short_window_sees() -> None:
    model, text = tbt.load("sibling-mqa"), TEXT[5000:5060]
    nats = [
        -model(torch.from_numpy(text[max(0, i - 8) : i].astype(np.int64))[None])[0, -1].log_softmax(-1)[int(text[i])]
        for i in range(1, len(text))
    ]
    assert long.cut_nats_per_byte(model, text, rows=7) == pytest.approx(float(torch.stack(nats).mean()), abs=1e-5)
    text = TEXT[5000:5700]
    want = siblings.nats_per_byte(model, text)
    assert long.nats_per_byte(model, text, rows=2) == pytest.approx(want, abs=1e-5)
    assert long.nats_per_byte(model, text[:100]) == pytest.approx(siblings.nats_per_byte(model, text[:100]), abs=1e-5)


def test_differences_are_paired_by_seed() -> None:
    runs = {f"{name}/{seed}": {"held_out_nats": value} for name, values in
            {"mla": (1.5, 1.7, 1.6), "mha": (1.4, 1.5, 1.5)}.items() for seed, value in enumerate(values)}  # fmt: skip
    mean, half, n = long.paired(runs, "mla", "mha")  # 0.1, 0.2, 0.1
    assert (mean, n) == (pytest.approx(0.4 / 3), 3)
    assert half == pytest.approx(4.303 * math.sqrt(1 / 300) / math.sqrt(3))
    assert long.paired(runs, "gqa", "mha")[2] == 0


@pytest.mark.slow
def test_quick_runs_are_recorded_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "texts", lambda: (TEXT[:8192], TEXT[8192:16384]))  # the corpus takes ten seconds
    quick = ["--quick", "--folder", str(tmp_path), "--seeds", "0", "--names", "mqa"]
    long.main(quick)
    record = json.loads((tmp_path / "siblings_long.json").read_text(encoding="utf-8"))
    entry = record["runs"]["mqa/0"]
    assert entry["curve"][-1][1] < entry["curve"][0][1] - 1
    assert abs(entry["held_out_nats"] - entry["held_out_exact_nats"]) < long.WORTH
    assert len(record["kneser_ney"]["plain"]["held_out"]) == 8
    assert not list((tmp_path / "siblings_long_checkpoints").glob("*.pt"))
    said = capsys.readouterr().out
    assert "mqa/0: 28 steps" in said
    assert "Kneser–Ney" in said
    long.main(quick)
    assert "28 steps" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        long.main(["--quick"])
