"""From logits to text: sampling, generation, streaming; and ``python -m tokenbytoken.generate``.

The loop that all of it shares: the state holds every token but the newest; the newest is pushed through the
model, the logits of its position choose the next.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import index
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._numbers import not_negative, whole
from .arithmetic import pass_cost
from .checkpoint import Tokenizer, load, load_tokenizer
from .decoder import Decoder, DecoderState

__all__ = ["generate", "sample", "stream"]


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
    if temperature < torch.finfo(torch.float32).tiny or top_p == 0 or top_k == 1:
        return _argmax(logits)
    _check_logits(logits)
    logits = logits.to(torch.float32 if logits.dtype != torch.float64 else torch.float64)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # shifted first: the largest stays 0, not inf
    # A stable sort keeps the lowest index first among equals, so that cuts at a tie agree with greedy choice.
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        sorted_logits[:, top_k:] = -torch.inf
    probabilities = sorted_logits.softmax(-1)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # mass of all likelier tokens
        beyond = before >= top_p
        beyond[:, 0] = False  # the likeliest token stays, however small top_p is
        probabilities = probabilities.masked_fill(beyond, 0)
    choice = torch.multinomial(probabilities, 1, generator=generator)
    return order.gather(-1, choice).squeeze(-1)


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
        return [index(token) for token in (tokens.tolist() if hasattr(tokens, "tolist") else tokens)]
    except TypeError:
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
    # The last token chosen is never pushed through the model, but it is part of the sequence that must fit.
    needed = held + longest + max_new_tokens
    limits = [limit for limit in (max_length, None if state is None else state.max_length) if limit is not None]
    if needed > min(limits, default=needed):
        raise ValueError(
            f"{held} held + {longest} of the prompt + {max_new_tokens} new tokens = {needed} "
            f"exceed max_length {min(limits)}"
        )
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


# --- python -m tokenbytoken.generate ------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tokenbytoken.generate",
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
    from .measure import timed

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
