"""Speculative decoding: the acceptance rule by numbers, whole runs against plain generation and exact probabilities."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_gpu import READS, fake_gpu, state_on
from families import T_LLAMA, assert_close, deepseek_v3, jamba, llama, mamba, ours, random_tokens, redraw
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tokenbytoken as tbt
from tokenbytoken.cost import expected_tokens
from tokenbytoken.layers import Cache, MambaState
from tokenbytoken.run import (
    Choose,
    Draft,
    Guess,
    Propose,
    Round,
    accepts,
    distribution,
    residual,
    speculation,
    verify,
)

FAMILIES = {"llama": llama, "deepseek_v3": deepseek_v3, "mamba": mamba, "jamba": jamba}
VOCAB = 97


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tbt.Decoder]:
    return {name: ours(make(0), tmp_path_factory.mktemp(name)) for name, make in FAMILIES.items()}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, models: dict[str, tbt.Decoder]) -> tbt.Decoder:
    return models[request.param]


@dataclasses.dataclass
class Oracle:
    """Knows the right continuation, and guesses it with a mistake in every ``period``-th guess.

    ``seen`` is called with the tokens at each proposal.
    """

    answer: Sequence[int]
    period: int = 10**9
    seen: Callable[[Sequence[int]], None] = lambda tokens: None

    def start(self, model: tbt.Decoder, max_length: int) -> Propose:
        places = itertools.count(1)

        def propose(tokens: Sequence[int], count: int, choose: Choose, hidden: Tensor) -> list[Guess]:
            assert list(tokens) == list(self.answer[: len(tokens)])
            self.seen(tokens)
            right = self.answer[len(tokens) : len(tokens) + count]
            guessed = [(token + 1) % VOCAB if next(places) % self.period == 0 else token for token in right]
            return [Guess(token, F.one_hot(torch.tensor(token), VOCAB).float()) for token in guessed]

        return propose


@dataclasses.dataclass
class Guesses:
    """Always the same, surely."""

    tokens: Sequence[int]

    def start(self, model: tbt.Decoder, max_length: int) -> Propose:
        return lambda tokens, count, choose, hidden: [Guess(token, torch.ones(VOCAB)) for token in self.tokens][:count]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random_tokens(1, length, seed=seed)[0].tolist()


# --- the rule -------------------------------------------------------------------------------------------


def rounds_of_one_token(p: list[float], q: list[float], n: int, instead: Any) -> tuple[float, list[float]]:
    """Acceptance and output frequencies of n proposals; ``instead`` says what a rejected one is replaced from."""
    generator = torch.Generator().manual_seed(0)
    P, Q = torch.tensor(p).expand(n, -1), torch.tensor(q).expand(n, -1)
    proposed = torch.multinomial(Q, 1, generator=generator).squeeze(1)
    stands = accepts(P, Q, proposed, generator)
    other = torch.multinomial(instead(P, Q), 1, generator=generator).squeeze(1)
    counts = torch.where(stands, proposed, other).bincount(minlength=len(p))
    return stands.float().mean().item(), (counts / n).tolist()


def test_c17_the_output_has_the_distribution_of_the_target() -> None:
    p, q = [0.6, 0.3, 0.1], [0.2, 0.5, 0.3]
    acceptance, frequencies = rounds_of_one_token(p, q, 200_000, residual)
    assert acceptance == pytest.approx(0.6, abs=0.005)
    assert frequencies == pytest.approx(p, abs=0.005)
    # A biased residual looks as fluent, and is caught by the same numbers.
    _, frequencies = rounds_of_one_token(p, q, 200_000, lambda p, q: p)
    assert frequencies == pytest.approx([0.44, 0.42, 0.14], abs=0.005)


def test_residual_by_hand() -> None:
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    assert residual(p, q).tolist() == [1, 0, 0]
    assert residual(q, p).tolist() == pytest.approx([0, 0.5, 0.5])
    assert torch.equal(residual(p, p), p)  # rounding may reject where nothing is left: never a 0 / 0
    both = residual(torch.stack((p, q)), torch.stack((q, p)))
    assert torch.equal(both, torch.stack((residual(p, q), residual(q, p))))


def test_verify_keeps_the_run_before_the_first_rejection() -> None:
    V = 5
    certain = lambda *tokens: F.one_hot(torch.tensor(tokens), V).float()  # noqa: E731
    p = certain(1, 2, 3, 4)
    assert verify(p, certain(1, 2, 3), [1, 2, 3]) == (3, 4)  # all stand: one token more
    assert verify(p, certain(1, 2, 0), [1, 2, 0]) == (2, 3)
    assert verify(p, certain(0, 2, 3), [0, 2, 3]) == (0, 1)  # what comes after a rejection counts for nothing
    assert verify(p[:1], p[:0], []) == (0, 1)


def test_a_likelier_target_always_accepts_and_an_impossible_token_never_stands() -> None:
    n = 20_000
    p, q = torch.tensor([0.5, 0.5, 0.0]).expand(n, -1), torch.tensor([0.5, 0.25, 0.25]).expand(n, -1)
    for token, share in ((0, 1), (1, 1), (2, 0)):
        assert accepts(p, q, torch.full((n,), token), torch.Generator().manual_seed(1)).float().mean() == share


def test_distribution_is_what_sample_draws_from() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.tensor(np.random.default_rng(0).normal(0, 2, (4, 50)))
    for temperature, top_k, top_p in ((1.0, None, 1.0), (0.7, 10, 1.0), (1.3, None, 0.8), (0.9, 20, 0.7)):
        warped = TemperatureLogitsWarper(temperature)(None, logits)
        if top_k:
            warped = TopKLogitsWarper(top_k)(None, warped)
        warped = TopPLogitsWarper(top_p)(None, warped)
        got = distribution(logits, temperature, top_k, top_p)
        assert (got - warped.softmax(-1)).abs().max() < 1e-12
    assert distribution(logits).tolist() == F.one_hot(logits.argmax(-1), 50).tolist()
    assert distribution(torch.tensor([[2.0, 2.0, 1.0]])).tolist() == [[1, 0, 0]]  # a tie: the lowest, as in sample
    drawn = tbt.sample(logits[:1].expand(40_000, -1), 0.7, 10, generator=torch.Generator().manual_seed(0))
    want = distribution(logits[:1], 0.7, 10)[0]
    assert (drawn.bincount(minlength=50) / 40_000 - want).abs().max() < 4 * 0.5 / 200
    assert distribution(logits[:1].half(), 1.0).dtype == torch.float32


# --- greedy: token for token ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 9])
def test_greedy_tokens_are_those_of_generate(model: tbt.Decoder, models: dict[str, tbt.Decoder], length: int) -> None:
    prompt = prompt_of(length, seed=length)
    want = tbt.generate(model, prompt, 11)
    answer = prompt + want
    drafts: dict[str, Draft | tbt.Decoder] = {
        "lookup": tbt.PromptLookup(),
        "one layer": tbt.first_layers(model, 1),
        "itself": tbt.DraftModel(model),
        "another with caches": models["llama"],
        "another, recurrent": models["mamba"],
        "right": Oracle(answer),
        "one in three wrong": Oracle(answer, 3),
    }
    for name, draft in drafts.items():
        for num_draft in (1, 4):
            got = tbt.speculate(model, prompt, 11, draft=draft, num_draft=num_draft)
            assert got.tokens == want, (name, num_draft)
            assert len(got.tokens) == got.accepted + got.passes
            assert all(0 <= r.accepted <= r.proposed <= num_draft for r in got.rounds)


def test_each_place_of_a_run_may_be_the_first_to_fall(model: tbt.Decoder) -> None:
    prompt = prompt_of(5)
    answer = prompt + tbt.generate(model, prompt, 32)
    seen = set()
    for period in (1, 3, 7):
        got = tbt.speculate(model, prompt, 32, draft=Oracle(answer, period), num_draft=4)
        assert prompt + got.tokens == answer
        seen |= {r.accepted for r in got.rounds if r.proposed == 4}
    assert seen == {0, 1, 2, 3, 4}


def test_c18_states_hold_the_accepted_tokens_and_nothing_else(
    model: tbt.Decoder, models: dict[str, tbt.Decoder]
) -> None:
    """What each state holds is written down push by push, from the length that it says it has."""
    recurrent = any(isinstance(layer.mixer, tbt.layers.mamba.Mamba) for layer in model.layers)
    prompt = prompt_of(6)
    answer = prompt + tbt.generate(model, prompt, 16)
    held: dict[int, list[int]] = {}

    def write_down(owner: int, module: Any, arguments: tuple[Tensor, tbt.DecoderState], keywords: Any) -> None:
        tokens, state = arguments
        held[owner] = held.get(owner, [])[: state.length] + tokens[0].tolist()

    states: list[tbt.DecoderState] = []

    def checked(propose: Propose) -> Propose:
        def check(tokens: Sequence[int], count: int, choose: Choose, hidden: Tensor) -> list[Guess]:
            state = states[-1]  # the model's own: made after the draft's
            assert held[0][: state.length] == list(tokens[: state.length])
            assert state.length <= len(tokens) - 1 if recurrent else state.length == len(tokens) - 1
            guesses = propose(tokens, count, choose, hidden)
            if 1 in held:
                assert held[1] == [*tokens, *(guess.token for guess in guesses[:-1])]
            return guesses

        return check

    class Watched:
        def __init__(self, draft: Any) -> None:
            self.draft = draft

        def start(self, model: tbt.Decoder, max_length: int) -> Propose:
            return checked(self.draft.start(model, max_length))

    def new_state(batch_size: int, max_length: int, padding: Sequence[int] | Tensor | None = None) -> tbt.DecoderState:
        states.append(tbt.Decoder.new_state(model, batch_size, max_length, padding))
        return states[-1]

    smalls = [tbt.first_layers(model, 1), models["mamba" if model is models["llama"] else "llama"]]
    hooks = [
        decoder.register_forward_pre_hook(partial(write_down, min(i, 1)), with_kwargs=True)
        for i, decoder in enumerate((model, *smalls))
    ]
    model.new_state = new_state  # type: ignore[method-assign]
    try:
        for draft in (*(tbt.DraftModel(small) for small in smalls), Oracle(answer, 3)):
            for num_draft in (1, 3):
                held.clear()
                got = tbt.speculate(model, prompt, 16, draft=Watched(draft), num_draft=num_draft)
                assert prompt + got.tokens == answer
    finally:
        del model.new_state
        for hook in hooks:
            hook.remove()


def test_a_state_after_rejections_equals_one_that_never_guessed(model: tbt.Decoder) -> None:
    prompt = prompt_of(6)
    answer = prompt + tbt.generate(model, prompt, 16)
    made: list[tbt.DecoderState] = []

    def new_state(batch_size: int, max_length: int, padding: Sequence[int] | Tensor | None = None) -> tbt.DecoderState:
        made.append(tbt.Decoder.new_state(model, batch_size, max_length, padding))
        return made[-1]

    model.new_state = new_state  # type: ignore[method-assign]
    try:
        got = tbt.speculate(model, prompt, 16, draft=Oracle(answer, 3), num_draft=4)
    finally:
        del model.new_state
    assert any(0 < r.accepted < r.proposed for r in got.rounds)
    [state] = made
    plain = model.new_state(1, state.max_length)
    model(torch.tensor([answer[: state.length]]), plain)
    for mine, theirs in zip(state.layers, plain.layers, strict=True):
        if isinstance(mine, MambaState):
            assert isinstance(theirs, MambaState)
            assert_close(mine.ssm, theirs.ssm)
            assert_close(mine.conv, theirs.conv)
        else:
            assert isinstance(mine, Cache)
            assert isinstance(theirs, Cache)
            for name in mine.parts:
                assert_close(mine[name][..., : state.length, :], theirs[name][..., : state.length, :])


class Written(TorchDispatchMode):
    """Counts the bytes that operations write while it is on; a view writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.nbytes += out.numel() * out.element_size()
        return out


