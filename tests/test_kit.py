"""The kit: one record of all chapters' measurements, on this machine and on GPUs that are pretended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import file_record
import front_matter
import pytest
import torch
from fake_gpu import CAPABILITIES, answered, fake_gpu
from torch.overrides import TorchFunctionMode

from tokenbytoken import measure
from tokenbytoken.__main__ import main
from tokenbytoken.measure import Count, Timing, calibration, kit, records
from tokenbytoken.measure.kit import Bench, Case, Measurement, bench, taking

NAMES = {one.name for one in kit.MEASUREMENTS}
EIGHT = {torch.float8_e4m3fn, torch.float8_e5m2}


class Dtypes(TorchFunctionMode):
    """The formats of all tensors that operations give."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {out.dtype} if isinstance(out, torch.Tensor) else set()
        return out


def once(functions: Mapping[Any, Callable[[], object]], **_: Any) -> dict[Any, Timing]:
    """Each is called, none is timed."""
    for fn in functions.values():
        fn()
    return {name: Timing(2.0, 1.0, 3.0, 5) for name in functions}


@pytest.fixture
def unclocked(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench, calibration):
        monkeypatch.setattr(module, "interleaved", once)
        monkeypatch.setattr(module, "timed", lambda fn, **_: once({"": fn})[""])


@pytest.mark.usefixtures("unclocked")
@pytest.mark.parametrize("gpu", CAPABILITIES)
def test_every_measurement_runs_on_a_gpu_and_asks_for_what_it_has(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch)
    for module in (bench, calibration):  # what counts operations cannot look at tensors without numbers
        monkeypatch.setattr(module, "count", lambda fn, **_: Count(operations=1 + (fn() is ...)))
    with fake_gpu(monkeypatch, gpu) as where, Dtypes() as dtypes:
        record = kit.take(Bench(where, quick=True, layers=1), say=lambda line: None)
    entries = record["measurements"]
    assert entries.keys() == NAMES
    assert {name: entry["failed"] for name, entry in entries.items() if "failed" in entry} == {}
    missing = {name for name, entry in entries.items() if "unavailable" in entry}
    assert missing == ({"graphs", "fp8"} if gpu == "T4" else {"graphs"})  # which only CUDA itself has
    assert (torch.bfloat16 in dtypes.seen) == (gpu != "T4")
    assert bool(EIGHT & dtypes.seen) == (gpu != "T4")
    assert torch.float16 in dtypes.seen or gpu != "T4"
    assert (record["device"], tuple(record["capability"])) == (gpu, CAPABILITIES[gpu])
    assert "from compute capability 8.9 on; this device has 7.5" in entries["fp8"].get("unavailable", "") or gpu != "T4"


def simple(name: str = "rows", run: Callable[[], object] = lambda: None) -> Measurement:
    return Measurement(name, 1, "nothing", "n", lambda bench: {"1": Case(run, 4.0)})


def bench_here(monkeypatch: pytest.MonkeyPatch, bandwidth: list[float]) -> Bench:
    """A bench whose readings of the machine are said."""
    said = iter(bandwidth)
    monkeypatch.setattr(Bench, "reading", lambda self: {"bandwidth": next(said)})
    monkeypatch.setattr(taking, "calibrate", lambda where: FakeCalibration())
    return Bench(torch.device("cpu"), quick=True)


class FakeCalibration:
    dtype = "float32"

    def as_dict(self) -> dict[str, Any]:
        return {"bandwidth": []}


