"""From a prompt to text: one token after another.

The state holds every token but the newest; the newest is pushed through the model, the logits of its position choose
the next. The host reads the tokens of a pass once, for all rows of the batch; they go back into the model as they lie
on the device, and are not checked again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import index
from typing import Any, overload

import torch

from .._numbers import whole
from ..decoder import Decoder, DecoderState
from .sampling import Sampling, read_tokens

__all__ = ["check_prompts", "check_tokens", "generate", "generators_of", "sequence_length", "stream", "token_ids"]


def token_ids(tokens: Any, what: str) -> list[int]:
    """Token ids as plain integers, from any collection of them; ValueError, with the name ``what``, for others."""
    try:
        plain = list(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
        if any(isinstance(token, bool) for token in plain):  # a mask, perhaps
            raise TypeError
        return [index(token) for token in plain]
    except (TypeError, RuntimeError):  # torch raises a RuntimeError for a tensor without numbers
        raise ValueError(f"{what} must be a collection of token ids, not {tokens!r}") from None


def check_tokens(model: Decoder, tokens: Sequence[int], where: str = "") -> None:
    """ValueError, which begins with ``where``, for a token outside the vocabulary."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < model.config.vocab_size:
            raise ValueError(f"{where}token id {token} is outside the vocabulary of {model.config.vocab_size}")


def check_prompts(model: Decoder, prompts: Sequence[Sequence[int]]) -> None:
    """ValueError for no prompt at all, for one without tokens, and for a token outside the vocabulary."""
    if not prompts:
        raise ValueError("the list of prompts is empty")
    for prompt in prompts:
        if not len(prompt):
            raise ValueError("the prompt is empty: it needs at least one token")
        check_tokens(model, prompt)


def sequence_length(held: int, prompt: int, max_new_tokens: int, *limits: int | None) -> int:
    """Tokens in the whole sequence; the last is never pushed through the model, but must fit as well.

    Raises ValueError if one of ``limits`` is passed.
    """
    needed = held + prompt + max_new_tokens
    limit = min((limit for limit in limits if limit is not None), default=needed)
    if needed > limit:
        raise ValueError(
            f"{held} held + {prompt} of the prompt + {max_new_tokens} new tokens = {needed} exceed max_length {limit}"
        )
    return needed


def _steps(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    eos_ids: Collection[int],
    seed: int | None,
    state: DecoderState | None,
    max_length: int | None,
) -> Iterator[dict[int, int]]:
    """Check everything, then yield, step by step, the new token of each unfinished row: {row: token}."""
    check_prompts(model, prompts)
    ends = set(token_ids(eos_ids, "eos_ids"))
    max_new_tokens = whole("max_new_tokens", max_new_tokens, 0)
    max_length = None if max_length is None else whole("max_length", max_length)
    seed = None if seed is None else whole("seed", seed, -(2**63))
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    held = 0 if state is None else state.length
    needed = sequence_length(held, longest, max_new_tokens, max_length, None if state is None else state.max_length)
    if state is not None and state.batch_size != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts, the state was made for {state.batch_size}")
    if state is not None and min(lengths) < longest:
        raise ValueError("prompts that continue a state must have equal lengths: its padding is already fixed")
    device = model.device
    # One random stream for each prompt: what a row draws does not depend on who shares its batch.
    generators = [None] if sampling.is_greedy else generators_of(seed, len(prompts), device)
    padding = [longest - length for length in lengths]

    @torch.no_grad()
    def steps(running: DecoderState) -> Iterator[dict[int, int]]:
        tokens = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
        tokens = tokens.to(device)
        rows = list(range(len(prompts)))  # which prompt each row of the running batch belongs to
        finished: set[int] = set()
        for step in range(max_new_tokens):
            logits = model(tokens, running, logits="last", checked=True)[:, -1]  # (rows, V)
            chosen = sampling.choose(logits, generators if sampling.is_greedy else [generators[row] for row in rows])
            if model.agree is not None:
                chosen = model.agree(chosen)
            new = dict(zip(rows, read_tokens(chosen), strict=True))
            yield {row: token for row, token in new.items() if row not in finished}
            finished.update(row for row, token in new.items() if token in ends)
            if finished.issuperset(rows) or step + 1 == max_new_tokens:
                return
            if state is None and not finished.isdisjoint(rows):
                # Finished rows leave the batch and cost nothing further. (The caller's own state keeps its rows.)
                alive = [i for i, row in enumerate(rows) if row not in finished]
                running = running.select(alive)
                rows, chosen = [rows[i] for i in alive], chosen[alive]
            tokens = chosen.unsqueeze(-1)  # (rows, 1), where they are: on the device

    if max_new_tokens == 0:
        return iter(())
    return steps(model.new_state(len(prompts), needed, padding) if state is None else state)