def test_caches_are_never_copied_and_recurrent_states_once_a_pass(
    model: tbt.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, list[int]] = {"mark": [], "rewind": []}
    places: set[tuple[int, ...]] = set()

    def watch(name: str) -> None:
        plain = getattr(tbt.DecoderState, name)

        def watched(state: tbt.DecoderState, *arguments: Any, **keywords: Any) -> Any:
            caches = [layer for layer in state.layers if not isinstance(layer, tbt.layers.mamba.MambaState)]
            places.add(tuple(t.data_ptr() for cache in caches for t in vars(cache).values() if isinstance(t, Tensor)))
            with Written() as counter:
                result = plain(state, *arguments, **keywords)
            written[name].append(counter.nbytes)
            return result

        monkeypatch.setattr(tbt.DecoderState, name, watched)

    prompt = prompt_of(6)
    answer = prompt + tbt.generate(model, prompt, 16)
    watch("mark")
    watch("rewind")
    got = tbt.speculate(model, prompt, 16, draft=Oracle(answer, 3), num_draft=4)
    rejections = sum(r.accepted < r.proposed for r in got.rounds)
    layers = model.new_state(1, 1).layers
    recurrent = sum(layer.nbytes() for layer in layers if isinstance(layer, tbt.layers.mamba.MambaState))
    assert rejections > 2
    assert written == {"mark": [recurrent] * got.passes, "rewind": [recurrent] * rejections}
    assert len(places) == 1  # the same memory from the first pass to the last
    assert (recurrent > 0) == any(isinstance(layer.mixer, tbt.MambaConfig) for layer in model.config.layers)


