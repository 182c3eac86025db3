"""DeepSeek-V3's multi-token-prediction module: its size, its equations against transformers' layer, its guesses."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import (
    T_DSV3,
    T_JAMBA,
    assert_close,
    assert_differs,
    caches_of,
    deepseek_v3,
    llama,
    ours,
    random_tokens,
    redraw,
    uneven,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tokenbytoken as tbt
from tokenbytoken.run import Choose, Guess, Propose
from tokenbytoken.run.mtp import MTP, load_mtp

VOCAB, HIDDEN, EXPERTS = T_DSV3["vocab_size"], T_DSV3["hidden_size"], T_DSV3["n_routed_experts"]
PLACE = f"model.layers.{T_DSV3['num_hidden_layers']}."  # behind the last layer; model.layers.61 in the released index


def released_names() -> Iterator[str]:
    """What the released index stores for the module, behind its place."""
    yield from ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    yield from ("embed_tokens.weight", "shared_head.head.weight")  # once more the model's own
    yield from ("input_layernorm.weight", "post_attention_layernorm.weight")
    for name in (
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
        "o_proj",
    ):
        yield f"self_attn.{name}.weight"
    yield from ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
    for owner in ("shared_experts", *(f"experts.{i}" for i in range(EXPERTS))):
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"mlp.{owner}.{name}.weight"


class Setup:
    """A released-style directory, the model and module read from it, and transformers' layer with the same weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = deepseek_v3()
        self.reference.save_pretrained(folder)
        # One layer of transformers between inputs_embeds and logits is all of the module but its joining projection.
        self.layer = deepseek_v3(5, num_hidden_layers=1, first_k_dense_replace=0)
        self.layer.lm_head.weight = self.reference.lm_head.weight
        self.join = redraw(nn.ModuleDict({
            "enorm": nn.RMSNorm(HIDDEN, eps=1e-6), "hnorm": nn.RMSNorm(HIDDEN, eps=1e-6),
            "eh_proj": nn.Linear(2 * HIDDEN, HIDDEN, bias=False),
        }), 6)  # fmt: skip
        stored = load_file(folder / "model.safetensors")
        stored.update({PLACE + name: self.tensor(name).contiguous().clone() for name in released_names()})
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        self.model = tbt.load(folder)
        self.mtp = load_mtp(folder)

    def tensor(self, name: str) -> Tensor:
        """The weight that the released name stands for."""
        moved = {
            "embed_tokens.weight": self.reference.model.embed_tokens.weight,
            "shared_head.head.weight": self.reference.lm_head.weight,
            "shared_head.norm.weight": self.layer.model.norm.weight,
        }
        if name in moved:
            return moved[name]
        if name.split(".")[0] in self.join:
            return self.join.state_dict()[name]
        inside = self.layer.model.layers[0].state_dict()
        if name.startswith("mlp.experts."):
            _, _, expert, projection, _ = name.split(".")
            if projection == "down_proj":
                return inside["mlp.experts.down_proj"][int(expert)]
            gate, up = inside["mlp.experts.gate_up_proj"][int(expert)].chunk(2)
            return gate if projection == "gate_proj" else up
        return inside[name]

    def joined(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Equation 21 for each position but the last, whose next token is not known."""
        embedded = self.reference.model.embed_tokens(tokens[:, 1:])
        both = (self.join["enorm"](embedded), self.join["hnorm"](hidden[:, :-1]))
        return self.join["eh_proj"](torch.cat(both, dim=-1))

    def logits(self, tokens: Tensor) -> Tensor:
        """(B, T − 1, V): at place i the prediction of token i + 2, without any code of the package."""
        hidden = self.reference.model(input_ids=tokens, use_cache=False).last_hidden_state  # after the final norm
        return self.layer(inputs_embeds=self.joined(hidden, tokens), use_cache=False).logits


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    with torch.no_grad():
        return Setup(tmp_path_factory.mktemp("deepseek"))


def predict(model: tbt.Decoder, mtp: MTP, tokens: Tensor) -> Tensor:
    hidden = model.norm(model(tokens, logits="none"))
    return model.head(mtp(hidden[:, :-1], model.embed(tokens[:, 1:])))


# --- size -----------------------------------------------------------------------------------------------


def test_the_module_and_the_model_are_the_published_checkpoint() -> None:
    config = tbt.published["deepseek-v3"]
    with torch.device("meta"):
        model, module = tbt.Decoder(config), MTP(config)
    own = sum(parameter.numel() for parameter in module.parameters())
    assert own == 11_610_068_224 == tbt.count_parameters(config).mtp
    tables = model.embed.weight.numel() + model.head.weight.numel()
    assert round((own + tables) / 1e7) == 1346  # 13.46 billion as stored, with its own copy of both
    # The released files hold so many numbers in BF16, in FP8, and in float32: 256 router biases in 59 layers.
    everything = sum(parameter.numel() for parameter in model.parameters()) + own + tables
    assert everything == 684_489_845_504 == 3_918_786_560 + 680_571_043_840 + 59 * 256


# --- the equations --------------------------------------------------------------------------------------


def test_the_module_equals_transformers_layer_behind_the_joining_projection(setup: Setup) -> None:
    tokens = random_tokens(2, 17)
    with torch.no_grad():
        want = setup.logits(tokens)
    assert_close(predict(setup.model, setup.mtp, tokens), want)


def test_wrong_readings_of_the_equations_are_far_off(setup: Setup) -> None:
    model, mtp, tokens = setup.model, setup.mtp, random_tokens(2, 17)
    with torch.no_grad():
        want = setup.logits(tokens)
    before_norm = model(tokens, logits="none")
    hidden, embedded = model.norm(before_norm)[:, :-1], model.embed(tokens[:, 1:])
    for wrong in (
        mtp(embedded, hidden),  # the halves of the projection changed places (with their norms)
        mtp(before_norm[:, :-1], embedded),
        mtp(hidden, model.embed(tokens[:, :-1])),  # the token itself in place of the next
    ):
        assert_differs(model.head(wrong), want)


@pytest.mark.parametrize("chunks", [[1] * 16, uneven(16), [16]])
def test_its_own_cache_continues_it(setup: Setup, chunks: list[int]) -> None:
    model, mtp, tokens = setup.model, setup.mtp, random_tokens(2, 17)
    hidden, embedded = model.norm(model(tokens, logits="none"))[:, :-1], model.embed(tokens[:, 1:])
    state = mtp.new_state(2, 16)
    pieces = [mtp(h, e, state) for h, e in zip(hidden.split(chunks, 1), embedded.split(chunks, 1), strict=True)]
    assert_close(torch.cat(pieces, 1), mtp(hidden, embedded))
    assert state.length == 16
    # One layer's latents and rotary keys, in float32.
    assert state.nbytes == 2 * 16 * (T_DSV3["kv_lora_rank"] + T_DSV3["qk_rope_head_dim"]) * 4


# --- as a draft -----------------------------------------------------------------------------------------


def guesses_from_scratch(model: tbt.Decoder, mtp: MTP, tokens: Sequence[int], count: int) -> list[int]:
    """One pass over everything for each guess, without any state."""
    hidden = model.norm(model(torch.tensor([tokens]), logits="none"))[:, :-1]
    text = list(tokens)
    for _ in range(count):
        out = mtp(hidden, model.embed(torch.tensor([text[1:]])))
        text.append(int(model.head(out[:, -1]).argmax()))
        hidden = torch.cat((hidden, out[:, -1:]), dim=1)  # in place of a hidden state that only the model could make
    return text[len(tokens) :]


class Replaced:
    """Asks the module, compares its guesses with ``want``, and proposes others: some right and some wrong."""

    def __init__(self, mtp: MTP, answer: list[int], want: Callable[[Sequence[int], int], list[int]]) -> None:
        self.mtp, self.answer, self.want = mtp, answer, want

    def start(self, model: tbt.Decoder, max_length: int) -> Propose:
        inner, places = self.mtp.start(model, max_length), itertools.count(1)

        def propose(tokens: Sequence[int], count: int, choose: Choose, hidden: Tensor) -> list[Guess]:
            got = [guess.token for guess in inner(tokens, count, choose, hidden)]
            assert got == self.want(tokens, count)
            right = self.answer[len(tokens) : len(tokens) + count]
            shown = [(token + 1) % VOCAB if next(places) % 4 == 0 else token for token in right]
            return [Guess(token, F.one_hot(torch.tensor(token), VOCAB).float()) for token in shown]

        return propose


@pytest.mark.parametrize(("family", "num_draft"), [("deepseek", 1), ("deepseek", 3), ("jamba", 1), ("jamba", 3)])
def test_guesses_after_any_acceptance_are_those_of_a_pass_over_everything(
    setup: Setup, family: str, num_draft: int
) -> None:
    model, mtp = setup.model, setup.mtp
    if family == "jamba":  # of no published model: both states are recurrent, and are copied at marks
        mamba = tbt.DecoderConfig.from_hf({"model_type": "jamba", **T_JAMBA})
        config = dataclasses.replace(mamba, layers=mamba.layers[:3], mtp_layers=1)
        model, mtp = redraw(tbt.Decoder(config)), redraw(MTP(config))
        assert isinstance(config.layers[-1].mixer, tbt.MambaConfig)
    prompt = random_tokens(1, 6)[0].tolist()
    answer = prompt + tbt.generate(model, prompt, 20)
    draft = Replaced(mtp, answer, lambda tokens, count: guesses_from_scratch(model, mtp, tokens, count))
    got = tbt.speculate(model, prompt, 20, draft=draft, num_draft=num_draft)
    assert prompt + got.tokens == answer
    assert {r.accepted for r in got.rounds if r.proposed == num_draft} == set(range(num_draft + 1))


def test_greedy_tokens_are_those_of_generate(setup: Setup) -> None:
    for length, num_draft in ((1, 1), (1, 3), (8, 1), (8, 3)):
        prompt = random_tokens(1, length, seed=3)[0].tolist()
        want = tbt.generate(setup.model, prompt, 12)
        got = tbt.speculate(setup.model, prompt, 12, draft=setup.mtp, num_draft=num_draft)
        assert got.tokens == want
        assert got.rounds[0].proposed == 0  # no hidden state yet
        assert got.rounds[1].proposed == num_draft
        eos = tbt.generate(setup.model, prompt, 12, eos_ids=[want[5]])
        assert tbt.speculate(setup.model, prompt, 12, draft=setup.mtp, eos_ids=[want[5]]).tokens == eos


def test_a_module_that_knows_the_next_token_is_always_accepted(setup: Setup) -> None:
    """With a model whose next token depends on the newest alone, a module that hands on the embedding is right."""
    layer = setup.model.config.layers[-1]
    config = tbt.DecoderConfig(vocab_size=VOCAB, hidden_size=HIDDEN, layers=(layer,), mtp_layers=1)
    model, mtp = redraw(tbt.Decoder(config)), redraw(MTP(config))
    for module in (model.layers[0], mtp.layer):  # the layers add nothing
        for name, parameter in module.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.data.zero_()
    mtp.eh_proj.weight.data = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), dim=1)
    mtp.enorm.weight.data.fill_(1)
    mtp.norm.weight.data = model.norm.weight.data.clone()
    got = tbt.speculate(model, [5, 6], 21, draft=mtp, num_draft=1)
    assert got.tokens == tbt.generate(model, [5, 6], 21)
    assert (got.acceptance, got.tokens_per_pass, got.passes) == (1, 2, 11)


# --- loading --------------------------------------------------------------------------------------------


def test_every_weight_is_read_and_the_copies_are_left_out(setup: Setup) -> None:
    own = sum(parameter.numel() for parameter in setup.mtp.parameters())
    assert own == tbt.count_parameters(setup.model.config).mtp
    stored = sum(setup.tensor(name).numel() for name in released_names())
    assert stored - own == 2 * VOCAB * HIDDEN
    assert torch.equal(setup.mtp.eh_proj.weight, setup.tensor("eh_proj.weight"))
    selection_bias = "layer.feed_forward.router.selection_bias"
    assert torch.equal(setup.mtp.get_parameter(selection_bias), setup.tensor("mlp.gate.e_score_correction_bias"))
    assert not any(parameter.requires_grad for parameter in setup.mtp.parameters())
    half = load_mtp(setup.folder, torch.bfloat16)
    assert half.eh_proj.weight.dtype == torch.bfloat16
    assert half.get_parameter(selection_bias).dtype == torch.float32


def test_what_cannot_be_read_is_named(setup: Setup, tmp_path: Path) -> None:
    tensors = load_file(setup.folder / "model.safetensors")
    config = json.loads((setup.folder / "config.json").read_text())

    def written(change: Callable[[dict[str, Tensor]], Any], **fields: Any) -> Path:
        changed = dict(tensors)
        change(changed)
        save_file(changed, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
        return tmp_path

    for change, fields, message in (
        (lambda t: t.pop(PLACE + "hnorm.weight"), {}, "lacks tensor hnorm.weight"),
        (lambda t: t.pop(PLACE + "mlp.experts.3.up_proj.weight"), {}, "lacks tensor .*experts.3.up_proj"),
        (lambda t: t.update({PLACE + "extra.weight": torch.ones(1)}), {}, "layer.extra.weight .* has no place"),
        (lambda t: t.update({PLACE + "eh_proj.weight": torch.ones(3, 3)}), {}, r"eh_proj.weight has shape \(3, 3\)"),
        (lambda t: None, {"num_nextn_predict_layers": 0}, "one .*module can be built, the config asks for 0"),
        (lambda t: None, {"num_nextn_predict_layers": 2}, "the config asks for 2"),
    ):
        with pytest.raises(ValueError, match=message):
            load_mtp(written(change, **fields))
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the config asks for 0"):
        load_mtp(tmp_path)
    for source, message in (
        ("smollm2-135m", "is not a directory"),
        ("nowhere", "neither one of"),
        (None, "source must be"),
    ):
        with pytest.raises(ValueError, match=message):
            load_mtp(source)  # type: ignore[arg-type]


def test_a_model_of_another_width_is_refused(setup: Setup, tmp_path: Path) -> None:
    other = ours(llama(), tmp_path)
    with pytest.raises(ValueError, match="works on 48 hidden numbers, the model on 64"):
        tbt.speculate(other, [1, 2], 4, draft=setup.mtp)


def test_a_module_of_another_dtype_is_refused_before_anything_is_computed(setup: Setup) -> None:
    half = load_mtp(setup.folder, torch.bfloat16)
    hook = setup.model.register_forward_pre_hook(lambda module, inputs: pytest.fail("a pass was made"))
    try:
        with pytest.raises(ValueError, match=r"the module is torch\.bfloat16, the model torch\.float32"):
            tbt.speculate(setup.model, [1, 2], 4, draft=half)
    finally:
        hook.remove()


def test_a_pass_that_cannot_be_is_refused_and_leaves_the_state_as_it_was(setup: Setup) -> None:
    x = torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(0))
    full, fresh = setup.mtp.new_state(2, 4), setup.mtp.new_state(2, 9)
    want = setup.mtp(x, x, full)
    held = caches_of(full)[0]["latent"].clone()
    for hidden, embedded, state, message in (
        (x[:, :1], x[:, :1], full, "1 more positions do not fit: the state holds 4 of at most 4"),
        (x, x[:, :3], None, r"both must be \(B, T, 48\)"),
        (x[..., :40], x[..., :40], None, r"both must be \(B, T, 48\)"),
        (x[:, :0], x[:, :0], None, r"both must be \(B, T, 48\)"),
        (x.double(), x.double(), None, r"both must be torch\.float32"),
        (x[:1], x[:1], fresh, "for other than 1 rows"),
        (x, x, setup.model.new_state(2, 9), "made for another module"),
    ):
        with pytest.raises(ValueError, match=message):
            setup.mtp(hidden, embedded, state)
    assert full.length == 4
    assert torch.equal(caches_of(full)[0]["latent"], held)
    assert fresh.length == 0
    assert not caches_of(fresh)[0]["latent"].any()
    assert torch.equal(setup.mtp(x, x, fresh), want)
