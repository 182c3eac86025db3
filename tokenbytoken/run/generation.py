"""From logits to text: sampling, generation, streaming, speculation; and ``python -m tokenbytoken.run.generation``.

The loop that all of it shares: the state holds every token but the newest; the newest is pushed through the
model, the logits of its position choose the next. Speculation pushes guesses of what will follow along with it, so
that one pass, which reads the weights once, may settle several tokens (Leviathan et al. 2022, arXiv 2211.17192; Chen
et al. 2023, arXiv 2302.01318).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .._numbers import not_negative, whole
from ..checkpoints import Tokenizer, load, load_tokenizer
from ..cost import pass_cost
from ..decoder import Decoder, DecoderState

__all__ = [
    "Draft",
    "DraftModel",
    "Guess",
    "PromptLookup",
    "Round",
    "Speculation",
    "accepts",
    "distribution",
    "first_layers",
    "generate",
    "residual",
    "sample",
    "speculate",
    "stream",
    "verify",
]


def sample(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose one token for each row of logits (B, V) → (B,) int64.

    ``temperature`` 0 takes the largest logit, the lowest index on ties. Otherwise logits / temperature are cut
    to the ``top_k`` largest, then to the smallest set whose probability reaches ``top_p`` (the token that
    crosses the threshold stays; Holtzman et al. 2019, arXiv 1904.09751), and one token is drawn.
    """
    _check_sampling(temperature, top_k, top_p)
    if _is_greedy(temperature, top_k, top_p):
        return _argmax(logits)
    likeliest, order = _likeliest(logits, temperature, top_k, top_p)
    choice = torch.multinomial(likeliest, 1, generator=generator)
    return order.gather(-1, choice).squeeze(-1)


