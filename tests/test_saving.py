"""``save`` and ``load(…, config=…)``: models of any mixers, also of one that only this file knows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tokenbytoken as tbt
from tokenbytoken.checkpoints.sources import SAVED
from tokenbytoken.layers.cache import PLAIN, Cache, Entry, Format

HF = {
    "llama": families.T_LLAMA,
    "deepseek_v3": {**families.T_DSV3, "num_nextn_predict_layers": 0},
    "jamba": families.T_JAMBA,
}


def config_of(kind: str, **changes: Any) -> tbt.DecoderConfig:
    return tbt.DecoderConfig.from_hf({"model_type": kind, **HF[kind], **changes})


@dataclasses.dataclass(frozen=True)
class DecayConfig:
    """Each channel is an average of its past, which fades at a rate of its own."""

    module: str = f"{__name__}:Decay"
    channels: int = 5


class Decay(nn.Module):
    def __init__(self, config: DecayConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.cache_format: Format = PLAIN
        self.cache_entry = Entry(tile=config.channels)
        self.into = nn.Linear(hidden_size, config.channels, bias=False)
        self.out = nn.Linear(config.channels, hidden_size)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))  # kept, and no float
        self.register_buffer("rates", torch.linspace(0.1, 0.9, config.channels), persistent=False)  # computed, not kept
        self.rates: Tensor
        self.steps: Tensor

    def new_state(self, batch_size: int, max_length: int, dtype: torch.dtype, device: torch.device) -> Cache:
        shape = (batch_size, max_length, self.config.channels)
        return Cache.empty(dtype, device, self.cache_format, seen=shape)

    def forward(self, x: Tensor, step: Any, cache: Cache | None = None) -> Tensor:
        seen = self.into(x)  # (B, T, channels)
        if cache is not None:
            (seen,) = cache.append(step.start, seen=seen)
        S, T = seen.shape[1], x.shape[1]
        ages = (torch.arange(S - T, S)[:, None] - torch.arange(S)).unsqueeze(-1)  # (T, S, 1)
        fading = torch.where(ages < 0, 0.0, self.rates ** ages.clamp(min=0)).to(x.dtype)
        return self.gain * self.out(torch.einsum("tsc,bsc->btc", fading, seen))


def unseen(**changes: Any) -> tbt.DecoderConfig:
    """A decoder of two such layers and one of attention."""
    config = config_of("llama", **changes)
    mixer: Any = DecayConfig()
    layer = tbt.LayerConfig(mixer=mixer, feed_forward=config.layers[0].feed_forward)
    return dataclasses.replace(config, layers=(layer, config.layers[0], layer))


CONFIGS = {
    "llama": config_of("llama"),
    "llama, tied": config_of("llama", tie_word_embeddings=True),
    "deepseek": config_of("deepseek_v3"),
    "jamba": config_of("jamba"),
    "unseen": unseen(),
    "unseen, tied": unseen(tie_word_embeddings=True),
}
TOKENS = families.random_tokens(2, 9)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_comes_back_with_its_config(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    model = families.redraw(tbt.Decoder(config))
    for layer in model.layers:
        mixer = layer.mixer
        if isinstance(mixer, Decay):
            mixer.steps += 7
    torch.manual_seed(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    tbt.save(model, tmp_path / "new" / "folder")
    again = tbt.load(tmp_path / "new" / "folder", config=config)
    assert torch.equal(torch.rand(2), drawn)  # loading draws nothing
    want, got = model.state_dict(), again.state_dict()
    assert list(got) == list(want)
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert torch.equal(again(TOKENS), model(TOKENS))
    assert (again.head.weight is again.embed.weight) == config.tie_embeddings
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [SAVED]
    assert sum(t.numel() for t in load_file(tmp_path / "new" / "folder" / SAVED).values()) == sum(
        t.numel() for key, t in want.items() if key != "head.weight" or not config.tie_embeddings
    )


def test_a_model_with_a_mixer_nobody_has_seen_does_all_that_others_do(tmp_path: Path) -> None:
    model: Any = families.redraw(tbt.Decoder(unseen()))
    tbt.save(model, tmp_path)
    again = tbt.load(tmp_path, config=unseen())
    answer = tbt.generate(again, TOKENS[0].tolist(), 5)
    assert model(torch.tensor([TOKENS[0].tolist() + answer]))[0, 8:-1].argmax(-1).tolist() == answer
    small = tbt.quantize_cache(tbt.quantize_model(again, "int8"), "int8").double()
    whole, state = small(TOKENS, small.new_state(2, 9)), small.new_state(2, 9)
    parts = torch.cat([small(chunk, state) for chunk in TOKENS.split([4, 1, 4], 1)], 1)
    families.assert_close(parts, whole, 1e-9)
    families.assert_close(whole, model.double()(TOKENS), 0.1)
    assert state.layers[0].nbytes() == 2 * 9 * (5 + 4)


def test_the_dtype_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    for name in ("unseen", "deepseek"):
        model: Any = families.redraw(tbt.Decoder(CONFIGS[name])).to(torch.bfloat16)
        tbt.save(model, tmp_path)
        again = tbt.load(tmp_path, torch.float64, config=CONFIGS[name])
        floats = {t.dtype for t in (*again.parameters(), *again.buffers()) if t.is_floating_point()}
        assert floats == {torch.float64}
        held = model.state_dict()
        assert all(torch.equal(t, held[key].to(t.dtype)) for key, t in again.state_dict().items())
        half = tbt.load(tmp_path, torch.bfloat16, config=CONFIGS[name])
        wide = {key for key, p in half.named_parameters() if p.dtype != torch.bfloat16}
        assert wide == {key for key, _ in half.named_parameters() if key.endswith("router.selection_bias")}
    with pytest.raises(ValueError, match=r"dtype must be torch\.float32"):
        tbt.load(tmp_path, torch.int8, config=CONFIGS["deepseek"])


def test_tensors_that_share_memory_are_kept_and_saving_again_replaces(tmp_path: Path) -> None:
    model: Any = families.redraw(tbt.Decoder(unseen()))
    tbt.save(model, tmp_path)
    first, _, third = model.layers
    third.mixer.into = first.mixer.into  # one module in two places: kept once
    first.feed_forward.up_proj.weight = nn.Parameter(first.feed_forward.gate_proj.weight.detach())  # and two views
    tbt.save(model, tmp_path)
    held = load_file(tmp_path / SAVED)
    assert "layers.2.mixer.into.weight" not in held
    assert torch.equal(held["layers.0.feed_forward.up_proj.weight"], held["layers.0.feed_forward.gate_proj.weight"])
    with pytest.raises(ValueError, match=r"lacks tensor layers\.2\.mixer\.into\.weight"):
        tbt.load(tmp_path, config=unseen())  # which does not say that they are one


BAD = {
    "missing": (lambda held: held.pop("layers.0.mixer.gain"), r"lacks tensor layers\.0\.mixer\.gain$"),
    "missing buffer": (lambda held: held.pop("layers.2.mixer.steps"), r"lacks tensor layers\.2\.mixer\.steps$"),
    "several": (lambda held: [held.pop(f"layers.1.mixer.{n}_proj.weight") for n in "qkv"], r"q_proj\.\S+ and 2 more"),
    "extra": (lambda held: held.update(more=torch.ones(2)), "tensor more of the checkpoint has no place in the model"),
    "not kept": (lambda held: held.update({"layers.0.mixer.rates": torch.ones(5)}), r"mixer\.rates .* no place"),
    "misshapen": (lambda held: held.update({"layers.0.mixer.gain": torch.ones(1)}), r"shape \(1,\), .* asks for \(\)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_tensors_that_do_not_fit_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    tbt.save(tbt.Decoder(unseen()), tmp_path)
    spoil, words = BAD[fault]
    held = load_file(tmp_path / SAVED)
    spoil(held)
    save_file(held, tmp_path / SAVED)
    with pytest.raises(ValueError, match=words):
        tbt.load(tmp_path, config=unseen())


def test_a_folder_without_a_config_asks_for_one(tmp_path: Path) -> None:
    tbt.save(tbt.Decoder(unseen()), tmp_path)
    with pytest.raises(ValueError, match=r"holds a saved model without its config: load\(…, config=…\) takes that"):
        tbt.load(tmp_path)
    with pytest.raises(ValueError, match="config must be a DecoderConfig, not 'llama'"):
        tbt.load(tmp_path, config="llama")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="brings its own config"):
        tbt.load("smollm2-135m", config=unseen())
    (tmp_path / SAVED).write_bytes(b"\x00" * 7)
    with pytest.raises(ValueError, match=f"{SAVED} is not a readable safetensors file"):
        tbt.load(tmp_path, config=unseen())
    with pytest.raises(ValueError, match=r"lacks the weights file model\.safetensors"):
        tbt.load(tmp_path.parent, config=unseen())


def test_a_config_may_take_the_place_of_a_directorys_own(tmp_path: Path) -> None:
    reference = families.llama()
    model = families.ours(reference, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "one that nobody knows"}))
    with pytest.raises(ValueError, match="one that nobody knows"):
        tbt.load(tmp_path)
    assert torch.equal(tbt.load(tmp_path, config=config_of("llama"))(TOKENS), model(TOKENS))


class Odd(Decay):
    def get_extra_state(self) -> str:
        return "more than tensors"


def test_what_a_config_would_not_build_again_is_not_saved(tmp_path: Path) -> None:
    model = tbt.Decoder(config_of("jamba"))
    for small in (tbt.quantize_as(model, "int8-experts"), tbt.quantize_model(model)):
        with pytest.raises(ValueError, match="the model holds quantised layers"):
            tbt.save(small, tmp_path)
    tbt.save(tbt.quantize_cache(model), tmp_path)  # whose weights are the model's
    part = tbt.Decoder(config_of("llama"))
    part.agree = lambda tokens: tokens
    with pytest.raises(ValueError, match="one rank's part"):
        tbt.save(part, tmp_path)
    with torch.device("meta"):
        empty = tbt.Decoder(config_of("llama"))
    with pytest.raises(ValueError, match=r"embed\.weight of the model is on the meta device"):
        tbt.save(empty, tmp_path)
    odd: Any = DecayConfig(module=f"{__name__}:Odd")
    layer = tbt.LayerConfig(mixer=odd, feed_forward=None)
    with pytest.raises(ValueError, match=r"layers\.0\.mixer\._extra_state of the model is no tensor"):
        tbt.save(tbt.Decoder(dataclasses.replace(unseen(), layers=(layer,))), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="no folder can be made"):
        tbt.save(model, tmp_path / "file" / "folder")
