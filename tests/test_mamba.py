"""The Mamba mixer: its scans against each other and against numbers by hand, its state, its cost in closed form."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.nn.functional as F
from families import assert_close, assert_differs, feed, jamba, mamba, ours, random_tokens, reference_logits, uneven

import tokenbytoken as tbt
from tokenbytoken.layers import devices
from tokenbytoken.layers.mamba import SCANS, Mamba, MambaState, Scan, selective_scan
from tokenbytoken.measure import count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMS = cast("list[Scan]", list(SCANS))
MODELS = {"mamba": mamba, "jamba": jamba}


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.nn.Module, tbt.Decoder]:
    reference = MODELS[request.param](0)
    return reference, ours(reference, tmp_path_factory.mktemp(request.param))


def inputs(B: int, T: int, I: int, N: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """x, Δ, A, B, C and an earlier state."""
    g = torch.Generator().manual_seed(seed)
    x, b, c, h = (
        torch.randn(*shape, generator=g, dtype=dtype) for shape in ((B, T, I), (B, T, N), (B, T, N), (B, I, N))
    )
    delta = torch.rand(B, T, I, generator=g, dtype=dtype)
    return [x, delta, -torch.rand(I, N, generator=g, dtype=dtype) * 4, b, c, h]


def by_definition(
    x: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The closed form, without a recurrence: h_t is the sum over s ≤ t of exp(A Σ_{s<r≤t} Δ_r) Δ_s B_s x_s."""
    T = x.shape[1]
    y = torch.zeros_like(x)
    for t in range(T):
        state = (delta[:, : t + 1].sum(1)[..., None] * A).exp() * h
        for s in range(t + 1):
            decay = (delta[:, s + 1 : t + 1].sum(1)[..., None] * A).exp()
            state = state + decay * (delta[:, s] * x[:, s])[..., None] * B[:, s, None]
        y[:, t] = torch.einsum("bin,bn->bi", state, C[:, t])
    return y, state


# --- the scan -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", FORMS)
@pytest.mark.parametrize("T", [1, 2, 3, 5, 16, 17])
def test_every_form_equals_the_definition(scan: Scan, T: int) -> None:
    arguments = inputs(2, T, 3, 4, seed=T)
    kept = [t.clone() for t in arguments]
    for got, want in zip(selective_scan(*arguments, scan=scan), by_definition(*arguments), strict=True):
        assert (got - want).abs().max() < 1e-12 * max(1, want.abs().max().item())
    assert all(torch.equal(a, b) for a, b in zip(arguments, kept, strict=True))  # nothing was written to