def distribution(logits: Tensor, temperature: float = 0.0, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """The probabilities with which :func:`sample` draws: logits (B, V) → (B, V), float32 or float64.

    At temperature 0 all of it lies on the greedy token.
    """
    _check_sampling(temperature, top_k, top_p)
    if _is_greedy(temperature, top_k, top_p):
        return F.one_hot(_argmax(logits), logits.shape[-1]).to(_wide(logits))
    likeliest, order = _likeliest(logits, temperature, top_k, top_p)
    likeliest = likeliest / likeliest.sum(-1, keepdim=True)
    return torch.zeros_like(likeliest).scatter(-1, order, likeliest)


def _is_greedy(temperature: float, top_k: int | None, top_p: float) -> bool:
    return temperature < torch.finfo(torch.float32).tiny or top_p == 0 or top_k == 1


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _likeliest(logits: Tensor, temperature: float, top_k: int | None, top_p: float) -> tuple[Tensor, Tensor]:
    """What a draw may choose from, likeliest first: probabilities (B, V), not normalised again, and their tokens."""
    _check_logits(logits)
    logits = logits.to(_wide(logits))
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # shifted first: the largest stays 0, not inf
    # A stable sort keeps the lowest index first among equals, so that cuts at a tie agree with greedy choice.
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        sorted_logits[..., top_k:] = -torch.inf
    probabilities = sorted_logits.softmax(-1)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # mass of all likelier tokens
        beyond = before >= top_p
        beyond[..., 0] = False  # the likeliest token stays, however small top_p is
        probabilities = probabilities.masked_fill(beyond, 0)
    return probabilities, order


def _argmax(logits: Tensor) -> Tensor:
    """Index of the largest entry of each row, the lowest on ties (torch leaves that choice open)."""
    _check_logits(logits)
    return (logits == logits.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)


def _check_logits(logits: Tensor) -> None:
    if not bool(logits.amax(-1).isfinite().all()):  # amax hands a NaN on
        raise ValueError("the logits are not finite: the model's weights or its dtype are at fault")


def _check_sampling(temperature: float, top_k: int | None, top_p: float) -> None:
    not_negative("temperature", temperature)
    if top_k is not None:
        whole("top_k", top_k)
    if not_negative("top_p", top_p) > 1:
        raise ValueError(f"top_p must lie between 0 and 1, not {top_p}")


def _ids(tokens: Any, what: str) -> list[int]:
    """Token ids as plain integers, from any collection of them."""
    try:
        plain = list(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
        if any(isinstance(token, bool) for token in plain):  # a mask, perhaps
            raise TypeError
        return [index(token) for token in plain]
    except (TypeError, RuntimeError):  # torch raises a RuntimeError for a tensor without numbers
        raise ValueError(f"{what} must be a collection of token ids, not {tokens!r}") from None


def _check_prompts(model: Decoder, prompts: Sequence[Sequence[int]]) -> None:
    if not prompts:
        raise ValueError("the list of prompts is empty")
    for prompt in prompts:
        if not len(prompt):
            raise ValueError("the prompt is empty: it needs at least one token")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < model.config.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {model.config.vocab_size}")


def _length(held: int, prompt: int, max_new_tokens: int, *limits: int | None) -> int:
    """Tokens in the whole sequence; the last is never pushed through the model, but must fit as well."""
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
    *,
    temperature: float,
    top_k: int | None,
    top_p: float,
    eos_ids: Collection[int],
    seed: int | None,
    state: DecoderState | None,
    max_length: int | None,
) -> Iterator[dict[int, int]]:
    """Check everything, then yield, step by step, the new token of each unfinished row: {row: token}."""
    _check_prompts(model, prompts)
    _check_sampling(temperature, top_k, top_p)
    eos_ids = _ids(eos_ids, "eos_ids")
    max_new_tokens = whole("max_new_tokens", max_new_tokens, 0)
    max_length = None if max_length is None else whole("max_length", max_length)
    seed = None if seed is None else whole("seed", seed, -(2**63))
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    held = 0 if state is None else state.length
    needed = _length(held, longest, max_new_tokens, max_length, None if state is None else state.max_length)
    if state is not None and state.batch_size != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts, the state was made for {state.batch_size}")
    if state is not None and min(lengths) < longest:
        raise ValueError("prompts that continue a state must have equal lengths: its padding is already fixed")
    device = model.embed.weight.device
    # One random stream for each prompt: what a row draws does not depend on who shares its batch.
    generators = _generators(seed, len(prompts), device) if temperature > 0 else []

    @torch.no_grad()
    def steps(running: DecoderState) -> Iterator[dict[int, int]]:
        padding = [longest - length for length in lengths]
        tokens = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
        rows = list(range(len(prompts)))  # which prompt each row of the running batch belongs to
        finished: set[int] = set()
        for step in range(max_new_tokens):
            logits = model(tokens.to(device), running, logits="last")[:, -1]  # (rows, V)
            if temperature == 0:
                chosen = _argmax(logits).tolist()
            else:
                chosen = [
                    int(sample(logits[i : i + 1], temperature, top_k, top_p, generators[row]))
                    for i, row in enumerate(rows)
                ]
            if model.agree is not None:
                chosen = model.agree(chosen)
            yield {row: token for row, token in zip(rows, chosen, strict=True) if row not in finished}
            finished.update(row for row, token in zip(rows, chosen, strict=True) if token in eos_ids)
            if finished.issuperset(rows) or step + 1 == max_new_tokens:
                return
            if state is None and not finished.isdisjoint(rows):
                # Finished rows leave the batch and cost nothing further. (The caller's own state keeps its rows.)
                alive = [i for i, row in enumerate(rows) if row not in finished]
                running = running.select(alive)
                rows, chosen = [rows[i] for i in alive], [chosen[i] for i in alive]
            tokens = torch.tensor(chosen)[:, None]

    if max_new_tokens == 0:
        return iter(())
    return steps(model.new_state(len(prompts), needed, [longest - n for n in lengths]) if state is None else state)


def _generators(seed: int | None, count: int, device: torch.device) -> list[torch.Generator]:
    base = torch.Generator()
    if seed is None:
        base.seed()
    else:
        base.manual_seed(seed)
    return [torch.Generator(device).manual_seed(s) for s in torch.randint(2**62, (count,), generator=base).tolist()]


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
    same tokens. Raises ValueError, before computing anything, when
    prompt and new tokens exceed ``max_length`` or the state's.
    """
    plain: Any = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # a tensor or an array is welcome
    batched = len(plain) > 0 and (hasattr(plain[0], "__len__") and not isinstance(plain[0], str))
    prompts = [_ids(p, "a prompt") for p in plain] if batched else [_ids(plain, "the prompt")]
    new: list[list[int]] = [[] for _ in prompts]
    for step in _steps(
        model, prompts, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
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
        model, [_ids(prompt, "the prompt")], max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        eos_ids=eos_ids, seed=seed, state=state, max_length=max_length,
    )  # fmt: skip
    return (step[0] for step in steps)


# --- speculation ------------------------------------------------------------------------------------------


def accepts(p: Tensor, q: Tensor, proposed: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Whether each proposed token stands, with probability min(1, p / q): p, q (n, V), proposed (n,) → (n,) bool.

    Row by row, p is the target's distribution and q the one that the proposal was drawn from.
    """
    p, q = (t.gather(-1, proposed.unsqueeze(-1)).squeeze(-1) for t in (p, q))
    return torch.rand(p.shape, generator=generator, dtype=p.dtype, device=p.device) * q < p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Where to draw from instead of a proposal that fell: max(p − q, 0), normalised; p, q (…, V) → (…, V).

    A token x appears with probability min(p, q) as an accepted proposal and max(p − q, 0) in place of a rejected one,
    p(x) in all (Leviathan et al. 2022, appendix A.1).
    """
    more = (p - q).clamp(min=0)
    total = more.sum(-1, keepdim=True)
    return torch.where(total > 0, more / total, p)  # p ≤ q everywhere: only where they differ by rounding


def verify(p: Tensor, q: Tensor, proposed: Sequence[int], generator: torch.Generator | None = None) -> tuple[int, int]:
    """How many of n proposed tokens stand, and the token that follows them: p (n + 1, V), q (n, V).

    The first that is rejected ends the run and is replaced by a draw from the :func:`residual`; if none is, the
    target's last distribution gives one token more. Greedy choice is the case of distributions with all on one token.
    Raises ValueError for distributions that do not go with the tokens.
    """
    proposed = _ids(proposed, "proposed")
    n, V = len(proposed), p.shape[-1]
    if p.shape != (n + 1, V) or q.shape != (n, V):
        raise ValueError(f"{n} proposed tokens need p ({n + 1}, V) and q ({n}, V): {tuple(p.shape)}, {tuple(q.shape)}")
    if not all(0 <= token < V for token in proposed):
        raise ValueError(f"proposed tokens {proposed} must lie within the vocabulary of {V}")
    tokens = torch.tensor(proposed, dtype=torch.int64, device=p.device)
    accepted = int(accepts(p[:-1], q, tokens, generator).long().cumprod(0).sum())
    follows = p[-1] if accepted == len(proposed) else residual(p[accepted], q[accepted])
    return accepted, int(torch.multinomial(follows, 1, generator=generator))


class Guess(NamedTuple):
    """A proposed token and the distribution (V,) that it was drawn from."""

    token: int
    q: Tensor


#: Draws a token from logits (1, V), with the sampling settings of the target.
Choose = Callable[[Tensor], Guess]

#: ``propose(tokens, count, choose, hidden)``: up to ``count`` guesses at what follows ``tokens``, all of the sequence
#: so far. ``hidden`` (1, t, M) is what the target's head multiplied in its last pass, up to the last token but one.
Propose = Callable[[Sequence[int], int, Choose, Tensor], list[Guess]]


class Draft(Protocol):
    """A way to guess what comes next; :class:`PromptLookup` and :class:`DraftModel` are two."""

    def start(self, model: Decoder, max_length: int) -> Propose:
        """What guesses for one sequence of at most ``max_length`` tokens; ValueError for a model it cannot serve."""


@dataclass(frozen=True)
class PromptLookup:
    """Guesses that the text repeats itself: what followed the newest tokens where they stood last.

    The longest run of newest tokens, from ``longest`` down to ``shortest``, that also stands earlier is used; without
    any there is no guess. No model is asked, and q lies on one token. Source: Saxena 2023, prompt lookup decoding.
    """

    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        if whole("shortest", self.shortest) > whole("longest", self.longest):
            raise ValueError(f"shortest ({self.shortest}) exceeds longest ({self.longest})")

    def start(self, model: Decoder, max_length: int) -> Propose:
        """See :class:`Draft`."""
        vocab_size, device = model.config.vocab_size, model.embed.weight.device

        def propose(tokens: Sequence[int], count: int, choose: Choose, hidden: Tensor) -> list[Guess]:
            distance = self.distance(tokens)
            if distance is None:
                return []
            text = list(tokens)
            for _ in range(count):
                text.append(text[-distance])  # a guess may repeat guesses
            new = text[len(tokens) :]
            q = F.one_hot(torch.tensor(new, device=device), vocab_size).float()  # (count, V)
            return list(map(Guess, new, q))

        return propose

    def distance(self, tokens: Sequence[int]) -> int | None:
        """How far back the newest tokens stand once more, or None."""
        tokens = list(tokens)
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            newest = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == newest:
                    return len(tokens) - n - start
        return None


@dataclass(frozen=True)
class DraftModel:
    """Guesses of a smaller model over the same vocabulary, or of the target's own :func:`first_layers`."""

    model: Decoder

    def __post_init__(self) -> None:
        if not isinstance(self.model, Decoder):
            raise ValueError(f"a draft model must be a Decoder, not {self.model!r}")

    def start(self, model: Decoder, max_length: int) -> Propose:
        """See :class:`Draft`."""
        own, target = self.model.config.vocab_size, model.config.vocab_size
        if own != target:
            raise ValueError(f"the draft has a vocabulary of {own} tokens, the model one of {target}")
        state = self.model.new_state(1, max_length)
        mark = state.mark()

        def push(tokens: Sequence[int]) -> Tensor:
            pushed = torch.tensor([tokens], device=self.model.embed.weight.device)
            return self.model(pushed, state, logits="last")[:, -1]  # (1, V)

        def propose(tokens: Sequence[int], count: int, choose: Choose, hidden: Tensor) -> list[Guess]:
            nonlocal mark
            state.rewind(mark)  # behind the guesses of last time; those that stood are pushed with what came after them
            logits = push(tokens[state.length :])
            mark = state.mark()
            guesses = [choose(logits)]
            while len(guesses) < count:
                guesses.append(choose(push([guesses[-1].token])))
            return guesses

        return propose


def first_layers(model: Decoder, count: int) -> Decoder:
    """The model without all but its first ``count`` layers: with the same embedding, norm and head, and no copies.

    As a draft it needs no weights of its own.
    """
    if whole("count", count) > model.config.num_layers:
        raise ValueError(f"the model has {model.config.num_layers} layers, not {count}")
    with torch.device("meta"):
        short = Decoder(replace(model.config, layers=model.config.layers[:count], mtp_layers=0))
    short.embed, short.layers, short.norm, short.head = model.embed, model.layers[:count], model.norm, model.head
    return short.train(model.training)


class Round(NamedTuple):
    """One pass of the target: how many tokens were proposed, and how many of them it accepted."""

    proposed: int
    accepted: int


@dataclass(frozen=True)
class Speculation:
    """What :func:`speculate` returns: the new tokens, and a round for each pass of the target, the prompt's first."""

    tokens: list[int]
    rounds: list[Round]

    @property
    def passes(self) -> int:
        """Passes of the target, that of the prompt included. Plain generation takes one for each token."""
        return len(self.rounds)

    @property
    def proposed(self) -> int:
        """Tokens that the draft guessed. Those that come after a rejected one are never looked at."""
        return sum(round.proposed for round in self.rounds)

    @property
    def accepted(self) -> int:
        """Guesses that the target let stand."""
        return sum(round.accepted for round in self.rounds)

    @property
    def acceptance(self) -> float:
        """Of the guesses that were looked at, the share that stood; NaN if there were none."""
        rejected = sum(round.accepted < round.proposed for round in self.rounds)
        return self.accepted / (self.accepted + rejected) if self.proposed else math.nan

    @property
    def tokens_per_pass(self) -> float:
        """Tokens for each pass after the prompt's, which gives one whatever the draft; NaN if there was no other."""
        return (len(self.tokens) - 1) / (self.passes - 1) if self.passes > 1 else math.nan


@torch.no_grad()
def speculate(
    model: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    draft: Draft | Decoder,
    num_draft: int = 4,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    eos_ids: Collection[int] = (),
    seed: int | None = None,
    max_length: int | None = None,
) -> Speculation:
    """Continue one prompt as :func:`generate` does, with up to ``num_draft`` guesses of ``draft`` in each pass.

    Greedy tokens are those of ``generate`` (in half precision up to near ties: a pass of several tokens may round
    otherwise than one of each); sampled ones have the same distribution, though the same ``seed`` gives others. A
    ``Decoder`` as a draft stands for ``DraftModel(draft)``; both sample with the same settings.

    After a rejection caches are cut back. A recurrent state returns to a copy made before the pass instead, and the
    tokens that stood are pushed once more, along with the next guesses; where rejections in a row leave more than
    ``num_draft`` + 1 such tokens, one pass goes without guesses. Raises ValueError, before computing anything, for
    what ``generate`` refuses, for ``num_draft`` below 1 and for a draft that does not fit the model.
    """
    tokens = _ids(prompt, "the prompt")
    _check_prompts(model, [tokens])
    _check_sampling(temperature, top_k, top_p)
    eos_ids = _ids(eos_ids, "eos_ids")
    max_new_tokens, num_draft = whole("max_new_tokens", max_new_tokens, 0), whole("num_draft", num_draft)
    max_length = None if max_length is None else whole("max_length", max_length)
    seed = None if seed is None else whole("seed", seed, -(2**63))
    first = len(tokens)
    length = _length(0, first, max_new_tokens, max_length)
    if model.agree is not None:
        raise ValueError("speculation runs in one process: this model is shared among several")
    if isinstance(draft, Decoder):
        draft = DraftModel(draft)
    if isinstance(draft, type) or not hasattr(draft, "start"):
        raise ValueError(f"draft must be a Draft or a Decoder, not {draft!r}")
    state = model.new_state(1, length)
    propose = draft.start(model, length)
    device = model.embed.weight.device
    [generator] = _generators(seed, 1, device)

    def probabilities(logits: Tensor) -> Tensor:
        return distribution(logits, temperature, top_k, top_p)

    def choose(logits: Tensor) -> Guess:
        q = probabilities(logits)[0]
        return Guess(int(torch.multinomial(q, 1, generator=generator)), q)

    hidden: Tensor | None = None
    rounds: list[Round] = []
    while (left := first + max_new_tokens - len(tokens)) > 0:
        wanted = min(num_draft, left - 1)  # the pass itself gives one more
        caught_up = len(tokens) - state.length <= num_draft + 1  # a recurrent state may have fallen behind
        guesses: list[Guess] = []
        if wanted and caught_up and hidden is not None:  # there are hidden states after the prompt's pass
            guesses = propose(tokens, wanted, choose, hidden)[:wanted]
        proposed = [guess.token for guess in guesses]
        mark = state.mark()
        pushed = torch.tensor([tokens[state.length :] + proposed], device=device)
        hidden = model.norm(model(pushed, state, logits="none"))  # (1, t, M)
        p = probabilities(model.head(hidden[0, -1 - len(guesses) :]))  # (n + 1, V)
        q = torch.stack([guess.q for guess in guesses]) if guesses else p[:0]
        accepted, follows = verify(p, q, proposed, generator)
        rounds.append(Round(len(guesses), accepted))
        if rejected := len(guesses) - accepted:
            state.rewind(mark, length=state.length - rejected)
            hidden = hidden[:, :-rejected]
        for token in (*proposed[:accepted], follows):
            tokens.append(token)
            if token in eos_ids:
                return Speculation(tokens[first:], rounds)
    return Speculation(tokens[first:], rounds)


# --- python -m tokenbytoken.run.generation ------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tokenbytoken.run.generation",
        description="Stream text from a model, then say how fast it was and how near to this machine's limit.",
    )
    parser.add_argument("--prompt", required=True, help="the text to continue, or with --chat the user's message")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="stop after so many tokens (default 64)")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's own chat template")
    parser.add_argument("--source", default="smollm2-135m", help="smollm2-135m, a directory, or a .gguf file")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    parser.add_argument("--top-k", type=int, help="draw from the K likeliest tokens only")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens that reach P")
    parser.add_argument("--seed", type=int, help="make sampling repeatable")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--tensor-parallel", action="store_true", help="share the model among the ranks of torchrun")
    return parser


