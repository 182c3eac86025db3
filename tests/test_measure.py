"""Timing, calibrating, showing, recording."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import tokenbytoken as tbt
from tokenbytoken import _paths, measure
from tokenbytoken.commands import calibrating
from tokenbytoken.measure import Calibrated, Calibration, Curve, Timing, calibration, computer, records, show

MARKED = re.compile(r"⟨[^⟨⟩\n]*⟩")


# --- Time --------------------------------------------------------------------------------------------


def test_every_function_is_called_as_often_as_said() -> None:
    calls: list[str] = []
    times = measure.interleaved(
        {name: partial(calls.append, name) for name in "abc"}, repeats=4, warmup=2, device="cpu"
    )
    assert [calls.count(name) for name in "abc"] == [6, 6, 6]
    rounds = ["".join(calls[6 + 3 * r : 9 + 3 * r]) for r in range(4)]
    assert rounds == ["abc", "bca", "cab", "abc"]
    assert all(t.n == 4 and t.low <= t.median <= t.high for t in times.values())


def test_a_clock_we_control(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0, 1.0, 0.0, 2.0, 0.0, 9.0, 0.0])  # the load watcher looks first and last
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    timing = measure.timed(lambda: None, repeats=3, warmup=0, device="cpu")
    assert (timing.low, timing.median, timing.high, timing.n) == (1.5, 2.0, 5.5, 3)
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        measure.timed(lambda: None, repeats=0)


def test_a_busy_machine_is_called_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computer, "_cpu_seconds", lambda: 100.0 + time.process_time())
    assert measure.busy() is None
    monkeypatch.setattr(computer, "_cpu_seconds", lambda: 1.5 * time.perf_counter())
    assert re.fullmatch(r"other processes use 1\.[45] of \d+ cores: .*", measure.busy() or "")
    assert measure.timed(lambda: time.sleep(0.05), repeats=3, warmup=0, device="cpu").busy
    monkeypatch.setattr(computer, "_cpu_seconds", lambda: None)
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
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            pass

    before = computer._cpu_seconds()
    if before is None:
        pytest.skip("this system does not count processor time in /proc")
    with computer.watching() as idle:
        time.sleep(0.3)
    with computer.watching() as load:
        work()
    assert load.cores is not None
    assert idle.cores is not None
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
    # The rates are those of the bytes that compete for the cache, where these are not the pass's own.
    part = machine().predict_pass(1e6, 1e5, 1, 0, working_set=1e9)
    assert (part.memory, part.compute) == pytest.approx((1e6 / 10e9, 1e5 / 5e9))
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
def test_calibrate(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):  # only the shapes are wanted
        model = tbt.Decoder(tbt.published["smollm2-135m"])
    shapes = {weight.shape for weight in model.parameters() if weight.dim() == 2}
    assert shapes
    assert not shapes & {*map(torch.Size, calibration._LAYER), torch.Size(calibration._LARGE)}

    def once(
        functions: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int, device: str | torch.device
    ) -> dict[str, Timing]:  # what is asserted here holds of single runs, too
        return measure.interleaved(functions, repeats=1, warmup=0, device=device)

    monkeypatch.setattr(calibration, "interleaved", once)
    here = measure.calibrate("cpu", dtype)
    assert here.bandwidth.x[-1] > 100e6  # beyond most caches
    assert all(0 < y < 1e13 for y in here.bandwidth.y)
    assert all(curve.x[0] == 1 and curve.x[-1] == 256 for curve in here.rates.values())
    assert 1e-8 < here.operation < 1e-2


@pytest.mark.measure
def test_calibrate_is_quick_and_its_curves_rise() -> None:
    start = time.perf_counter()
    here = measure.calibrate("cpu")
    assert here.busy or time.perf_counter() - start < 4
    assert here.busy or here.rate(64) > 2 * here.rate(1)


def calibrate_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    calibrating.add_arguments(parser)
    return calibrating.run(parser.parse_args(arguments))


def test_the_command_prints_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[torch.dtype] = []

    def calibrate(where: torch.device, dtype: torch.dtype, quick: bool) -> Calibration:
        asked.append(dtype)
        return replace(machine(), dtype=str(dtype).removeprefix("torch."), busy=dtype == torch.bfloat16)

    monkeypatch.setattr(measure, "calibrate", calibrate)
    monkeypatch.setattr(records, "_RECORDS", tmp_path)
    monkeypatch.setenv("TBT_RECORD", "1")
    assert calibrate_command() == 0
    assert asked == [torch.float32, torch.bfloat16]
    out = capsys.readouterr().out
    assert "calibrated in float32 ⟨undisturbed⟩" in out
    assert out.endswith("not recorded: other processes disturbed it\n")
    assert [path.name for path in tmp_path.iterdir()] == ["calibration-cpu-1-threads-float32.json"]
    entry = measure.reference("calibration-cpu-1-threads-float32")
    assert entry["command"] == "TBT_RECORD=1 python -m tokenbytoken calibrate float32"
    assert entry["payload"] == machine().as_dict()
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        calibrate_command("float32", "int8")
    assert len(asked) == 2, "nothing is measured before all names are known"


def test_the_command_is_known_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from tokenbytoken.commands import calibrating as c; print(c.NAME)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "calibrate\n"


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
    monkeypatch.setattr(records, "_RECORDS", tmp_path / "measurements")
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


def test_a_gpu_never_replaces_the_record_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_RECORDS", tmp_path)
    monkeypatch.setenv("TBT_RECORD", "1")
    measure.record("speed", {"ms": 3.1})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    measure.record("speed", {"ms": 0.1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speed.json", "speed.nvidia-h100-80gb-hbm3.json"]
    assert measure.reference("speed")["payload"] == {"ms": 3.1}
    found = measure.reference("speed", gpu="NVIDIA H100 80GB HBM3")
    assert (found["payload"], found["device"]) == ({"ms": 0.1}, "NVIDIA H100 80GB HBM3")
    assert found["instructions"] == torch.backends.cpu.get_cpu_capability()


def test_committed_records_say_where_they_come_from() -> None:
    paths = sorted((_paths.BOOK / "measurements").glob("*.json"))
    assert paths
    for path in paths:
        entry = json.loads(path.read_text(encoding="utf-8"))
        assert entry["name"] == path.stem or path.stem.startswith(f"{entry['name']}.")  # and its GPU
        assert all(entry[key] for key in ("device", "cpu", "threads", "torch", "python", "date", "command", "payload"))
        assert entry["busy"] is None, f"{path.name} was measured on a busy machine"
        assert not re.search(r"/(home|root|tmp|work|Users|content)\b", path.read_text(encoding="utf-8"))


def test_records_are_found_beside_the_package_wherever_that_is(tmp_path: Path) -> None:
    package = Path(tbt.__file__).parent
    shutil.copytree(package, tmp_path / "tokenbytoken", ignore=shutil.ignore_patterns("__pycache__", "weights"))
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