@pytest.mark.parametrize("scan", FORMS)
def test_a_split_anywhere_changes_nothing(scan: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
    x, delta, A, B, C, h = inputs(2, 37, 3, 4)
    want, last = selective_scan(x, delta, A, B, C, h)
    for split in (1, 2, 18, 36):
        first, second = slice(0, split), slice(split, 37)
        y1, middle = selective_scan(x[:, first], delta[:, first], A, B[:, first], C[:, first], h, scan=scan)
        y2, end = selective_scan(x[:, second], delta[:, second], A, B[:, second], C[:, second], middle, scan=scan)
        assert (torch.cat((y1, y2), dim=1) - want).abs().max() < 1e-12
        assert (end - last).abs().max() < 1e-12
    for name in ("LOOP_BLOCK", "PARALLEL_BLOCK"):  # blocks of three tokens: 2 × 3 × 12 numbers
        monkeypatch.setattr(f"tokenbytoken.layers.mamba.{name}", 3 * 24 + 1)
    got, end = selective_scan(x, delta, A, B, C, h, scan=scan)
    assert max((got - want).abs().max(), (end - last).abs().max()) < 1e-12


@pytest.mark.parametrize("scan", FORMS)
@pytest.mark.parametrize("strength", [1e-4, 1.0, 1e4])
def test_16k_tokens_of_any_decay_neither_overflow_nor_turn_nan(scan: Scan, strength: float) -> None:
    x, delta, A, B, C, h = inputs(1, 16_384, 2, 2, dtype=torch.float32)
    A = -torch.tensor([[1.0, 0.5], [strength, strength]])  # Δ A down to −10⁴, and beside it a slow one
    delta[:, ::7] = 1.0
    got, last = selective_scan(x, delta, A, B, C, h, scan=scan)
    want, end = selective_scan(*(t.double() for t in (x, delta, A, B, C, h)))
    assert got.isfinite().all()
    assert last.isfinite().all()
    # Where nothing is forgotten, 16,384 roundings of 6e-8 add up: at random to 1e-5, in the worst case to 1e-3.
    assert_close(got.double(), want, 1e-4)
    assert_close(last.double(), end, 1e-4)


@pytest.mark.parametrize("scan", FORMS)
def test_after_a_sudden_forgetting_small_decays_keep_their_digits(scan: Scan) -> None:
    # Cumulated decays near −10⁵ have a spacing of 0.008 in float32: their differences would lose the −0.001.
    x, delta, A, B, C, h = inputs(1, 64, 1, 1, dtype=torch.float32)
    delta = torch.full_like(delta, 1e-3)
    delta[:, ::16] = 1e5
    A = -torch.ones(1, 1)
    got, _ = selective_scan(x, delta, A, B, C, h, scan=scan)
    want, _ = selective_scan(*(t.double() for t in (x, delta, A, B, C, h)))
    assert_close(got.double(), want, 1e-6)


@pytest.mark.parametrize("scan", FORMS)
def test_the_scan_can_be_trained_through(scan: Scan) -> None:
    arguments = [t.requires_grad_() for t in inputs(2, 5, 2, 3)]
    assert torch.autograd.gradcheck(lambda *a: selective_scan(*a, scan=scan), arguments)


def test_scan_auto_is_the_loop_on_a_cpu_and_can_be_forced() -> None:
    arguments = inputs(1, 64, 8, 4, dtype=torch.float32)
    forms: list[Scan] = ["auto", *FORMS]
    work = {scan: count(partial(selective_scan, *arguments, scan=scan)) for scan in forms}
    elements = 64 * 8 * 4
    # Two products, a multiply-add and C · h for each; eight chunks of eight tokens and one more multiply-add each,
    # and seven steps from chunk to chunk; 63 + 62 + 60 + 56 + 48 + 32 multiply-adds of doubling, and that of h.
    assert work["auto"].flops == work["loop"].flops == 6 * elements
    assert work["chunked"].flops == 8 * elements + 7 * 2 * 32
    assert work["associative"].flops == 4 * elements + 2 * 32 * (63 + 62 + 60 + 56 + 48 + 32 + 1)
    steps = {scan: sum(n for name, n in w.calls_by_operation.items() if "addcmul" in name) for scan, w in work.items()}
    assert steps == {"auto": 64, "loop": 64, "chunked": 8 + 7 + 1, "associative": 6 + 1}  # that wait for each other
    with pytest.raises(ValueError, match="scan must be 'auto', 'loop', 'chunked', 'associative', not 'fast'"):
        selective_scan(*arguments, scan="fast")  # type: ignore[arg-type]


def test_scan_auto_is_chunks_where_a_call_is_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    here, gpu = devices.kind, devices.Kind("a GPU", capability=(9, 0), on_host=False)

    def noted(name: str, form: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> torch.Tensor:
        taken.append(name)
        return form(*arguments)

    for name, form in SCANS.items():
        monkeypatch.setitem(SCANS, name, partial(noted, name, form))
    for T in (64, 2, 1):  # a single step has nothing to cut
        x, *rest = inputs(1, T, 3, 4)
        monkeypatch.setattr(devices, "kind", here)
        want = selective_scan(x, *rest)[0]
        monkeypatch.setattr(devices, "kind", lambda _: gpu)
        got = selective_scan(x, *rest)[0]
        assert (got - want).abs().max() < 1e-12
    assert taken == ["loop", "chunked", "loop", "chunked", "loop", "loop"]


def test_a_mixer_takes_any_form(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    reference, model = pair
    tokens = random_tokens(2, 30)
    want = reference_logits(reference, tokens)
    mixers = [module for module in model.modules() if isinstance(module, Mamba)]
    for scan in FORMS:
        for mixer in mixers:
            mixer.scan = scan
        assert_close(model(tokens), want)
        assert_close(feed(model, tokens, [11, 1, 18]), want)
    for mixer in mixers:
        mixer.scan = "auto"


# --- numbers by hand ------------------------------------------------------------------------------------


def single(**changes: Any) -> Mamba:
    config = tbt.MambaConfig(inner_size=1, state_size=1, conv_size=1, dt_rank=1, conv_bias=False)
    return Mamba(dataclasses.replace(config, **changes), 1).requires_grad_(False)


def test_a_scalar_recurrence_by_hand() -> None:  # C50
    delta = F.softplus(torch.tensor(0.5) + 0.5)
    assert delta.item() == pytest.approx(1.3132617)
    assert math.exp(-delta.item()) == pytest.approx(0.2689414)
    x = torch.tensor([1.0, 2.0, 0.0]).view(1, 3, 1)
    ones = torch.ones(1, 3, 1)
    y, _ = selective_scan(x, delta * ones, -torch.ones(1, 1), 3 * ones, 2 * ones, torch.zeros(1, 1, 1))
    assert (y + 0.5 * x).flatten().tolist() == pytest.approx([8.3795701, 18.8782830, 4.8082109], abs=1e-5)


def test_delta_is_softplus_of_projection_and_bias_once_and_does_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(x: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, *others: torch.Tensor, **options: Any) -> Any:
        seen.append((delta, A))
        return selective_scan(x, delta, A, *others, **options)

    monkeypatch.setattr("tokenbytoken.layers.mamba.selective_scan", spy)
    mixer = single(state_size=16, conv_size=1)
    step = tbt.decoder.Pass(torch.zeros(1, 1), 0, None, torch.float32)
    for raw, bias, want in ((0.0, 0.5, 0.9740770), (0.0, 1.0, 1.3132617), (0.0, 100.0, 100.0)):  # C50, C51
        mixer.dt_proj.weight.fill_(raw)
        mixer.dt_bias.fill_(bias)
        mixer(torch.ones(1, 1, 1), step)
        assert seen[-1][0].item() == pytest.approx(want)
    assert seen[-1][1].flatten().tolist() == pytest.approx([-n for n in range(1, 17)], abs=1e-5)  # C52
    mixer.bfloat16()(torch.ones(1, 1, 1, dtype=torch.bfloat16), step)
    assert {t.dtype for t in seen[-1]} == {torch.float32}


def test_the_newest_input_meets_the_last_tap() -> None:  # C53
    mixer = single(conv_size=4)
    mixer.conv1d.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4))
    x = torch.tensor([1.0, 0, 0, 0, 0]).view(1, 5, 1)
    want = F.silu(torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]))
    assert torch.equal(mixer._convolve(x, None).flatten(), want)
    state = mixer.new_state(1, 8, torch.float32, torch.device("cpu"))
    assert torch.equal(torch.cat([mixer._convolve(t, state) for t in x.split(1, 1)]).flatten(), want)


