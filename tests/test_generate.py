"""Sampling and generation: the thresholds by hand, greedy against transformers, batches against solo runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import READS, fake_gpu, state_on
from families import T_DSV3, T_JAMBA, T_LLAMA, llama, ours, random_tokens

import tokenbytoken as tbt
from tokenbytoken.__main__ import main
from tokenbytoken.run import Sampling, distribution, generation
from tokenbytoken.run.sampling import draw


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, tbt.Decoder]:
    reference = llama()
    return reference, ours(reference, tmp_path_factory.mktemp("t-llama"))


def kept(p: list[float], **options: Any) -> set[int]:
    """The tokens that are ever drawn from the distribution p."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor(p).log().expand(4000, -1)
    return set(tbt.sample(rows, 1.0, generator=generator, **options).tolist())


# --- sampling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "top_p", "want"),
    [
        ([0.5, 0.41, 0.09], 0.9, {0, 1}),
        ([0.4, 0.3, 0.2, 0.1], 0.8, {0, 1, 2}),
        ([0.5, 0.35, 0.10, 0.05], 0.9, {0, 1, 2}),
        ([0.05, 0.1, 0.35, 0.5], 0.9, {1, 2, 3}),
    ],
)
def test_c14_top_p_keeps_the_token_that_crosses(p: list[float], top_p: float, want: set[int]) -> None:
    from transformers import TopPLogitsWarper

    assert kept(p, top_p=top_p) == want
    warped = TopPLogitsWarper(top_p)(None, torch.tensor([p]).log())[0]
    assert {i for i, x in enumerate(warped.tolist()) if x > -1e30} == want


def test_c15_top_p_zero_and_one() -> None:
    assert kept([0.5, 0.3, 0.2], top_p=0.0) == {0}
    assert kept([0.2, 0.3, 0.5], top_p=0.0) == {2}
    assert kept([0.2, 0.3, 0.5], top_p=1e-9) == {2}
    assert kept([0.5, 0.3, 0.2], top_p=1.0) == {0, 1, 2}
    # One logit of 30 among 50,000 zeros: the tail holds 5e-9 of the mass. At top_p 1 it must stay possible.
    logits = torch.zeros(1, 50_000)
    logits[0, 7] = 30.0
    flat = tbt.sample(logits.expand(64, -1), temperature=100.0, generator=torch.Generator().manual_seed(0))
    assert len(set(flat.tolist())) > 50
    assert tbt.sample(logits, 1.0, top_p=1.0, generator=torch.Generator().manual_seed(0)).item() == 7


def test_c16_temperature_zero_is_greedy() -> None:
    assert tbt.sample(torch.tensor([[1.0, 3.0, 2.0]])).tolist() == [1]
    assert tbt.sample(torch.tensor([[2.0, 2.0, 1.0]])).tolist() == [0]  # ties: the lowest index
    assert tbt.sample(torch.tensor([[1.0, 5.0, 5.0, 5.0]] * 3)).tolist() == [1, 1, 1]
    assert tbt.sample(torch.tensor([[6e4, -6e4, 6e4]], dtype=torch.float16)).tolist() == [0]
    big = torch.tensor([[1e4, 9.9e3, -1e4]])
    for temperature in (1e-6, 1e-3):
        assert tbt.sample(big, temperature, generator=torch.Generator().manual_seed(0)).tolist() == [0]
    assert tbt.sample(big.half(), 1e-6, generator=torch.Generator().manual_seed(0)).tolist() == [0]


def test_sampling_follows_the_softmax() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    n = 40_000
    for temperature in (0.5, 1.0, 2.0):
        want = (logits / temperature).softmax(-1)
        drawn = tbt.sample(logits.expand(n, -1), temperature, generator=torch.Generator().manual_seed(1))
        got = torch.bincount(drawn, minlength=4) / n
        # Five standard deviations of a frequency; a right sampler fails this once in two million tokens.
        assert ((got - want).abs() <= 5 * (want * (1 - want) / n).sqrt()).all()


def test_top_k() -> None:
    assert kept([0.1, 0.2, 0.3, 0.4], top_k=2) == {2, 3}
    assert kept([0.25, 0.25, 0.25, 0.25], top_k=2) == {0, 1}  # a tie at the cut: the lowest indices
    assert kept([0.1, 0.2, 0.7], top_k=50) == {0, 1, 2}
    assert kept([0.1, 0.2, 0.7], top_k=1) == {2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "1"}, "temperature must be a number of at least 0, not '1'"),
        ({"temperature": True}, "temperature must be a number of at least 0, not True"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": True}, "top_k must be a positive integer, not True"),
        ({"top_k": 2.0}, "top_k must be a positive integer, not 2.0"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_p": None}, "top_p must be a number of at least 0, not None"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
    ],
)
def test_bad_sampling_is_refused(options: dict[str, Any], words: str, pair: tuple[Any, tbt.Decoder]) -> None:
    with pytest.raises(ValueError, match=words):
        tbt.sample(torch.zeros(1, 3), **options)
    with pytest.raises(ValueError, match=words):
        tbt.stream(pair[1], [1], 4, **options)  # when called, not when first read


