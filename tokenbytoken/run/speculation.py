"""Speculation: several tokens from one pass of the model, and the text that plain generation would have written.

Guesses of what will follow are pushed along with the newest token, so that one pass, which reads the weights once, may
settle several tokens (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .._numbers import whole
from ..decoder import Decoder
from .generation import check_prompts, check_tokens, generators_of, sequence_length, token_ids
from .sampling import Sampling, draw, read_tokens

__all__ = [
    "Choose",
    "Draft",
    "DraftModel",
    "Guess",
    "PromptLookup",
    "Propose",
    "Round",
    "Speculation",
    "accepts",
    "first_layers",
    "residual",
    "speculate",
    "verify",
]


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
    proposed = token_ids(proposed, "proposed")
    n, V = len(proposed), p.shape[-1]
    if p.shape != (n + 1, V) or q.shape != (n, V):
        raise ValueError(f"{n} proposed tokens need p ({n + 1}, V) and q ({n}, V): {tuple(p.shape)}, {tuple(q.shape)}")
    if not all(0 <= token < V for token in proposed):
        raise ValueError(f"proposed tokens {proposed} must lie within the vocabulary of {V}")
    tokens = torch.tensor(proposed, dtype=torch.int64, device=p.device)
    stand = accepts(p[:-1], q, tokens, generator).long().cumprod(0).sum()
    # What would follow, whoever is the first to fall: which of them it is need not be known here to draw from it.
    follows = torch.cat((residual(p[:-1], q), p[-1:])).index_select(0, stand.view(1))
    accepted, token = read_tokens(torch.cat((stand.view(1), draw(follows, (generator,)))))
    return accepted, token


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
        vocab_size, device = model.config.vocab_size, model.device

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
            pushed = torch.tensor([tokens], device=self.model.device)
            return self.model(pushed, state, logits="last", checked=True)[:, -1]  # (1, V)

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
    tokens = token_ids(prompt, "the prompt")
    check_prompts(model, [tokens])
    sampling = Sampling(temperature, top_k, top_p)
    ends = set(token_ids(eos_ids, "eos_ids"))
    max_new_tokens, num_draft = whole("max_new_tokens", max_new_tokens, 0), whole("num_draft", num_draft)
    max_length = None if max_length is None else whole("max_length", max_length)
    seed = None if seed is None else whole("seed", seed, -(2**63))
    first = len(tokens)
    length = sequence_length(0, first, max_new_tokens, max_length)
    if model.agree is not None:
        raise ValueError("speculation runs in one process: this model is shared among several")
    if isinstance(draft, Decoder):
        draft = DraftModel(draft)
    if isinstance(draft, type) or not hasattr(draft, "start"):
        raise ValueError(f"draft must be a Draft or a Decoder, not {draft!r}")
    state = model.new_state(1, length)
    propose = draft.start(model, length)
    device = model.device
    [generator] = generators_of(seed, 1, device)

    def choose(logits: Tensor) -> Guess:
        q = sampling.distribution(logits)
        [token] = read_tokens(draw(q, (generator,)))
        return Guess(token, q[0])

    hidden: Tensor | None = None
    rounds: list[Round] = []
    while (left := first + max_new_tokens - len(tokens)) > 0:
        wanted = min(num_draft, left - 1)  # the pass itself gives one more
        caught_up = len(tokens) - state.length <= num_draft + 1  # a recurrent state may have fallen behind
        guesses: list[Guess] = []
        if wanted and caught_up and hidden is not None:  # there are hidden states after the prompt's pass
            guesses = propose(tokens, wanted, choose, hidden)[:wanted]
        proposed = [guess.token for guess in guesses]
        check_tokens(model, proposed)
        mark = state.mark()
        pushed = torch.tensor([tokens[state.length :] + proposed], device=device)
        hidden = model.norm(model(pushed, state, logits="none", checked=True))  # (1, t, M)
        p = sampling.distribution(model.head(hidden[0, -1 - len(guesses) :]))  # (n + 1, V)
        q = torch.stack([guess.q for guess in guesses]) if guesses else p[:0]
        accepted, follows = verify(p, q, proposed, generator)
        rounds.append(Round(len(guesses), accepted))
        if rejected := len(guesses) - accepted:
            state.rewind(mark, length=state.length - rejected)
            hidden = hidden[:, :-rejected]
        for token in (*proposed[:accepted], follows):
            tokens.append(token)
            if token in ends:
                return Speculation(tokens[first:], rounds)
    return Speculation(tokens[first:], rounds)