def test_a_rejection_costs_no_pass_of_its_own(model: tbt.Decoder) -> None:
    """Also where accepted tokens must be pushed again: they go along with the next guesses, and never pile up."""
    prompt = prompt_of(4)
    answer = prompt + tbt.generate(model, prompt, 30)
    pushed: list[int] = []
    hook = model.register_forward_pre_hook(lambda module, arguments: pushed.append(arguments[0].shape[1]))
    try:
        got = tbt.speculate(model, prompt, 30, draft=Oracle(answer, 2), num_draft=3)  # a wrong guess in each round
    finally:
        hook.remove()
    assert len(pushed) == got.passes < 30
    if any(isinstance(layer.mixer, tbt.layers.mamba.Mamba) for layer in model.layers):
        assert 4 < max(pushed[1:]) <= 2 * 3 + 1
        assert Round(0, 0) in got.rounds[1:-1]  # a pass without guesses, to catch up
    else:
        assert pushed == [4, *(1 + r.proposed for r in got.rounds[1:])]  # the newest token and the guesses


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_the_host_reads_a_gpu_once_a_pass_of_the_model_and_once_a_guess(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def read(chosen: Tensor) -> list[int]:
        reads.append(len(chosen))
        return [0, 5][-len(chosen) :]  # a guess is 5; of a round nothing stands, and 5 follows

    monkeypatch.setattr(speculation, "read_tokens", read)
    monkeypatch.setattr(speculation, "generators_of", lambda seed, count, device: [None] * count)
    monkeypatch.setattr(tbt.Decoder, "new_state", lambda model, batch_size, length: state_on(model, batch_size, length))
    config = tbt.DecoderConfig.from_hf({"model_type": "llama", **T_LLAMA})
    with fake_gpu(monkeypatch):
        model, small = (tbt.Decoder(config).requires_grad_(False) for _ in range(2))
        got = tbt.speculate(model, [1, 5, 2, 5], 5, draft=tbt.PromptLookup(), num_draft=3, **settings)
        assert got.proposed > 0
        assert reads == [2] * got.passes == [2] * 5
        reads.clear()
        got = tbt.speculate(model, [1, 2], 5, draft=small, num_draft=3, **settings)
        assert reads.count(2) == got.passes
        assert reads.count(1) == got.proposed > 0
        with pytest.raises(READS):  # a caller's tokens are read, to check them
            model(torch.tensor([[1, 2], [3, 4]]))


def test_a_guess_outside_the_vocabulary_and_logits_that_are_not_finite_are_refused(
    models: dict[str, tbt.Decoder],
) -> None:
    model = models["llama"]
    with pytest.raises(ValueError, match="token id 97 is outside the vocabulary of 97"):
        tbt.speculate(model, [1, 2], 6, draft=Guesses([VOCAB]))
    hook = model.head.register_forward_hook(lambda module, inputs, logits: logits.fill_(torch.nan))
    try:
        for draft in (Guesses([5]), tbt.PromptLookup()):
            with pytest.raises(ValueError, match="the logits are not finite"):
                tbt.speculate(model, [1, 2, 1], 6, draft=draft)
    finally:
        hook.remove()


# --- where a run ends -----------------------------------------------------------------------------------


def test_a_run_ends_at_max_new_tokens_and_no_guess_is_wasted(models: dict[str, tbt.Decoder]) -> None:
    model, prompt = models["llama"], prompt_of(5)
    answer = prompt + tbt.generate(model, prompt, 12)
    assert tbt.speculate(model, prompt, 0, draft=Oracle(answer)) == tbt.Speculation([], [])
    for n in range(1, 13):
        got = tbt.speculate(model, prompt, n, draft=Oracle(answer), num_draft=4)
        assert prompt + got.tokens == answer[: 5 + n]
        assert got.passes == 1 + math.ceil((n - 1) / 5)  # the prompt's, then five tokens a pass
        assert got.proposed == got.accepted == n - got.passes
    assert got.rounds == [Round(0, 0), Round(4, 4), Round(4, 4), Round(0, 0)]
    assert (got.acceptance, got.tokens_per_pass) == (1, 11 / 3)


def test_a_run_ends_with_an_end_of_text_inside_it(model: tbt.Decoder) -> None:
    prompt = prompt_of(5)
    new = tbt.generate(model, prompt, 9)
    for eos in sorted(set(new), key=new.index):
        want = new[: new.index(eos) + 1]
        assert tbt.generate(model, prompt, 9, eos_ids=[eos]) == want
        for draft in (Oracle(prompt + new), Oracle(prompt + new, 3)):
            assert tbt.speculate(model, prompt, 9, draft=draft, num_draft=5, eos_ids=[eos]).tokens == want


def test_counts_of_a_run_by_hand(models: dict[str, tbt.Decoder]) -> None:
    model, prompt = models["llama"], prompt_of(5)
    answer = prompt + tbt.generate(model, prompt, 10)
    got = tbt.speculate(model, prompt, 10, draft=Oracle(answer, 3), num_draft=2)  # wrong: the 3rd, 6th, 9th guess
    # Guesses 1 2 stand, and one more; 3 falls (and 4 is not looked at); 5 stands, 6 falls; 7 8 stand; one is left.
    assert got.rounds == [Round(0, 0), Round(2, 2), Round(2, 0), Round(2, 1), Round(2, 2)]
    assert (got.passes, got.proposed, got.accepted) == (5, 8, 5)
    assert got.acceptance == 5 / 7
    assert got.tokens_per_pass == 9 / 4
    plain = tbt.speculate(model, prompt, 10, draft=tbt.PromptLookup(4, 4))  # nothing repeats: no guess
    assert (plain.passes, plain.proposed, plain.tokens_per_pass) == (10, 0, 1)
    assert math.isnan(plain.acceptance)
    assert math.isnan(tbt.speculate(model, prompt, 1, draft=Oracle(answer)).tokens_per_pass)


# --- drafts ---------------------------------------------------------------------------------------------


def test_prompt_lookup_prefers_the_longest_then_the_newest_match() -> None:
    lookup = tbt.PromptLookup()
    assert lookup.distance([1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3]) == 9  # three tokens, long ago
    assert lookup.distance([5, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3]) == 6  # two
    assert lookup.distance([5, 4, 3, 9, 8, 3, 7, 1, 2, 3]) == 4  # one, the newest of two
    assert lookup.distance([1, 2, 3, 4]) is None
    assert tbt.PromptLookup(3, 2).distance([5, 4, 3, 9, 8, 3, 7, 1, 2, 3]) is None
    for short in ([], [1]):
        assert lookup.distance(short) is None
    assert lookup.distance([1, 1]) == 1


def test_prompt_lookup_copies_and_goes_on_copying_its_copy(models: dict[str, tbt.Decoder]) -> None:
    model = models["llama"]

    def guesses(tokens: list[int], count: int) -> list[int]:
        propose = tbt.PromptLookup().start(model, 99)
        found = propose(tokens, count, lambda logits: pytest.fail("a model is asked"), torch.empty(1, 1, 64))
        for token, q in found:
            assert q.tolist() == F.one_hot(torch.tensor(token), VOCAB).tolist()
        return [guess.token for guess in found]

    assert guesses([1, 2, 3, 4, 5, 1, 2], 2) == [3, 4]
    assert guesses([1, 2, 3, 4, 5, 1, 2], 7) == [3, 4, 5, 1, 2, 3, 4]
    assert guesses([9, 7, 7], 4) == [7, 7, 7, 7]
    assert guesses([9, 8, 7], 4) == []


def test_the_first_layers_share_every_weight(model: tbt.Decoder) -> None:
    own = {parameter.data_ptr() for parameter in model.parameters()}
    tokens = random_tokens(1, 7)
    for count in range(1, model.config.num_layers + 1):
        short = tbt.first_layers(model, count)
        assert short.config.num_layers == len(short.layers) == count
        assert {parameter.data_ptr() for parameter in short.parameters()} <= own
        kept: list[Tensor] = []
        hook = model.layers[count - 1].register_forward_hook(lambda module, inputs, out: kept.append(out))  # noqa: B023
        whole = model(tokens)
        hook.remove()
        assert torch.equal(short(tokens), model.head(model.norm(kept[0])))
    assert torch.equal(short(tokens), whole)
    for count in (0, model.config.num_layers + 1):
        with pytest.raises(ValueError, match=r"count must be|has . layers"):
            tbt.first_layers(model, count)


# --- refusals -------------------------------------------------------------------------------------------


def test_bad_input_is_one_clear_error_before_anything_is_computed(
    models: dict[str, tbt.Decoder], tmp_path: Path
) -> None:
    model = models["llama"]
    other = ours(llama(vocab_size=98), tmp_path)
    hook = model.register_forward_pre_hook(lambda module, inputs: pytest.fail("a pass was made"))
    good: dict[str, Any] = {"prompt": [1, 2, 3], "max_new_tokens": 5, "draft": tbt.PromptLookup()}
    try:
        for change, message in (
            ({"num_draft": 0}, "num_draft must be a positive integer, not 0"),
            ({"num_draft": 2.0}, "num_draft must be a positive integer, not 2.0"),
            ({"draft": other}, "the draft has a vocabulary of 98 tokens, the model one of 97"),
            ({"draft": tbt.DraftModel(other)}, "the draft has a vocabulary of 98"),
            ({"draft": "lookup"}, "draft must be a Draft or a Decoder, not 'lookup'"),
            ({"draft": tbt.PromptLookup}, "draft must be a Draft or a Decoder, not <class"),  # without parentheses
            ({"prompt": torch.tensor([True, False])}, "the prompt must be a collection of token ids"),
            ({"prompt": torch.empty(3, dtype=torch.int64, device="meta")}, "the prompt must be a collection"),
            ({"max_new_tokens": 2**61}, "no memory for a state"),
            ({"max_length": 7}, "3 of the prompt . 5 new tokens = 8 exceed max_length 7"),
            ({"prompt": []}, "the prompt is empty"),
            ({"prompt": [1, 97]}, "token id 97 is outside the vocabulary of 97"),
            ({"prompt": [[1, 2], [3, 4]]}, "the prompt must be a collection of token ids"),
            ({"prompt": "text"}, "the prompt must be a collection of token ids"),
            ({"max_new_tokens": -1}, "max_new_tokens must be"),
            ({"temperature": -1.0}, "temperature must be"),
            ({"top_p": 1.5}, "top_p must lie between 0 and 1"),
            ({"top_k": 0}, "top_k must be"),
            ({"seed": 1.5}, "seed must be"),
            ({"eos_ids": 3}, "eos_ids must be a collection of token ids"),
        ):
            with pytest.raises(ValueError, match=message):
                tbt.speculate(model, **{**good, **change})
    finally:
        hook.remove()
    shared = tbt.first_layers(model, 1)
    shared.agree = lambda chosen: chosen  # as under tensor parallelism
    with pytest.raises(ValueError, match="runs in one process"):
        tbt.speculate(shared, **good)
    for arguments in ({"shortest": 0}, {"longest": 0}, {"longest": 1, "shortest": 2}, {"longest": 1.5}):
        with pytest.raises(ValueError, match=r"longest|shortest"):
            tbt.PromptLookup(**arguments)
    with pytest.raises(ValueError, match="a draft model must be a Decoder, not None"):
        tbt.DraftModel(None)  # type: ignore[arg-type]


def test_distributions_that_do_not_go_with_the_tokens_are_refused() -> None:
    even = torch.full((5, 4), 0.25)
    for p, q, proposed, message in (
        (even[:2], even[:2], [1, 2], r"2 proposed tokens need p \(3, V\) and q \(2, V\): \(2, 4\), \(2, 4\)"),
        (even, even[:2], [1, 2], "2 proposed tokens need"),  # not the last row that happens to be there
        (even[:3], even[:2, :3], [1, 2], "2 proposed tokens need"),
        (even[:3], even[:2], [1, 4], "must lie within the vocabulary of 4"),
        (even[:3], even[:2], [1.5, 2], "proposed must be a collection of token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            verify(p, q, proposed)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.6}])
def test_a_distribution_is_that_of_each_row_whatever_axes_stand_before_it(settings: dict[str, Any]) -> None:
    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))
    got = distribution(logits, 1.0, **settings)
    assert torch.equal(got.flatten(0, 1), distribution(logits.flatten(0, 1), 1.0, **settings))
    assert torch.equal(got[1, 2], distribution(logits[1, 2], 1.0, **settings))


def test_a_tensor_is_a_prompt_and_its_neighbours_are_untouched(models: dict[str, tbt.Decoder]) -> None:
    model = models["llama"]
    prompt: Any = torch.tensor([5, 6, 7])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    got = tbt.speculate(model, prompt, 6, draft=tbt.first_layers(model, 1))
    assert got.tokens == tbt.generate(model, [5, 6, 7], 6)
    assert prompt.tolist() == [5, 6, 7]
    assert torch.equal(torch.get_rng_state(), before)  # the global stream of random numbers


# --- rewinding to a length ------------------------------------------------------------------------------


def test_caches_are_cut_anywhere_and_recurrent_states_return_to_the_mark(model: tbt.Decoder) -> None:
    tokens = random_tokens(1, 12)
    recurrent = any(isinstance(layer.mixer, tbt.layers.mamba.Mamba) for layer in model.layers)
    want = model(tokens)
    state = model.new_state(1, 12)
    model(tokens[:, :4], state)
    mark = state.mark()
    model(torch.cat((tokens[:, 4:7], (tokens[:, 7:9] + 1) % VOCAB), dim=1), state)  # two wrong ones
    for bad in (3, 10):
        with pytest.raises(ValueError, match=f"length {bad} must lie between the mark's 4 and the state's 9"):
            state.rewind(mark, length=bad)
    state.rewind(mark, length=7)
    assert state.length == (4 if recurrent else 7)
    assert_close(model(tokens[:, state.length :], state), want[:, (4 if recurrent else 7) :])


# --- sampled: the distribution of whole sequences -------------------------------------------------------


FALSE_ALARM = (
    1e-3  # how often chance alone would fail one of these tests; seeds are fixed, so each fails always or never
)
SEQUENCES = 200
SETTINGS: dict[str, Any] = {"temperature": 1.5, "top_k": 2, "top_p": 0.9}
PROMPT = [3, 0, 2]


def tiny(seed: int, layers: int = 1) -> tbt.Decoder:
    """Four tokens, so that all sequences can be written down."""
    attention = tbt.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4)
    layer = tbt.LayerConfig(mixer=attention, feed_forward=tbt.SwiGLUConfig(intermediate_size=8))
    return redraw(tbt.Decoder(tbt.DecoderConfig(vocab_size=4, hidden_size=8, layers=(layer,) * layers)), seed)


