"""What chapter 14 reads from files: a mixer as transformers computed it, and the decoders whose steps were timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from families import assert_close

import tokenbytoken as tbt
from tokenbytoken.layers.mamba import Mamba

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "book" / "experiments"))

import mamba_mixer
import step_cost


def test_the_recorded_mixer_is_what_transformers_computes_and_the_package_too() -> None:
    record = json.loads(mamba_mixer.RECORD.read_text(encoding="utf-8"))
    weights, x = mamba_mixer.drawn()
    assert record["x"] == x.tolist()
    assert record["weights"] == {name: w.tolist() for name, w in weights.items()}
    want = torch.tensor(mamba_mixer.reference(weights, x), dtype=torch.float64)
    assert_close(torch.tensor(record["y"], dtype=torch.float64), want, 2e-6)
    config = tbt.MambaConfig(
        inner_size=mamba_mixer.INNER, state_size=mamba_mixer.STATE, conv_size=mamba_mixer.TAPS,
        dt_rank=mamba_mixer.RANK,
    )  # fmt: skip
    mixer = Mamba(config, mamba_mixer.HIDDEN).double().requires_grad_(False)
    mixer.load_state_dict({name.replace("dt_proj.bias", "dt_bias"): torch.tensor(w) for name, w in weights.items()})
    tokens = torch.tensor(x)[None]
    assert_close(mixer(tokens, tbt.decoder.Pass(tokens, 0, None, tokens.dtype))[0], want, 2e-6)


def test_the_decoders_that_are_timed_are_equal_in_size_and_step_where_they_say() -> None:
    models = step_cost.decoders()
    counts = {sum(p.numel() for p in model.parameters()) for model in models.values()}
    assert counts == {tbt.count_parameters(model.config).total for model in models.values()} == {13_693_440}
    context = 300
    for model in models.values():
        run = step_cost.step(model, context)
        moved = tbt.measure.count(run, weights=model, state=_state_of(run))
        assert moved.state_bytes == tbt.pass_cost(model.config, 1, context - 1, state_bytes_per_element=4).state_bytes


def _state_of(run: object) -> tbt.DecoderState:
    cells = [cell.cell_contents for cell in run.__closure__]  # type: ignore[attr-defined]
    return next(content for content in cells if isinstance(content, tbt.DecoderState))


def test_the_record_holds_every_case() -> None:
    record = json.loads(step_cost.RECORD.read_text(encoding="utf-8"))
    wanted = {f"decode {name} {context}" for name in step_cost.DECODERS for context in step_cost.DECODE}
    for tokens in step_cost.PREFILL:
        wanted |= {f"prefill {name} {tokens}" for name in step_cost.DECODERS} | {f"scan mamba {tokens}"}
    assert record["cases"].keys() == wanted
    times = np.array([[case["low"], case["ms"], case["high"]] for case in record["cases"].values()])
    assert (times > 0).all()
    assert (np.diff(times, axis=1) >= 0).all()