def _pieces(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Text as it becomes certain: a character whose bytes are spread over tokens waits for its last one."""
    from tokenizers.decoders import DecodeStream

    decoder = DecodeStream(skip_special_tokens=True)
    ids, shown = [], 0
    for token in tokens:
        ids.append(token)
        piece = decoder.step(tokenizer.backend, token) or ""
        shown += len(piece)
        yield piece
    yield tokenizer.decode(ids, skip_special=True)[shown:]


def _bandwidth(model: Decoder) -> float:
    """Bytes per second at which this machine reads one large matrix of the model's dtype."""
    from ..measure import timed

    weight = torch.ones(40_000, 640, dtype=model.embed.weight.dtype, device=model.embed.weight.device)
    x = weight[:1].clone()
    return weight.numel() * weight.element_size() / timed(lambda: F.linear(x, weight), device=weight.device).median


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 2 with one line on stderr for bad input."""
    options = _parser().parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    if not options.tensor_parallel:
        return _run(options, lambda: load(options.source, dtype, options.device))
    from .parallel import RankLost, load_parallel, ranks

    try:
        with ranks(options.device) as group:
            return _run(options, lambda: load_parallel(options.source, group, dtype, options.device), group)
    except (ValueError, RankLost) as error:
        print(error, file=sys.stderr, flush=True)
        return 2 if isinstance(error, ValueError) else 1


def _run(options: argparse.Namespace, load_model: Callable[[], Decoder], group: Any = None) -> int:
    """Load, generate, and print what was generated: under tensor parallelism on rank 0 alone."""
    prepared, error = None, None
    try:
        prepared = _prepare(options, load_model)
    except ValueError as refusal:
        error = str(refusal)
    if group is not None:
        from .parallel import settled

        error = settled(group, error)
    if error is not None or prepared is None:
        if group is None or group.rank() == 0:
            print(error, file=sys.stderr, flush=True)
        if group is not None:
            group.barrier().wait()  # torchrun ends everybody when one ends, so nobody does before that is printed
        return 2
    model, tokenizer, prompt, state, tokens = prepared
    if group is not None and group.rank() > 0:
        for _ in tokens:
            pass
        return 0
    times = [perf_counter()]

    def clocked() -> Iterator[int]:
        for token in tokens:
            times.append(perf_counter())
            yield token

    if not options.chat:
        print(options.prompt, end="", flush=True)
    for piece in _pieces(tokenizer, clocked()):
        print(piece, end="", flush=True)
    print(flush=True)
    _report(model, state, prompt, times)
    return 0


def _prepare(
    options: argparse.Namespace, load_model: Callable[[], Decoder]
) -> tuple[Decoder, Tokenizer, int, DecoderState, Iterator[int]]:
    """(model, tokenizer, length of the prompt, state, tokens to come). Raises ValueError for bad input."""
    prompt = options.prompt
    if not prompt:
        raise ValueError("the prompt is empty: it needs at least one token")
    model = load_model()
    tokenizer = load_tokenizer(options.source)
    if options.chat:
        prompt = tokenizer.chat([{"role": "user", "content": prompt}])
    ids = tokenizer.encode(prompt)
    state = model.new_state(1, len(ids) + max(options.max_new_tokens, 1))
    tokens = stream(
        model, ids, options.max_new_tokens, temperature=options.temperature, top_k=options.top_k,
        top_p=options.top_p, seed=options.seed, eos_ids=tokenizer.eos_ids, state=state,
    )  # fmt: skip
    return model, tokenizer, len(ids), state, tokens


def _report(model: Decoder, state: DecoderState, prompt: int, times: list[float]) -> None:
    new = len(times) - 1
    line = f"{new} tokens"
    if new:
        line += f", the first after {times[1] - times[0]:.2f} s"
    if new > 1 and model.agree is not None:
        line += f", then {(new - 1) / (times[-1] - times[1]):.1f} tokens/s; {state.nbytes_used:,} state bytes on rank 0"
    elif new > 1:
        size = model.embed.weight.element_size()
        recipe = "fp32" if size == 4 else "bf16"
        seconds = times[-1] - times[1]
        moved = sum(
            pass_cost(model.config, 1, held, recipe=recipe, state_bytes_per_element=size).bytes
            for held in range(prompt, state.length)
        )
        limit = _bandwidth(model)
        line += f", then {(new - 1) / seconds:.1f} tokens/s; {state.nbytes_used:,} state bytes used; "
        line += f"{moved / seconds / 1e9:.1f} of {limit / 1e9:.1f} GB/s, "
        line += f"{100 * moved / seconds / limit:.0f} % of the machine's measured bandwidth"
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