def exact(model: tbt.Decoder, length: int, **settings: Any) -> dict[tuple[int, ...], float]:
    """The probability of each sequence, as a product along its path."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for sequence, probability in found.items():
            step = distribution(model(torch.tensor([[*PROMPT, *sequence]]))[:, -1].double(), **settings)[0].tolist()
            longer.update({(*sequence, token): probability * share for token, share in enumerate(step) if share})
        found = longer
    assert sum(found.values()) == pytest.approx(1, abs=1e-9)
    return found


def fails(model: tbt.Decoder, draft: Any, n: int, length: int = 3, num_draft: int = 2) -> bool:
    """Whether n sequences are unlikely (below FALSE_ALARM) to come from the model's own distribution."""
    want = exact(model, length, **SETTINGS)
    got: Counter[tuple[int, ...]] = Counter()
    for seed in range(n):
        run = tbt.speculate(model, PROMPT, length, draft=draft, num_draft=num_draft, seed=seed, **SETTINGS)
        got[tuple(run.tokens)] += 1
    if set(got) - set(want):
        return True  # a token that top_k or top_p forbids
    cells = [(n * probability, got[sequence]) for sequence, probability in want.items()]
    large = [cell for cell in cells if cell[0] >= 5]
    rest = [sum(column) for column in zip((0.0, 0), *(cell for cell in cells if cell[0] < 5), strict=True)]
    tested = [*large, *([tuple(rest)] if rest[0] >= 5 else [])]
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in tested)
    return statistic > chi_square_limit(len(tested) - 1, FALSE_ALARM)