# --- generation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 17])
def test_c13_greedy_equals_transformers_for_64_tokens(length: int, pair: tuple[Any, tbt.Decoder]) -> None:
    reference, model = pair
    prompt = random_tokens(1, length, seed=length)
    want = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, min_new_tokens=64, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )[0, length:].tolist()  # fmt: skip
    assert tbt.generate(model, prompt[0].tolist(), 64) == want
    uncached = prompt[0].tolist()
    for _ in range(64):
        uncached.append(int(tbt.sample(model(torch.tensor([uncached]), logits="last")[:, -1])))
    assert uncached[length:] == want


def test_batch_rows_equal_their_solo_runs_and_stop_alone(pair: tuple[Any, tbt.Decoder]) -> None:
    _, model = pair
    prompts = [random_tokens(1, n, seed=n)[0].tolist() for n in (3, 19, 8, 1)]
    solo = [tbt.generate(model, prompt, 24) for prompt in prompts]
    assert tbt.generate(model, prompts, 24) == solo
    eos = {solo[1][4], solo[3][9]}
    ended = [tbt.generate(model, prompt, 24, eos_ids=eos) for prompt in prompts]
    assert len({len(row) for row in ended}) > 1
    widths: list[int] = []
    hook = model.embed.register_forward_hook(lambda _m, inputs, _o: widths.append(inputs[0].shape[0]))
    assert tbt.generate(model, prompts, 24, eos_ids=eos) == ended
    hook.remove()
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 4  # a finished row stops consuming
    assert all(row[-1] in eos or len(row) == 24 for row in ended)


def test_seeds(pair: tuple[Any, tbt.Decoder]) -> None:
    _, model = pair
    prompt = [5, 6, 7]
    runs = [tbt.generate(model, prompt, 20, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0] == list(tbt.stream(model, prompt, 20, temperature=1.0, seed=1))
    both = tbt.generate(model, [prompt, [9, 9]], 20, temperature=1.0, seed=1)
    assert both[0] == runs[0]  # a row draws from its own stream, whoever shares the batch
    torch.manual_seed(0)
    free = {tuple(tbt.generate(model, prompt, 20, temperature=1.0)) for _ in range(4)}
    assert len(free) > 1


def test_a_state_is_continued(pair: tuple[Any, tbt.Decoder]) -> None:
    _, model = pair
    prompt = random_tokens(1, 12)[0].tolist()
    want = tbt.generate(model, prompt, 10)
    state = model.new_state(1, 22)
    first = tbt.generate(model, prompt, 6, state=state)
    assert state.length == 12 + 6 - 1  # the last token returned has not been pushed through the model
    rest = tbt.generate(model, first[-1:], 4, state=state)
    assert first + rest == want


def test_a_given_state_keeps_its_rows(pair: tuple[Any, tbt.Decoder]) -> None:
    _, model = pair
    prompts = random_tokens(2, 5).tolist()
    solo = [tbt.generate(model, prompt, 12) for prompt in prompts]
    eos = {solo[0][3]} - set(solo[1][:6])
    assert eos
    state = model.new_state(2, 20)
    got = tbt.generate(model, prompts, 12, eos_ids=eos, state=state)
    assert got == [tbt.generate(model, prompt, 12, eos_ids=eos) for prompt in prompts]
    assert state.batch_size == 2


@pytest.mark.parametrize(
    ("prompt", "new", "options", "words"),
    [
        ([1] * 12, 8, {"max_length": 16}, "16"),  # C10
        ([1] * 17, 1, {"max_length": 16}, "16"),
        ([], 4, {}, "empty"),
        ([[1], []], 4, {}, "empty"),
        ([97], 4, {}, "token id 97"),
        ([3, -2], 4, {}, "token id -2"),
        ([1], -1, {}, "max_new_tokens"),
        ([1], 1.5, {}, "max_new_tokens"),
        ([1], True, {}, "max_new_tokens must be an integer of at least 0, not True"),
        ([1], 4, {"max_length": 8.0}, "max_length must be a positive integer, not 8.0"),
        ([1], 4, {"seed": 0.5, "temperature": 1.0}, "seed must be an integer"),
        ([1], 4, {"seed": 2**64, "temperature": 1.0}, r"seed must be below 2\^63"),
    ],
)
def test_bad_requests_are_refused_before_computing(
    prompt: Any, new: Any, options: dict[str, Any], words: str, pair: tuple[Any, tbt.Decoder]
) -> None:
    _, model = pair
    calls: list[int] = []
    hook = model.embed.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=words):
        tbt.generate(model, prompt, new, **options)
    hook.remove()
    assert calls == []