def test_the_convolution_is_the_librarys() -> None:
    mixer = Mamba(tbt.MambaConfig(inner_size=6, state_size=2, conv_size=4, dt_rank=1), 3).requires_grad_(False).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = F.silu(mixer.conv1d(F.pad(x.transpose(1, 2), (3, 0)))).transpose(1, 2)
    assert (mixer._convolve(x, None) - want).abs().max() < 1e-12


def test_a_new_mixer_starts_as_the_paper_says() -> None:
    mixer = Mamba(tbt.MambaConfig(inner_size=64, state_size=4, conv_size=4, dt_rank=2), 32)
    assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 5).expand(64, 4))
    delta = F.softplus(mixer.dt_bias)
    assert delta.min() > 0.00099
    assert 5 * delta.min() < delta.max() < 0.101


# --- steps and states -----------------------------------------------------------------------------------


def test_step_by_step_equals_the_scan_at_any_split(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:  # C48
    reference, model = pair
    tokens = random_tokens(1, 33)
    want = reference_logits(reference, tokens)
    for n in (1, 2, 3, 4, 5, 32):
        assert_close(feed(model, tokens, [n] + [1] * (33 - n)), want)


def test_float64_is_exact_to_1e_10(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    model = copy.deepcopy(pair[1]).double()
    tokens = random_tokens(2, 30)
    whole = model(tokens)
    for chunks in ([1] * 30, uneven(30)):
        assert (feed(model, tokens, chunks) - whole).abs().max() < 1e-10


def test_bfloat16_follows_transformers_and_keeps_its_sums_in_float32(tmp_path: Path) -> None:
    reference = mamba(residual_in_fp32=False).bfloat16()
    reference.save_pretrained(tmp_path)
    model = tbt.load(tmp_path, dtype=torch.bfloat16)
    tokens = random_tokens(2, 24)
    want = reference_logits(reference, tokens).float()
    assert_close(feed(model, tokens, [9, 1, 14]).float(), want, relative=0.05)  # eight bits a rounding, a few dozen
    assert_differs(model(tokens).float(), reference_logits(mamba(seed=1), tokens), relative=0.2)
    state = model.new_state(2, 30)
    model(tokens, state)
    held = [layer for layer in state.layers if isinstance(layer, MambaState)]
    assert len(held) == len(state.layers)
    assert {(s.conv.dtype, s.ssm.dtype) for s in held} == {(torch.bfloat16, torch.float32)}
    assert state.nbytes == tbt.state_bytes(model.config, 2, 30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_are_float32_at_least_whatever_the_model_is(
    pair: tuple[torch.nn.Module, tbt.Decoder], dtype: torch.dtype
) -> None:
    model = copy.deepcopy(pair[1]).to(dtype)
    state = model.new_state(2, 20)
    for chunk in random_tokens(2, 14).split([3, 1, 1, 9], dim=1):
        assert model(chunk, state).dtype == dtype
    recurrent = [layer for layer in state.layers if isinstance(layer, MambaState)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {(layer.conv.dtype, layer.ssm.dtype) for layer in recurrent} == {(dtype, wide)}
    assert state.nbytes == tbt.state_bytes(model.config, 2, 20, dtype.itemsize, wide.itemsize)
    assert state.select([1]).copy().nbytes == tbt.state_bytes(model.config, 1, 20, dtype.itemsize, wide.itemsize)


def test_bytes_of_the_state_are_what_arithmetic_says(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    for batch, length in ((1, 1), (3, 50)):
        state = model.new_state(batch, length)
        assert state.nbytes == tbt.state_bytes(model.config, batch, length, bytes_per_element=4)
        model(random_tokens(batch, 1), state)
        assert state.nbytes_used == tbt.state_bytes(model.config, batch, 1, bytes_per_element=4)


def test_rewinding_restores_what_cannot_be_cut_back(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    reference, model = pair
    tokens, draft = random_tokens(2, 20), random_tokens(2, 4, seed=1)
    want = reference_logits(reference, tokens)
    state = model.new_state(2, 24)
    model(tokens[:, :7], state)
    mark = state.mark()
    copied = sum(t.numel() * t.element_size() for layer in mark.layers if layer is not None for t in layer)
    assert copied == tbt.state_bytes(model.config, 2, 0, bytes_per_element=4)  # the recurrent parts and nothing else
    for rejected in (4, 1, 3):  # drafts that are thrown away, from one mark
        model(draft[:, :rejected], state)
        state.rewind(mark)
        assert state.length == 7
    assert_close(model(tokens[:, 7:9], state), want[:, 7:9])  # a draft of which two are kept
    assert_close(model(tokens[:, 9:], state), want[:, 9:])


def test_after_a_pass_that_broke_off_a_mark_leads_back(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    reference, model = pair
    tokens = random_tokens(2, 12)
    state = model.new_state(2, 12)
    model(tokens[:, :5], state)
    mark = state.mark()
    hook = model.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens[:, 5:], state)
    hook.remove()
    assert state.length == 5
    state.rewind(mark)
    assert_close(model(tokens[:, 5:], state), reference_logits(reference, tokens)[:, 5:])


def test_states_are_forked_chosen_and_joined(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    reference, model = pair
    long, short = random_tokens(1, 15), random_tokens(2, 9, seed=1)
    next_tokens = random_tokens(3, 4, seed=2)
    states = [model.new_state(rows.shape[0], 20) for rows in (long, short)]
    for rows, state in zip((long, short), states, strict=True):
        model(rows, state)
    joined = tbt.DecoderState.concat(states)
    wants = [
        reference_logits(reference, torch.cat((row, new[None]), dim=1))[:, -4:]
        for row, new in zip((long, short[:1], short[1:]), next_tokens, strict=True)
    ]
    fork = joined.copy()
    assert_close(model(next_tokens, fork), torch.cat(wants))
    chosen = joined.select([2, 1])
    assert chosen.length == 9
    assert_close(model(next_tokens[[2, 1]], chosen), torch.cat([wants[2], wants[1]]))
    assert_close(model(next_tokens, joined), torch.cat(wants))  # neither took anything from it


def test_rows_still_in_their_pads_can_be_chosen_and_joined(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    reference, model = pair
    padding, length = [0, 9, 14], 16
    batch = torch.cat([F.pad(random_tokens(1, length - pads, seed=pads), (pads, 0), value=5) for pads in padding])
    want = [reference_logits(reference, batch[i : i + 1, pads:]) for i, pads in enumerate(padding)]

    def check(state: tbt.DecoderState, rows: list[int], cut: int) -> None:
        got = model(batch[rows, cut:], state)
        for logits, row in zip(got, rows, strict=True):
            new = min(length - cut, length - padding[row])
            assert_close(logits[None, -new:], want[row][:, -new:])

    for cut in (3, 9, 12):  # rows 1 and 2, then row 2 alone, have not begun
        state = model.new_state(3, length, padding)
        model(batch[:, :cut], state)
        for rows in ([2, 1], [2], [0, 2], [1, 1, 0]):
            check(state.select(rows), rows, cut)
        check(tbt.DecoderState.concat([state.select([0]), state, state.select([0, 2])]), [0, 0, 1, 2, 0, 2], cut)


def test_one_sequence_leaves_nothing_to_the_next(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:  # C54
    _, model = pair
    tokens = random_tokens(1, 12)
    first = feed(model, tokens, [5, 7])
    feed(model, random_tokens(1, 12, seed=1), [12])
    assert torch.equal(feed(model, tokens, [5, 7]), first)


def test_greedy_generation_in_a_batch_equals_transformers_whole_passes(
    pair: tuple[torch.nn.Module, tbt.Decoder],
) -> None:
    reference, model = pair
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (2, 5, 11)]
    got = tbt.generate(model, prompts, 6)
    for prompt, new in zip(prompts, got, strict=True):
        logits = reference_logits(reference, torch.tensor([prompt + new]))[0]
        assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == new


def test_rows_that_end_early_equal_their_solo_runs(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair
    prompts = [random_tokens(1, n, seed=n + 20)[0].tolist() for n in (1, 3, 2, 40)]  # most shorter than the convolution
    free = tbt.generate(model, prompts, 8)
    eos = free[-1][2]  # the longest prompt's row ends by its third token
    alone = [tbt.generate(model, [prompt], 8, eos_ids=[eos])[0] for prompt in prompts]
    assert [row[: len(some)] for row, some in zip(free, alone, strict=True)] == alone
    assert len(alone[-1]) < max(map(len, alone)) == 8
    assert tbt.generate(model, prompts, 8, eos_ids=[eos]) == alone


def test_checkpoints_in_shards_and_with_the_authors_names_load(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tokens = random_tokens(1, 9)
    reference: PreTrainedModel = jamba()
    assert_close(
        ours(reference, tmp_path / "shards", max_shard_size="40KB")(tokens), reference_logits(reference, tokens)
    )
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2

    reference = mamba()
    ours(reference, tmp_path / "authors")
    weights = tmp_path / "authors" / "model.safetensors"
    tensors = {name.replace("embeddings", "embedding"): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights)
    assert "backbone.embedding.weight" in tensors
    assert_close(tbt.load(tmp_path / "authors")(tokens), reference_logits(reference, tokens))
    del tensors["backbone.layers.1.mixer.dt_proj.bias"]
    save_file(tensors, weights)
    with pytest.raises(ValueError, match=r"lacks tensor layers\.1\.mixer\.dt_bias"):
        tbt.load(tmp_path / "authors")


# --- closed forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba-130m", "jamba-v0.1"])
@pytest.mark.parametrize(("batch", "context", "new"), [(1, 0, 1), (2, 0, 7), (2, 5, 1), (3, 5, 4)])
def test_a_pass_costs_what_the_closed_form_says(name: str, batch: int, context: int, new: int) -> None:
    config = tbt.published[name]
    first = config.layers[0].mixer
    assert isinstance(first, tbt.MambaConfig)
    mixer = dataclasses.replace(first, inner_size=48, dt_rank=3, state_size=5)
    attention = tbt.AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    dense = None if name == "mamba-130m" else tbt.SwiGLUConfig(intermediate_size=40)
    layers = [tbt.LayerConfig(mixer=mixer, feed_forward=dense)] * 2
    if name == "jamba-v0.1":
        layers.append(tbt.LayerConfig(mixer=attention, feed_forward=dense))
    config = dataclasses.replace(config, hidden_size=24, vocab_size=50, layers=tuple(layers))
    for grad in (True, False):  # of which the products must know nothing
        model = tbt.Decoder(config).requires_grad_(grad)
        state = model.new_state(batch, 16)
        if context:
            with torch.no_grad():
                model(random_tokens(batch, context, 50), state)
        tokens = random_tokens(batch, new, 50)
        got = count(partial(model, tokens, state), state=state)
        want = tbt.pass_cost(config, batch, context, new, recipe="fp32", state_bytes_per_element=4, logits="all")
        assert got.flops == want.flops
        if not grad:
            assert (got.weight_bytes, got.state_bytes) == (want.weight_bytes, want.state_bytes)


@pytest.mark.parametrize(
    ("key", "total"),
    [("mamba-130m", 129_135_360), ("mamba-2.8b", 2_768_345_600), ("jamba-v0.1", 51_570_323_328),
     ("jamba-1.5-mini", 51_570_323_328), ("jamba-1.5-large", 398_555_145_696)],
)  # fmt: skip
def test_published_sizes_from_modules_on_the_meta_device(key: str, total: int) -> None:
    config = tbt.published[key]
    with torch.device("meta"):
        model = tbt.Decoder(config)
        state = model.new_state(2, 1000)
    assert sum(p.numel() for p in model.parameters()) == tbt.count_parameters(config).total == total
    assert state.nbytes == tbt.state_bytes(config, 2, 1000, bytes_per_element=4)


def test_a_single_expert_needs_no_router() -> None:
    hf = jamba(num_experts=1).config.to_dict()  # which still says two experts a token
    assert hf["num_experts_per_tok"] == 2
    config = tbt.DecoderConfig.from_hf(hf)
    assert {type(layer.feed_forward) for layer in config.layers} == {tbt.SwiGLUConfig}


def test_jambas_attention_is_blind_to_the_order_of_earlier_tokens(pair: tuple[torch.nn.Module, tbt.Decoder]) -> None:
    _, model = pair  # C56
    attention = [layer.mixer for layer in model.layers if isinstance(layer.mixer, tbt.layers.attention.Attention)]
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    step = tbt.decoder.Pass(torch.zeros(1, 9), 0, None, torch.float32)
    mixed = x[:, [3, 1, 0, 7, 2, 6, 4, 5, 8]]
    for mixer in attention:
        assert (mixer(x, step)[:, -1] - mixer(mixed, step)[:, -1]).abs().max() < 1e-5
    assert len(attention) == sum(isinstance(layer.mixer, tbt.AttentionConfig) for layer in model.config.layers)