@pytest.mark.usefixtures("unclocked")
@pytest.mark.parametrize(
    ("readings", "tries", "disturbed"),
    [([100, 109], 1, False), ([100, 89, 100, 95], 2, False), ([100, 111, 100, 80], 2, True)],
)
def test_readings_that_differ_by_a_tenth(
    readings: list[float], tries: int, disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = bench_here(monkeypatch, readings)
    monkeypatch.setattr(measure.computer, "_cpu_seconds", lambda: None)
    entry = kit.take(here, (simple(),), say=lambda line: None)["measurements"]["rows"]
    assert (entry["tries"], entry["disturbed"]) == (tries, disturbed)
    assert entry["readings"] == {"bandwidth": readings[-2:]}
    assert entry["seconds"]["1"] == {"median": 2.0, "low": 1.0, "high": 3.0, "n": 5, "predicted": 4.0}


@pytest.mark.usefixtures("unclocked")
def test_one_that_fails_leaves_the_others_and_time_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    here = bench_here(monkeypatch, [1.0] * 8)
    list_of = (simple("bad", lambda: [][1]), simple("good"))
    entries = kit.take(here, list_of, say=lambda line: None)["measurements"]
    assert entries["bad"]["failed"] == "IndexError: list index out of range"
    assert "seconds" in entries["good"]
    entries = kit.take(here, list_of, seconds=-1, say=lambda line: None)["measurements"]
    assert entries["good"]["unavailable"] == "left out: -1 s were over"


def test_time_is_warm_and_no_median_of_two() -> None:
    calls: list[int] = []
    times = Bench(torch.device("cpu"), quick=True).time({"a": Case(lambda: calls.append(1))})
    assert (len(calls), times["a"].n) == (5, 3)


def test_stolen_time_is_read_where_the_system_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stolen = iter([10.0, 10.1])
    monkeypatch.setattr(measure.computer, "stolen_seconds", lambda: next(stolen))
    now = iter([0.0, 0.4])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    with measure.computer.watching() as load:
        pass
    assert load.stolen == pytest.approx(0.25)


def test_bad_paths_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    for out, word in (
        (tmp_path, "must name a .json file"),
        (tmp_path / "record.txt", "must name a .json file"),
        (tmp_path / "none" / "record.json", "there is no folder"),
        (other, "exists and is no record"),
    ):
        assert main(["measure", "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert word in said
        assert said.count("\n") == 1
    assert main(["measure", "--out", str(tmp_path / "r.json"), "--weights", "nothing"]) == 2
    assert "'nothing' is neither" in capsys.readouterr().err


def entry(median: float) -> dict[str, Any]:
    seconds = {"1": {"median": median, "low": median, "high": median, "n": 5, "predicted": median / 2}}
    return {"disturbed": False, "seconds": seconds}


def test_a_record_is_filed_by_its_machine_and_shown_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_RECORDS", tmp_path)
    run = {"format": kit.FORMAT, "device": "cpu", "cpu": "AMD EPYC", "threads": 2, "quick": False}
    gpu = run | {"device": "Tesla T4", "measurements": {"fp8": {"unavailable": "needs more"}, "rows": entry(0.003)}}
    path = tmp_path / "record.json"
    kept = []
    for record in (run | {"measurements": {"rows": entry(0.012)}}, gpu):
        path.write_text(json.dumps(record))
        kept.append(json.loads(file_record.filed(path).read_text(encoding="utf-8")))
    path.unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kit.amd-epyc-2-threads.json", "kit.tesla-t4.json"]
    lines = front_matter.machines_side_by_side(kept)
    assert "| | AMD EPYC, 2 threads | Tesla T4 |" in lines
    assert "| 1: SmolLM2-135M, float32: a pass of n tokens; n = 1 | 12 (2.0) | 3 (2.0) |" in lines
    assert "| 8: A product of n rows with 8192 × 8192 | not measured yet | needs more |" in lines
    alone = front_matter.machines_side_by_side(kept[:1])
    assert "| | AMD EPYC, 2 threads | GPU |" in alone
    assert "| 1: SmolLM2-135M, float32: a pass of n tokens; n = 1 | 12 (2.0) | not measured yet |" in alone
    for text, word in (("{}", "is no record"), ("[", "cannot be read"), (json.dumps(gpu | {"quick": True}), "--quick")):
        path.write_text(text)
        with pytest.raises(ValueError, match=word):
            file_record.filed(path)
