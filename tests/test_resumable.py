"""Sweeps that are stopped go on where they were: the record that the experiments of the book share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "experiments"))

import scans  # noqa: E402
from resumable import Record  # noqa: E402


def test_a_record_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    first = Record(path, tokens=512)
    assert not path.exists()  # opening one writes nothing
    first.keep({"a": {"ms": 1.0}})
    second = Record(path, tokens=256)
    assert "a" in second
    assert "b" not in second
    second.keep({"b": 2})
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["cases"] == {"a": {"ms": 1.0}, "b": 2}
    assert (kept["tokens"], kept["command"]) == (256, "python book/experiments/sweep.py")
    assert kept["torch"] == torch.__version__
    assert "a" not in Record(path, again=True)
    assert json.loads(path.read_text(encoding="utf-8")) == kept  # forgotten only when something new is kept


def test_the_minutes_of_all_runs_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 90.0, 150.0, 1000.0, 1030.0])
    monkeypatch.setattr("resumable.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    record = Record(tmp_path / "sweep.json")
    record.keep({"a": 1})
    record.keep({"b": 1})
    again = Record(tmp_path / "sweep.json")
    again.keep({"c": 1})
    assert again.values["minutes"] == 3.0


def test_what_cannot_be_written_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    Record(path).keep({"a": 1})
    before = path.read_text(encoding="utf-8")
    with pytest.raises(TypeError):
        Record(path).keep({"b": object()})
    assert path.read_text(encoding="utf-8") == before


def test_a_sweep_runs_only_the_cases_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scans.py"])
    monkeypatch.setattr(scans, "RECORD", tmp_path / "scans.json")
    monkeypatch.setattr(scans, "costs", lambda device: {"call": 1e-6})
    seen: list[tuple[int, int]] = []
    measured = scans.case

    def case(T: int, I: int, device: torch.device) -> dict[str, float]:
        seen.append((T, I))
        return measured(T, I, device)

    monkeypatch.setattr(scans, "case", case)
    for grid in ([(8, 4)], [(8, 4), (16, 4)]):
        monkeypatch.setattr(scans, "GRID", grid)
        scans.main()
    assert seen == [(8, 4), (16, 4)]
    kept = json.loads((tmp_path / "scans.json").read_text(encoding="utf-8"))
    assert set(kept["cases"]) == {"8/4", "16/4"}
    assert set(kept["cases"]["8/4"]) == set(scans.FORMS)