def generators_of(seed: int | None, count: int, device: torch.device) -> list[torch.Generator]:
    """``count`` streams of random numbers that follow from one seed, or from none."""
    base = torch.Generator()
    if seed is None:
        base.seed()
    else:
        base.manual_seed(seed)
    return [torch.Generator(device).manual_seed(s) for s in torch.randint(2**62, (count,), generator=base).tolist()]


@overload
def generate(
    model: Decoder, prompt: Sequence[int], max_new_tokens: int, *, temperature: float = ..., top_k: int | None = ...,
    top_p: float = ..., eos_ids: Collection[int] = ..., seed: int | None = ..., state: DecoderState | None = ...,
    max_length: int | None = ...,
) -> list[int]: ...  # fmt: skip
@overload
def generate(
    model: Decoder, prompt: Sequence[Sequence[int]], max_new_tokens: int, *, temperature: float = ...,
    top_k: int | None = ..., top_p: float = ..., eos_ids: Collection[int] = ..., seed: int | None = ...,
    state: DecoderState | None = ..., max_length: int | None = ...,
) -> list[list[int]]: ...  # fmt: skip
def generate(
    model: Decoder,
    prompt: Sequence[int] | Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    eos_ids: Collection[int] = (),
    seed: int | None = None,
    state: DecoderState | None = None,
    max_length: int | None = None,
) -> list[int] | list[list[int]]:
    """Continue a prompt of token ids by up to ``max_new_tokens``; returns the new tokens only.

    A list of prompts gives a list of lists: they run as one batch, padded on the left, and each greedy row
    equals its run alone. A row ends with (and includes) a token of ``eos_ids``. A ``state`` is continued and
    then holds everything but the last token returned. With ``temperature`` > 0 the same ``seed`` gives the
    same tokens; :func:`~tokenbytoken.run.sample` says what the three settings mean. Raises ValueError, before computing
    anything, when prompt and new tokens exceed ``max_length`` or the state's.
    """
    plain: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # a tensor or an array is welcome
    batched = len(plain) > 0 and (hasattr(plain[0], "__len__") and not isinstance(plain[0], str))
    prompts = [token_ids(p, "a prompt") for p in plain] if batched else [token_ids(plain, "the prompt")]
    new: list[list[int]] = [[] for _ in prompts]
    for step in _steps(
        model, prompts, max_new_tokens, Sampling(temperature, top_k, top_p),
        eos_ids=eos_ids, seed=seed, state=state, max_length=max_length,
    ):  # fmt: skip
        for row, token in step.items():
            new[row].append(token)
    return new if batched else new[0]


def stream(
    model: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    eos_ids: Collection[int] = (),
    seed: int | None = None,
    state: DecoderState | None = None,
    max_length: int | None = None,
) -> Iterator[int]:
    """The tokens of :func:`generate` for one prompt, each as soon as it is chosen.

    Arguments are checked when the function is called, not when the first token is asked for.
    """
    steps = _steps(
        model, [token_ids(prompt, "the prompt")], max_new_tokens, Sampling(temperature, top_k, top_p),
        eos_ids=eos_ids, seed=seed, state=state, max_length=max_length,
    )  # fmt: skip
    return (step[0] for step in steps)
