"""A mixer that the package has never seen goes through all of it, and no line of the package knows of it.

Gated linear attention (Yang et al. 2023, arXiv 2312.06635): each head keeps one matrix, which decays by a gate and
takes in the outer product of every new key and value. The page *Add a mixer* shows this file step by step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from families import feed, random_tokens
from fuzz import cut, fuzz
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tokenbytoken as tbt
from tokenbytoken.config import Flops, StateSize, Weight
from tokenbytoken.decoder import LayerState, Mixer, Pass
from tokenbytoken.layers import product
from tokenbytoken.run import Draft

# [config]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedLinearConfig:
    """Gated linear attention as data: H heads, each with a state of D x D numbers."""

    module: ClassVar[str] = f"{__name__}:GatedLinear"

    num_heads: int
    head_dim: int

    def weights(self, hidden_size: int) -> Iterator[Weight]:
        width = self.num_heads * self.head_dim
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj"):
            yield Weight(name, "mixer", width, hidden_size)
        yield Weight("o_proj", "mixer", hidden_size, width)

    def state(self) -> StateSize:
        return StateSize(recurrent=self.num_heads * self.head_dim**2)

    def flops(self, context: Any, new_tokens: Any, *, causal: bool = False, form: str = "auto") -> Flops:
        """For each number of the state: one product to decay it, a multiply-add to write it, one to read it."""
        return Flops(recurrence=new_tokens * 5 * self.num_heads * self.head_dim**2)

    def intensity(
        self, *, bytes_per_element: float, recurrent_bytes_per_element: float, new_tokens: int, form: str
    ) -> float:
        return 5 * new_tokens / (2 * recurrent_bytes_per_element)

    def cache_share(self, tensor_parallel: Any) -> Any:
        return 1 / tensor_parallel

    def summed(self) -> tuple[Any, ...]:
        return ()

    def exchanged(self) -> tuple[Any, Any]:
        return 0, 0


# [state]


class Memory:
    """The matrices of one layer, (B, H, D, D): as large after a thousand tokens as after one."""

    def __init__(self, matrices: Tensor) -> None:
        self.matrices = matrices

    def nbytes(self, length: int | None = None) -> int:
        return self.matrices.nbytes

    def mark(self) -> Tensor:
        return self.matrices.clone()  # what it forgot is gone: only a copy leads back

    def rewind(self, mark: Tensor) -> None:
        self.matrices.copy_(mark)

    def gather(self, rows: Sequence[int], start: int, end: int, max_length: int, shift: int = 0) -> Memory:
        return Memory(self.matrices[list(rows)])

    @classmethod
    def concat(cls, states: Sequence[Memory]) -> Memory:
        return cls(torch.cat([state.matrices for state in states]))


# [module]


class GatedLinear(nn.Module):
    """x (B, T, M) → (B, T, M): memory ← gate · memory + key valueᵀ, and the query reads it."""

    def __init__(self, config: GatedLinearConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.gate_proj = (
            nn.Linear(hidden_size, width, bias=False) for _ in range(4)
        )
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def new_state(self, batch_size: int, max_length: int, dtype: torch.dtype, device: torch.device) -> Memory:
        H, D = self.config.num_heads, self.config.head_dim
        return Memory(torch.zeros(batch_size, H, D, D, dtype=torch.promote_types(dtype, torch.float32), device=device))

    def forward(self, x: Tensor, step: Pass, state: Memory | None = None) -> Tensor:
        B, T, _ = x.shape
        H, D = self.config.num_heads, self.config.head_dim
        memory = (state or self.new_state(B, T, x.dtype, x.device)).matrices
        keys = step.without_pads(self.k_proj(x))  # pads come first: they leave the memory empty
        projected = (self.q_proj(x), keys, self.v_proj(x), self.gate_proj(x).sigmoid())
        q, k, v, gate = (t.to(memory.dtype).view(B, T, H, D) for t in projected)
        out = []
        for t in range(T):
            decayed = product(memory, gate[:, t, :, :, None])  # (B, H, D, D)
            memory = torch.addcmul(decayed, k[:, t, :, :, None], v[:, t, :, None, :])
            out.append(q[:, t, :, None] @ memory)  # (B, H, 1, D)
        if state is not None:
            state.matrices.copy_(memory.detach())
        return self.o_proj(torch.cat(out, dim=2).transpose(1, 2).reshape(B, T, -1).to(x.dtype))


# [end]

_: type[Mixer] = GatedLinear
__: type[LayerState] = Memory

MIXER = GatedLinearConfig(num_heads=2, head_dim=8)
CONFIG = tbt.DecoderConfig(
    vocab_size=97,
    hidden_size=32,
    layers=(tbt.LayerConfig(mixer=MIXER, feed_forward=tbt.SwiGLUConfig(intermediate_size=48)),) * 3,
    name="gated-linear",
)
PROMPT = random_tokens(1, 11)[0].tolist()


@pytest.fixture(scope="module")
def model() -> tbt.Decoder:
    torch.manual_seed(0)
    with torch.no_grad():
        made = tbt.Decoder(CONFIG)
        for weight in made.parameters():  # large enough that a fault is not lost in the tolerance
            if weight.dim() == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)
    return made.eval().requires_grad_(False)


def same(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    assert torch.isfinite(got).all()
    assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())


def in_float64(model: tbt.Decoder, x: Tensor) -> Tensor:
    """The first mixer by its definition: y_t = Σ_s q_t · (Π_{s<r≤t} gate_r) k_s · v_s, in float64, without a state."""
    mixer: Any = model.layers[0].mixer
    q, k, v, gate = (
        (x.double() @ layer.weight.double().T).view(*x.shape[:2], 2, 8)
        for layer in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.gate_proj)
    )
    out = torch.zeros_like(v)
    for t in range(x.shape[1]):
        for s in range(t + 1):
            kept = gate[:, s + 1 : t + 1].sigmoid().prod(dim=1)
            out[:, t] += (q[:, t] * kept * k[:, s]).sum(-1, keepdim=True) * v[:, s]
    return out.flatten(2) @ mixer.o_proj.weight.double().T


def test_the_mixer_is_what_it_says(model: tbt.Decoder) -> None:
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    mixer: Any = model.layers[0].mixer
    same(mixer(x, Pass(x[..., 0])).double(), in_float64(model, x))


@fuzz
@given(data=st.data())
def test_any_chunking_equals_one_pass(model: tbt.Decoder, data: st.DataObject) -> None:
    tokens = random_tokens(2, 14, seed=data.draw(st.integers(0, 99)))
    same(feed(model, tokens, cut(data, 14)), model(tokens))


def test_padded_rows_equal_their_own_runs(model: tbt.Decoder) -> None:
    rows = [random_tokens(1, n, seed=n) for n in (4, 9)]
    batch = torch.cat([nn.functional.pad(rows[0], (5, 0)), rows[1]])
    for chunks in ([9], [3, 1, 5]):  # the first may be all pads
        got = feed(model, batch, chunks, padding=[5, 0])
        assert torch.isfinite(got).all()
        same(got[:1, 5:], model(rows[0]))
        same(got[1:], model(rows[1]))


def test_mark_rewind_copy_select_concat(model: tbt.Decoder) -> None:
    tokens = random_tokens(2, 8)
    want = model(tokens)
    state = model.new_state(2, 8)
    model(tokens[:, :5], state)
    mark, fork = state.mark(), state.copy()
    model(random_tokens(2, 3, seed=7), state)
    state.rewind(mark)
    assert state.length == 5
    same(model(tokens[:, 5:], state), want[:, 5:])
    same(model(tokens[:, 5:], fork.copy()), want[:, 5:])
    same(model(tokens[[1], 5:], fork.select([1])), want[[1], 5:])
    both = tbt.DecoderState.concat([fork.select([1]), fork.select([0])])
    same(model(tokens[[1, 0], 5:], both), want[[1, 0], 5:])


def test_generate_and_speculate_write_the_same(model: tbt.Decoder) -> None:
    text = list(PROMPT)
    for _ in range(12):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    written = text[len(PROMPT) :]
    assert tbt.generate(model, PROMPT, 12) == written
    assert tbt.generate(model, [PROMPT, PROMPT[4:]], 12) == [written, tbt.generate(model, PROMPT[4:], 12)]
    drafts: list[Draft] = [tbt.PromptLookup(), tbt.DraftModel(tbt.first_layers(model, 1)), tbt.DraftModel(model)]
    for draft in drafts:
        told = tbt.speculate(model, PROMPT, 12, draft=draft, num_draft=3)
        assert told.tokens == written
    assert told.acceptance == 1


def test_what_runs_is_what_the_closed_forms_say(model: tbt.Decoder) -> None:
    assert tbt.count_parameters(CONFIG).total == sum(p.numel() for p in model.parameters())
    assert tbt.weight_bytes(CONFIG, "fp32") == sum(p.nbytes for p in model.parameters())
    for batch, context, new in ((1, 0, 6), (2, 5, 1), (3, 4, 3)):
        state = model.new_state(batch, context + new)
        assert state.nbytes == tbt.state_bytes(CONFIG, batch, context + new, 4) == 3 * batch * 2 * 8 * 8 * 4
        if context:
            model(random_tokens(batch, context), state)
        tokens = random_tokens(batch, new)
        counted = tbt.measure.count(lambda: model(tokens, state, logits="last"), state=state)  # noqa: B023
        told = tbt.pass_cost(CONFIG, batch, context, new, recipe="fp32", state_bytes_per_element=4)
        assert counted.flops == told.flops
        assert counted.weight_bytes == told.weight_bytes
        assert counted.state_bytes == told.state_bytes
    assert tbt.attention_intensity(CONFIG) == 5 / 8
    assert tbt.prefill_crossing(CONFIG) == math.inf


def test_predict_size_and_ledger(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenbytoken.__main__ import main

    told = tbt.predict(CONFIG, "h100", 4, 1000, recipe="bf16")
    weights = 2 * (tbt.count_parameters(CONFIG).total - (97 - 4) * 32)  # of the embedding, four rows
    state = 2 * 4 * 3 * 2 * 64 * 4  # read and written, in float32
    assert told.memory_seconds == pytest.approx((weights + state) / 3.35e12)
    assert tbt.predict(CONFIG, "h100", 4, 1000, gpus=2).memory_seconds == pytest.approx(told.memory_seconds / 2)
    assert tbt.predict(CONFIG, "h100", 4, 1000, gpus=2).communication_seconds > 0
    monkeypatch.setitem(tbt.published, "gated-linear", CONFIG)
    assert main(["size", "gated-linear", "--gpu", "h100", "--batch", "4"]) == 0
    printed = capsys.readouterr().out
    assert f"{tbt.count_parameters(CONFIG).total:,}" in printed
    assert "any length" in printed
    assert tbt.ledger("gated-linear")[0].reader_bytes == 3 * 2 * 64 * 4


def test_quantised_it_is_close_and_as_small_as_told(model: tbt.Decoder) -> None:
    half = model.to(torch.float32)
    small = tbt.quantize_as(half, "int8")
    tokens = random_tokens(1, 12)
    same(small(tokens), half(tokens), 0.1)
    inside = sum(w.area for w in CONFIG.weights() if w.role in ("mixer", "feed_forward"))
    rows = sum(w.rows for w in CONFIG.weights() if w.role in ("mixer", "feed_forward"))
    assert tbt.stored_bytes(half) - tbt.stored_bytes(small) == 3 * inside - 4 * rows


def test_saved_and_loaded_it_is_the_same(model: tbt.Decoder, tmp_path: Path) -> None:
    tbt.save(model, tmp_path / "gated-linear")
    loaded = tbt.load(tmp_path / "gated-linear", config=CONFIG)
    tokens = random_tokens(1, 12)
    assert torch.equal(loaded(tokens), model(tokens))
