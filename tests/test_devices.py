"""The device path without a device: every mixer and a step of generation on a GPU that is pretended."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fake_gpu import CAPABILITIES, READS, answered, fake_gpu

import tokenbytoken as tbt
from tokenbytoken.layers import devices

FAMILIES = {
    "attention": "llama-3.1-8b", "latent attention": "deepseek-v2-lite", "experts": "mixtral-8x7b",
    "Mamba": "mamba-130m", "hybrid": "jamba-v0.1",
}  # fmt: skip


def decoder(name: str) -> tbt.Decoder:
    """A published model without numbers: its widths, and as many layers as hold each kind of it."""
    config = tbt.published[FAMILIES[name]]
    few = {"hybrid": 5}.get(name, 2)  # of Jamba, the fifth is attention
    return tbt.Decoder(dataclasses.replace(config, layers=config.layers[:few], vocab_size=512)).requires_grad_(False)


@pytest.mark.parametrize("name", FAMILIES)
def test_passes_states_and_a_step_of_generation_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = answered(monkeypatch)
    with fake_gpu(monkeypatch) as where:
        model = decoder(name)
        assert {p.device for p in model.parameters()} == {where}
        tokens = torch.empty(2, 5, dtype=torch.int64)
        for padding in (None, [0, 2]):
            state = model.new_state(2, 12, padding)
            mark = state.mark()
            out = model(tokens, state)  # a prompt, then a chunk, a step, a fork
            assert (out.shape, out.device, state.length) == ((2, 5, 512), where, 5)
            assert model(tokens[:, :3], state, logits="last").shape == (2, 1, 512)
            assert model(tokens[:, :1], state, logits="none").device == where
            fork = state.copy()
            both = tbt.DecoderState.concat([state, fork])
            assert (both.length, both.batch_size, both.padding.device) == (9, 4, where)
            state.rewind(mark)
            assert (state.length, fork.length) == (0, 9)
        reads.clear()
        assert tbt.generate(model, [[1, 2, 3]] * 2, 2) == [[0, 0]] * 2
        assert reads.count(torch.Size([2])) >= 2  # the tokens of each pass, at once
        assert all(len(shape) <= 1 and shape.numel() <= 2 for shape in reads), "more than tokens was read"


def test_a_device_that_is_mixed_up_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch)
    with fake_gpu(monkeypatch):
        model = decoder("attention")
        with pytest.raises(RuntimeError, match="same device"):
            model(torch.empty(1, 3, dtype=torch.int64, device="cpu"))
        state = model.new_state(1, 8)
        state.layers = [mixer.new_state(1, 8, model.dtype, torch.device("cpu")) for mixer in model.mixers]
        with pytest.raises(RuntimeError, match="device"):
            model(torch.empty(1, 3, dtype=torch.int64), state)


def test_numbers_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch):
        for tensor in (torch.empty(()), torch.empty(3)):
            with pytest.raises(READS):
                devices.read(tensor)


def test_what_each_gpu_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    able = {}
    for name in CAPABILITIES:
        with fake_gpu(monkeypatch, name) as where:
            kind = devices.kind(where)
            able[name] = (kind.half, kind.multiplies(torch.float8_e4m3fn), kind.multiplies(torch.float32))
    assert able == {
        "T4": (torch.float16, False, True),
        "L4": (torch.bfloat16, True, True),
        "H100": (torch.bfloat16, True, True),
    }
    here = devices.kind(torch.device("cpu"))
    assert (here.on_host, here.half, here.multiplies(torch.float8_e4m3fn)) == (True, torch.bfloat16, False)
    assert not here.multiplies(torch.int8)
