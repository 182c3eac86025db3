"""Counting, timing, calibrating, showing, recording."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tokenbytoken as tbt
from tokenbytoken import _paths, measure
from tokenbytoken.measure import Calibrated, Calibration, Curve, Timing, count, show

MARKED = re.compile(r"⟨[^⟨⟩\n]*⟩")


def torch_counts(fn) -> int:
    with FlopCounterMode(display=False) as mode:
        fn()
    return mode.get_total_flops()


# --- FLOPs -------------------------------------------------------------------------------------------


def products(device: str) -> dict[str, object]:
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
def test_products_as_torch_counts_them(name: str, device: str, mode) -> None:
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
def test_attention_is_counted_full_on_every_device(kind: str, device: str, mode) -> None:
    B, H, K, T, S, D, Dv = 2, 6, 3, 5, 7, 8, 4
    S = T if kind == "causal" else S
    heads = K if kind == "grouped" else H
    q = torch.zeros(B, H, T, D, device=device)
    k, v = torch.zeros(B, heads, S, D, device=device), torch.zeros(B, heads, S, Dv, device=device)
    options = {
        "causal": {"is_causal": True},
        "full": {},
        "masked": {"attn_mask": torch.ones(T, S, dtype=torch.bool, device=device)},
        "grouped": {"enable_gqa": True},
    }[kind]
    with mode():
        counted = count(lambda: F.scaled_dot_product_attention(q, k, v, **options))
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
        measure._RULES.pop(torch.ops.tbt_test.scan, None)


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
def test_weights_are_read_once(device: str, mode) -> None:
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
        cover, seen = measure._Cover(), np.zeros(480, dtype=bool)
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
    device: str, batch: int, context: int, new: int, logits: str, tied: bool
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


# --- Time --------------------------------------------------------------------------------------------


def test_every_function_is_called_as_often_as_said() -> None:
    calls: list[str] = []
    times = measure.interleaved(
        {name: lambda name=name: calls.append(name) for name in "abc"}, repeats=4, warmup=2, device="cpu"
    )
    assert [calls.count(name) for name in "abc"] == [6, 6, 6]
    rounds = ["".join(calls[6 + 3 * r : 9 + 3 * r]) for r in range(4)]
    assert rounds == ["abc", "bca", "cab", "abc"]
    assert all(t.n == 4 and t.low <= t.median <= t.high for t in times.values())


def test_a_clock_we_control(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0, 1.0, 0.0, 2.0, 0.0, 9.0, 0.0])  # the load watcher looks first and last
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(now))
    timing = measure.timed(lambda: None, repeats=3, warmup=0, device="cpu")
    assert (timing.low, timing.median, timing.high, timing.n) == (1.5, 2.0, 5.5, 3)
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        measure.timed(lambda: None, repeats=0)


def test_a_busy_machine_is_called_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_cpu_seconds", lambda: 100.0 + measure.time.process_time())
    assert measure.busy() is None
    monkeypatch.setattr(measure, "_cpu_seconds", lambda: 1.5 * measure.time.perf_counter())
    assert re.fullmatch(r"other processes use 1\.[45] of \d+ cores: .*", measure.busy() or "")
    assert measure.timed(lambda: measure.time.sleep(0.05), repeats=3, warmup=0, device="cpu").busy
    monkeypatch.setattr(measure, "_cpu_seconds", lambda: None)
    assert not measure.timed(lambda: None, device="cpu").busy


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not count processor time in /proc")
def test_another_process_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            assert measure.busy() is not None
        finally:
            other.kill()


def test_our_own_work_is_not_others() -> None:
    def work() -> None:
        end = measure.time.perf_counter() + 0.3
        while measure.time.perf_counter() < end:
            pass

    before = measure._cpu_seconds()
    if before is None:
        pytest.skip("this system does not count processor time in /proc")
    with measure._watching() as idle:
        measure.time.sleep(0.3)
    with measure._watching() as load:
        work()
    assert load.cores < idle.cores + 0.8  # one whole core, were our own counted


# --- Calibrate ---------------------------------------------------------------------------------------


def test_a_curve_is_straight_on_log_log_paper() -> None:
    curve = Curve((1.0, 10.0, 100.0), (2.0, 200.0, 200.0))
    assert curve(3.0) == pytest.approx(2 * 3.0**2)  # y = 2 x² between the first two points
    assert [curve(x) for x in (0.1, 1, 10, 50, 1e9)] == pytest.approx([2, 2, 200, 200, 200])
    for x, y in (((), ()), ((1.0,), (1.0, 2.0)), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 2.0), (0.0, 1.0))):
        with pytest.raises(ValueError, match="curve"):
            Curve(x, y)


def machine(device: str = "cpu") -> Calibration:
    return Calibration(
        device=device,
        dtype="float32",
        threads=1,
        bandwidth=Curve((1e6, 1e8), (100e9, 10e9)),
        large_bandwidth=12e9,
        rates={1e6: Curve((1.0, 100.0), (50e9, 500e9)), 1e8: Curve((1.0, 100.0), (5e9, 500e9))},
        operation=1e-6,
    )


def test_prediction_takes_the_larger_of_reading_and_computing() -> None:
    reading = machine().predict_pass(weight_bytes=1e9, flops=1e8, rows=1, operations=1000)
    assert reading == pytest.approx(0.1 + 0.001)
    assert reading.binds == "memory"
    computing = machine().predict_pass(weight_bytes=1e9, flops=1e12, rows=100, operations=1000, state_bytes=1e8)
    assert computing == pytest.approx(2.0 + 0.01 + 0.001)
    assert (computing.memory, computing.compute) == pytest.approx((0.1, 2.0))
    assert computing.binds == "compute"
    small = machine().predict_pass(weight_bytes=1e6, flops=1e5, rows=1, operations=1000)
    assert small == pytest.approx(1e-5 + 1e-3)
    assert small.binds == "overhead"
    # On a GPU the launches run ahead of the work.
    assert machine("cuda").predict_pass(1e9, 1e8, 1, 1000) == pytest.approx(0.1)
    assert machine("cuda").predict_pass(1e6, 1e5, 1, 1000) == pytest.approx(1e-3)


def test_rate_depends_on_rows_and_working_set() -> None:
    assert machine().rate(10) == pytest.approx(50e9)
    assert machine().rate(1, 1e7) == pytest.approx(math.sqrt(50e9 * 5e9))
    assert machine().rate(1, 1e5) == pytest.approx(50e9)


def test_a_prediction_stays_marked_through_arithmetic() -> None:
    x = Calibrated(2.0)
    for value in (x + 1, 1 + x, x - 1, 1 - x, x * 2, 2 * x, x / 2, 2 / x, sum([x, x])):
        assert isinstance(value, Calibrated)
    assert (x + 1, 1 - x, 2 / x) == (3.0, -1.0, 1.0)


def test_a_calibration_is_an_accelerator() -> None:
    here = machine().accelerator()
    config = tbt.published["smollm2-135m"]
    prediction = tbt.predict(config, here, 1, 64, recipe="fp32", state_bytes_per_element=4)
    assert prediction.fits
    assert prediction.seconds >= prediction.bytes_needed / 100e9
    assert here.measured


def test_a_record_of_a_calibration_is_plain_numbers() -> None:
    assert json.loads(json.dumps(machine().as_dict()))["bandwidth"] == [[1e6, 100e9], [1e8, 10e9]]
    assert not re.search(r"\d [kMGT]?(B|FLOP)/s", MARKED.sub("", str(machine())))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calibrate(dtype: torch.dtype) -> None:
    shapes = {weight.shape for weight in tbt.Decoder(tbt.published["smollm2-135m"]).parameters() if weight.dim() == 2}
    assert not shapes & {*map(torch.Size, measure._LAYER), torch.Size(measure._LARGE)}
    calibration = measure.calibrate("cpu", dtype)
    assert calibration.bandwidth.x[-1] > 100e6  # beyond most caches
    assert all(0 < y < 1e13 for y in calibration.bandwidth.y)
    assert all(curve.x[0] == 1 and curve.x[-1] == 256 for curve in calibration.rates.values())
    assert 1e-8 < calibration.operation < 1e-2


@pytest.mark.measure
def test_calibrate_is_quick_and_its_curves_rise() -> None:
    start = measure.time.perf_counter()
    calibration = measure.calibrate("cpu")
    assert calibration.busy or measure.time.perf_counter() - start < 4
    assert calibration.busy or calibration.rate(64) > 2 * calibration.rate(1)


# --- Show and record ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0031, "ms", "⟨3.1 ms⟩"),
        (0.00996, "ms", "⟨10 ms⟩"),
        (4.4821e-3, "µs", "⟨4,500 µs⟩"),
        (12.34e9, "GB/s", "⟨12 GB/s⟩"),
        (3 * 2**30, "GiB", "⟨3.0 GiB⟩"),
        (0.694, "×", "⟨0.69 ×⟩"),
        (0.0, "ms", "⟨0 ms⟩"),
        (Timing(0.5, 0.4, 0.6, 3), "s", "⟨0.50 s⟩"),
    ],
)
def test_two_digits_in_the_unit_asked_for(value: float, unit: str, text: str) -> None:
    assert measure.measured(value, unit) == text
    with pytest.raises(ValueError, match="unit 'furlong' is not one of"):
        measure.measured(1.0, "furlong")


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    show("step", Timing(3.1e-3, 3.0e-3, 3.3e-3, 7), 4.4832e-3)
    show("step", 3.1e-3, Calibrated(4.4832e-3))
    show("rate", 2e9, unit="GB/s")
    show("step", Timing(3.1e-3, 3.0e-3, 3.3e-3, 7, busy=True))
    assert capsys.readouterr().out.splitlines() == [
        "step: ⟨3.1 ms⟩ (⟨3.0 to 3.3⟩), predicted 4.48 ms, measured ÷ predicted ⟨0.69⟩",
        "step: ⟨3.1 ms⟩, predicted ⟨4.5 ms⟩, measured ÷ predicted ⟨0.69⟩",
        "rate: ⟨2.0 GB/s⟩",
        "step: ⟨3.1 ms⟩ (⟨3.0 to 3.3, machine busy⟩)",
    ]
    with pytest.raises(ValueError, match="predicted must be positive"):
        show("step", 1.0, 0.0)


def test_two_runs_print_the_same_once_the_markers_are_blanked(capsys: pytest.CaptureFixture[str]) -> None:
    for busy, scale in ((False, 1.0), (True, 777.0)):
        show("step", Timing(3.1e-3 * scale, 3.0e-3, 3.3e-3, 7, busy), 4.4832e-3)
        show("step", 3.1e-3, Calibrated(4.4832e-3 * scale))
        print(measure.machine("cpu"))
    lines = [MARKED.sub("⟨⟩", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == lines[3:]
    assert "4.48" in lines[0]
    assert lines[2] == "⟨⟩"


def test_a_record_is_written_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_RECORDS", tmp_path / "measurements")
    monkeypatch.delenv("TBT_RECORD", raising=False)
    assert measure.record("speed", {"ms": 3.1}) is None
    with pytest.raises(ValueError, match="no reference run 'speed'"):
        measure.reference("speed")
    monkeypatch.setenv("TBT_RECORD", "1")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bench.py"), "--quick"])
    assert measure.record("speed", {"ms": 3.1}) == tmp_path / "measurements" / "speed.json"
    entry = measure.reference("speed")
    assert entry["payload"] == {"ms": 3.1}
    assert entry["command"] == "python bench.py --quick"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"])
    assert {"device", "driver", "cpu", "threads", "torch", "python", "busy"} <= entry.keys()
    assert entry["torch"] == torch.__version__
    assert str(tmp_path) not in json.dumps(entry)
    with pytest.raises(ValueError, match="not JSON compliant"):
        measure.record("speed", {"ms": math.nan})
    assert measure.reference("speed") == entry  # a record that fails leaves the old one
    for name in ("../evil", "Speed", ""):
        with pytest.raises(ValueError, match="a record's name"):
            measure.reference(name)


def test_committed_records_say_where_they_come_from() -> None:
    paths = sorted((_paths.BOOK / "measurements").glob("*.json"))
    assert paths
    for path in paths:
        entry = measure.reference(path.stem)
        assert entry["name"] == path.stem
        assert all(entry[key] for key in ("device", "cpu", "threads", "torch", "python", "date", "command", "payload"))
        assert entry["busy"] is None, f"{path.name} was measured on a busy machine"
        assert not re.search(r"/(home|root|tmp|work|Users|content)\b", path.read_text(encoding="utf-8"))


def test_records_are_found_beside_the_package_wherever_that_is(tmp_path: Path) -> None:
    package = Path(measure.__file__).parent
    shutil.copytree(package, tmp_path / "tokenbytoken", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "book" / "measurements").mkdir(parents=True)
    (tmp_path / "book" / "measurements" / "a.json").write_text('{"payload": {"x": 1}}')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = (
        "import tokenbytoken as tbt; print(tbt.measure.reference('a')['payload'], "
        "tbt.measure.book_file('measurements/a.json').name)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split("\n")[0] == "{'x': 1} a.json"


def test_book_files() -> None:
    with pytest.raises(ValueError, match=r"the book has no file 'data/nothing\.txt'"):
        measure.book_file("data/nothing.txt")
    with pytest.raises(ValueError, match="leads out"):
        measure.book_file("../pyproject.toml")