def chi_square_limit(freedom: int, tail: float) -> float:
    """The value that chi-square exceeds with probability ``tail``, from torch's incomplete gamma function."""
    low, high = 0.0, 10.0 * freedom + 100
    for _ in range(80):
        middle = (low + high) / 2
        above = torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(middle / 2).double())
        low, high = (middle, high) if above > tail else (low, middle)
    return high


def test_the_limit_is_that_of_the_tables() -> None:
    for freedom, tail, value in ((1, 0.05, 3.841), (10, 0.001, 29.588), (26, 0.001, 54.052)):
        assert chi_square_limit(freedom, tail) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize("kind", ["model", "lookup", "first layer"])
def test_sampled_sequences_have_the_exact_probabilities(kind: str) -> None:
    model = tiny(1, layers=2)
    draft = {
        "model": tiny(7),
        "lookup": tbt.PromptLookup(),
        "first layer": tbt.first_layers(model, 1),
    }[kind]
    assert not fails(model, draft, SEQUENCES)


def unfiltered(draft: tbt.Decoder) -> Any:
    """Draws from the filtered q, but reports the unfiltered one."""

    class Draft:
        def start(self, model: tbt.Decoder, max_length: int) -> Propose:
            propose = tbt.DraftModel(draft).start(model, max_length)

            def wrong(tokens: Sequence[int], count: int, choose: Choose, hidden: Tensor) -> list[Guess]:
                def reports(logits: Tensor) -> Guess:
                    return Guess(choose(logits).token, distribution(logits, 1.5)[0])

                return propose(tokens, count, reports, hidden)

            return wrong

    return Draft()