def test_integers_of_numpy_count_as_integers(pair: tuple[Any, tbt.Decoder]) -> None:
    _, model = pair
    options: dict[str, Any] = {"top_k": 5, "seed": 3, "max_length": 16}
    want = tbt.generate(model, [5, 6], 8, temperature=1.0, **options)
    got: dict[str, Any] = {name: np.int64(value) for name, value in options.items()}
    numbers: list[Any] = [np.int64(8), np.int32(8), np.float32(1)]
    eight, short, one = numbers
    assert tbt.generate(model, [5, 6], eight, temperature=one, **got) == want
    assert list(tbt.stream(model, [5, 6], short, temperature=1.0, **got)) == want


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "jamba"])
def test_the_host_reads_a_gpu_once_a_pass(
    family: str, settings: dict[str, Any], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows at once; and nothing else is read: not in the layers, not in the draw, not to check what was chosen."""
    reads: list[torch.Size] = []
    fields = {"llama": T_LLAMA, "deepseek_v3": T_DSV3, "jamba": T_JAMBA}[family]
    config = tbt.DecoderConfig.from_hf({"model_type": family, **fields})

    def read(chosen: torch.Tensor) -> list[int]:
        reads.append(chosen.shape)
        return [5] * len(chosen)

    monkeypatch.setattr(generation, "read_tokens", read)
    monkeypatch.setattr(generation, "generators_of", lambda seed, count, device: [None] * count)
    with fake_gpu(monkeypatch):
        model = tbt.Decoder(config).requires_grad_(False)
        got = tbt.generate(model, [[1, 2, 3]] * 4, 3, state=state_on(model, 4, 6, padded), **settings)
        with pytest.raises(READS):  # a caller's tokens are read, to check them
            model(torch.tensor([[1, 2], [3, 4]]))
    assert got == [[5] * 3] * 4
    assert reads == [(4,)] * 3


def test_limits_of_a_given_state(pair: tuple[Any, tbt.Decoder]) -> None:
    _, model = pair
    state = model.new_state(1, 16)
    model(random_tokens(1, 10), state)
    with pytest.raises(ValueError, match="10 held"):
        tbt.generate(model, [1, 2], 5, state=state)
    with pytest.raises(ValueError, match="2 prompts"):
        tbt.generate(model, [[1], [2]], 2, state=state)
    with pytest.raises(ValueError, match="equal lengths"):
        tbt.generate(model, [[1], [2, 3]], 2, state=model.new_state(2, 16))
    assert state.length == 10
    assert len(tbt.generate(model, [1, 2], 4, state=state)) == 4  # exactly full
    assert tbt.generate(model, [1], 0) == []


# --- the command -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> tuple[tbt.Decoder, Any]:
    return tbt.load("smollm2-135m"), tbt.load_tokenizer("smollm2-135m")


def test_command_streams_real_text(tmp_path: Path, smollm2: tuple[tbt.Decoder, Any]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tokenbytoken", "generate", "--prompt", "The capital of France is",
         "--max-new-tokens", "12", "--weights", "float32"],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "utf-8"}, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("The capital of France is Paris")
    assert run.stderr.count("\n") == 1
    for words in ("12 tokens", "tokens/s", "state bytes used", "% of the machine's measured bandwidth"):
        assert words in run.stderr
    model, tokenizer = smollm2
    prompt = tokenizer.encode("The capital of France is")
    assert run.stdout.rstrip("\n") == "The capital of France is" + tokenizer.decode(tbt.generate(model, prompt, 12))
    # Everything but the last token is held, in float32.
    assert f"{tbt.state_bytes(model.config, 1, len(prompt) + 11, 4):,} state bytes used" in run.stderr


def test_command_chats_with_the_models_template(
    smollm2: tuple[tbt.Decoder, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-new-tokens", "24", "--weights", "float32"]
    assert main(["generate", "--chat", "--prompt", "What is 2 + 2?", *options]) == 0
    said = capsys.readouterr().out
    assert "<|im_" not in said
    model, tokenizer = smollm2
    ids = tokenizer.encode(tokenizer.chat([{"role": "user", "content": "What is 2 + 2?"}]))
    reply = tbt.generate(model, ids, 24, eos_ids=tokenizer.eos_ids)
    assert said.strip() == tokenizer.decode(reply, skip_special=True).strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", ""), "empty"),
        (("--prompt", "x", "--max-new-tokens", "-3"), "max_new_tokens"),
        (("--prompt", "x", "--source", "nowhere"), "nowhere"),
        (("--prompt", "x", "--top-p", "7"), "top_p"),
        (("--prompt", "x", "--max-new-tokens", str(2**50)), "no memory for a state of"),
        (("--prompt", "x", "--device", "gpu"), "device 'gpu' cannot be used here"),
        pytest.param(
            ("--prompt", "x", "--device", "cuda"),
            "device 'cuda' cannot be used here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_command_refuses_bad_input_in_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *arguments]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert words in told.err


def test_distinct_rows_share_no_luck(pair: tuple[Any, tbt.Decoder]) -> None:
    rows = tbt.generate(pair[1], [[5]] * 6, 12, temperature=1.5, seed=3)
    assert Counter(map(tuple, rows)).most_common(1)[0][1] == 1


def test_tokens_may_come_as_tensors_and_eos_as_any_collection(pair: tuple[Any, tbt.Decoder]) -> None:
    _, model = pair
    prompt: Any = random_tokens(2, 6)
    want = tbt.generate(model, prompt[0].tolist(), 8)
    assert tbt.generate(model, prompt[0], 8) == want
    assert tbt.generate(model, prompt.numpy(), 8)[0] == want
    ended = tbt.generate(model, prompt[0], 8, eos_ids=[96, want[3]])
    ends: Any = iter([96, want[3]])
    assert tbt.generate(model, prompt[0], 8, eos_ids=ends) == ended
    bad: Any
    for bad in ("text", [[1, 2], 3], [1.5]):
        with pytest.raises(ValueError, match="collection of token ids"):
            tbt.generate(model, bad, 2)
    with pytest.raises(ValueError, match="eos_ids"):
        tbt.generate(model, [1], 2, eos_ids=2)  # type: ignore[call-overload]


def test_sampling_settings_are_plain_numbers_checked_once() -> None:
    settings = Sampling(np.float32(0.5), np.int64(3), np.float64(0.25))  # type: ignore[arg-type]
    assert settings == Sampling(0.5, 3, 0.25)
    assert [type(value) for value in (settings.temperature, settings.top_k, settings.top_p)] == [float, int, float]
    choices: list[dict[str, Any]]
    choices = [{}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1e-46}]
    for greedy in choices:
        assert Sampling(**greedy).is_greedy
    assert not Sampling(1.0).is_greedy


@pytest.mark.parametrize("shape", [(1, 5000), (3, 5000), (4, 7)])
def test_a_draw_is_that_of_multinomial(shape: tuple[int, int]) -> None:
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(0)) ** 4
    weights[:, 3] = 0
    for seed in range(20):
        ours, theirs = (torch.Generator().manual_seed(seed) for _ in range(2))
        want = torch.multinomial(weights, 1, generator=theirs).squeeze(-1)
        assert torch.equal(draw(weights, [ours]), want)
        alone = [torch.Generator().manual_seed(seed + i) for i in range(len(weights))]
        each = [
            int(torch.multinomial(row, 1, generator=torch.Generator().manual_seed(seed + i)))
            for i, row in enumerate(weights)
        ]
        assert draw(weights, alone).tolist() == each


def test_logits_that_are_not_numbers_are_refused(pair: tuple[Any, tbt.Decoder]) -> None:
    model = pair[1]

    def spoil(module: Any, inputs: Any, logits: torch.Tensor) -> None:
        logits[1:] = torch.nan

    hook = model.head.register_forward_hook(spoil)
    try:
        choices: list[dict[str, Any]] = [{}, {"temperature": 1.0}]
        for settings in choices:
            with pytest.raises(ValueError, match="not finite"):  # that of one row only
                tbt.generate(model, [[1, 2], [3, 4]], 3, **settings)
        assert len(tbt.generate(model, [1, 2], 3)) == 3
    finally:
        hook.remove()
    for bad in (torch.nan, torch.inf):
        for temperature in (0.0, 1.0):
            with pytest.raises(ValueError, match="not finite"):
                distribution(torch.tensor([[1.0, 2.0], [1.0, bad]]), temperature)
            with pytest.raises(ValueError, match="not finite"):
                tbt.sample(torch.tensor([[1.0, 2.0], [1.0, bad]]), temperature)
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="not finite"):
            tbt.sample(torch.tensor([[1.0, float("nan")]]), temperature)
    tiny = tbt.sample(torch.tensor([[1.0, 2.0]]), 1.0, top_p=1e-46, generator=torch.Generator().manual_seed(0))
    assert tiny.tolist() == [1]
    assert tbt.sample(torch.tensor([[1.0, 2.0]]), 1e-46).tolist() == [1]