@pytest.mark.parametrize(
    "wrong", ["draw again from p", "accept always", "q without its filter", "p without its filter"]
)
def test_wrong_rules_are_caught_by_the_same_test(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = tiny(1, layers=2), tiny(7)
    if wrong == "draw again from p":
        monkeypatch.setattr(speculation, "residual", lambda p, q: p)
    elif wrong == "accept always":
        monkeypatch.setattr(speculation, "accepts", lambda p, q, proposed, generator: torch.ones(len(proposed)) > 0)
    elif wrong == "p without its filter":
        monkeypatch.setattr(speculation, "verify", lambda p, q, *rest: verify(p * 0.9 + 0.1 / 4, q, *rest))
    assert fails(model, unfiltered(draft) if wrong == "q without its filter" else draft, SEQUENCES)


def test_the_same_seed_gives_the_same_tokens(models: dict[str, tbt.Decoder]) -> None:
    model = models["llama"]
    draft = tbt.first_layers(model, 2)
    runs = [
        tuple(tbt.speculate(model, [1, 2], 12, draft=draft, temperature=1.5, seed=seed).tokens)
        for seed in (1, 1, 2, None, None)
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[1:])) == 4
    greedy = tbt.generate(model, [1, 2], 12)
    choices: list[dict[str, Any]] = [{"temperature": 1.5, "top_k": 1}, {"temperature": 2.0, "top_p": 0.0}]
    for settings in choices:
        assert tbt.speculate(model, [1, 2], 12, draft=draft, **settings).tokens == greedy


# --- tokens a pass --------------------------------------------------------------------------------------


def test_expected_tokens_is_the_closed_form_and_what_the_rule_gives() -> None:
    for a, g in itertools.product((0.0, 0.3, 0.8, 0.999), (0, 1, 4, 16)):
        assert expected_tokens(a, g) == pytest.approx((1 - a ** (g + 1)) / (1 - a), rel=1e-9)
    assert expected_tokens(1, 4) == 5  # where the closed form is 0 / 0
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    generator, n, g = torch.Generator().manual_seed(0), 3000, 3
    given = [
        1 + verify(p.expand(g + 1, -1), q.expand(g, -1), torch.multinomial(q, g, True, generator=generator).tolist(),
                   generator)[0]
        for _ in range(n)
    ]  # fmt: skip
    want = expected_tokens(torch.minimum(p, q).sum().item(), g)
    assert np.mean(given) == pytest.approx(want, abs=4 * np.std(given) / n**0.5)
    for bad in (-0.1, 1.1, math.nan, "0.5"):
        with pytest.raises(ValueError, match="acceptance"):
            expected_tokens(bad, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_draft"):
        expected_tokens(0.5, -1)
