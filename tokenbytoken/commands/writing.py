"""``python -m tokenbytoken generate --prompt TEXT``: text as it comes, then how fast it came.

Under torchrun, with ``--tensor-parallel``, the ranks share the model and rank 0 prints.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..checkpoints import Tokenizer
    from ..checkpoints.packed import Weights
    from ..decoder import Decoder, DecoderState

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "generate"
EMPTY = "the prompt is empty: it needs at least one token"
HELP = "stream text from a model, then say how fast it was and how near to this machine's limit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("--prompt", required=True, help="the text to continue, or with --chat the user's message")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="stop after so many tokens (default 64)")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's own chat template")
    parser.add_argument("--source", default="smollm2-135m", help="smollm2-135m, a directory, or a .gguf file")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    parser.add_argument("--top-k", type=int, help="draw from the K likeliest tokens only")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens that reach P")
    parser.add_argument("--seed", type=int, help="make sampling repeatable")
    parser.add_argument(
        "--weights", choices=("auto", "packed", "float32"), default="auto",
        help="packed multiplies from the file's four bits, float32 expands them (to --dtype); auto (the default) "
        "takes packed on a CPU where that is faster",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--tensor-parallel", action="store_true", help="share the model among the ranks of torchrun")


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without garbage collection, which finds nothing while libraries are imported and takes a quarter of that time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def run(arguments: argparse.Namespace) -> int:
    """Generate and print. Raises ValueError for bad input; under torchrun rank 0 prints it, and all ranks return 2."""
    if not arguments.tensor_parallel:
        if not arguments.prompt:
            raise ValueError(EMPTY)
        with _nothing_collected():
            import torch  # here, so that the commands that need no torch start without

            from ..checkpoints import load

            dtype = getattr(torch, arguments.dtype)
            weights, why = _weights(arguments)
            text = _prepared(arguments, lambda: load(arguments.source, dtype, arguments.device, weights=weights))
        _write(arguments, text, f"; weights {arguments.dtype if weights == 'float' else weights}{why}")
        return 0
    if arguments.weights == "packed":
        raise ValueError("packed weights are not shared among ranks: leave out --weights packed or --tensor-parallel")
    import torch

    dtype = getattr(torch, arguments.dtype)
    from ..run.parallel import RankLost, load_parallel, ranks

    try:
        with ranks(arguments.device) as group:
            return _on_rank(group, arguments, lambda: load_parallel(arguments.source, group, dtype, arguments.device))
    except RankLost as error:
        _complain(error)
        return 1


def _weights(arguments: argparse.Namespace) -> tuple[Weights, str]:
    """How the weights are to be held, and why if that was found out here."""
    from ..checkpoints import stores_four_bits

    if arguments.weights != "auto":
        return ("packed" if arguments.weights == "packed" else "float"), ""
    if arguments.device != "cpu" or arguments.dtype != "float32" or not stores_four_bits(arguments.source):
        return "float", ""
    gain = _gain()
    return ("packed" if gain > 1 else "float"), f" (a packed product takes 1/{gain:.1f} of float32's time here)"


def _gain() -> float:
    """How many times as fast as float32's this machine's product from four bits is: one row, a matrix of 38 MB.

    That is more than most caches hold, as a model is: else float32 would be timed without what makes it slow. 0 where
    there is no such product.
    """
    import torch
    import torch.nn.functional as F

    from ..checkpoints.packed import FourBitLinear, has_kernel
    from ..checkpoints.tensors import Blocks
    from ..measure import timed

    rows, columns = 16384, 576
    if not has_kernel(4, (rows, columns), torch.device("cpu")):
        return 0.0
    ones = torch.ones(rows, columns // 32)
    packed = FourBitLinear(Blocks(torch.ones(rows, columns, dtype=torch.uint8), ones, ones))
    weight, x = torch.ones(rows, columns), torch.ones(1, columns)
    with torch.inference_mode():
        ways = {"packed": lambda: packed(x), "float32": lambda: F.linear(x, weight)}
        seconds = {name: timed(way, repeats=5, warmup=1, device="cpu").low for name, way in ways.items()}
    return seconds["float32"] / seconds["packed"]


class _Text(NamedTuple):
    """A text about to be written."""

    model: Decoder
    tokenizer: Tokenizer
    prompt: int  # tokens
    state: DecoderState
    tokens: Iterator[int]  # the new ones, to come


def _prepared(arguments: argparse.Namespace, load_model: Callable[[], Decoder]) -> _Text:
    """Everything but the computing. Raises ValueError for bad input."""
    from ..checkpoints import load_tokenizer
    from ..run import stream

    prompt = arguments.prompt
    if not prompt:
        raise ValueError(EMPTY)
    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(load_tokenizer, arguments.source)  # Python's work, while the model is torch's
        model = load_model()
        tokenizer = reading.result()
    if arguments.chat:
        prompt = tokenizer.chat([{"role": "user", "content": prompt}])
    ids = tokenizer.encode(prompt)
    state = model.new_state(1, len(ids) + max(arguments.max_new_tokens, 1))
    tokens = stream(
        model, ids, arguments.max_new_tokens, temperature=arguments.temperature, top_k=arguments.top_k,
        top_p=arguments.top_p, seed=arguments.seed, eos_ids=tokenizer.eos_ids, state=state,
    )  # fmt: skip
    return _Text(model, tokenizer, len(ids), state, tokens)


def _on_rank(group: ProcessGroup, arguments: argparse.Namespace, load_model: Callable[[], Decoder]) -> int:
    """The part of one rank of several: all compute, rank 0 prints."""
    from ..run.parallel import settled

    text, error = None, None
    try:
        text = _prepared(arguments, load_model)
    except ValueError as refusal:
        error = str(refusal)
    error = settled(group, error)
    if error is not None or text is None:
        if group.rank() == 0:
            _complain(error)
        group.barrier().wait()  # torchrun ends everybody when one ends, so nobody does before that is printed
        return 2
    if group.rank() == 0:
        _write(arguments, text)
    else:
        for _ in text.tokens:
            pass
    return 0


def _complain(error: object) -> None:
    print(f"tokenbytoken {NAME}: {error}", file=sys.stderr, flush=True)


def _write(arguments: argparse.Namespace, text: _Text, weights: str = "") -> None:
    """Print the text while it comes, then the report, which ends with what is to be said of the weights."""
    times = [perf_counter()]

    def clocked() -> Iterator[int]:
        for token in text.tokens:
            times.append(perf_counter())
            yield token

    if not arguments.chat:
        print(arguments.prompt, end="", flush=True)
    for piece in _pieces(text.tokenizer, clocked()):
        print(piece, end="", flush=True)
    print(flush=True)
    print(f"{_report(text, times)}{weights}", file=sys.stderr)


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


def _report(text: _Text, times: list[float]) -> str:
    """How fast it was: ``times`` are those of the start and of each token."""
    from ..checkpoints.packed import is_packed
    from ..cost import pass_cost

    new, model, state = len(times) - 1, text.model, text.state
    line = f"{new} tokens"
    if not new:
        return line
    line += f", the first after {times[1] - times[0]:.2f} s"
    if new == 1:
        return line
    seconds = times[-1] - times[1]
    line += f", then {(new - 1) / seconds:.1f} tokens/s; {state.nbytes_used:,} state bytes "
    if model.agree is not None:
        return line + "on rank 0"
    size = model.dtype.itemsize
    recipe = "packed" if is_packed(model) else "fp32" if size == 4 else "bf16"
    moved = sum(
        pass_cost(model.config, 1, held, recipe=recipe, state_bytes_per_element=size).bytes
        for held in range(text.prompt, state.length)
    )
    limit = _bandwidth(model)
    line += f"used; {moved / seconds / 1e9:.1f} of {limit / 1e9:.1f} GB/s, "
    return line + f"{100 * moved / seconds / limit:.0f} % of the machine's measured bandwidth"


def _bandwidth(model: Decoder) -> float:
    """Bytes per second at which this machine reads one large matrix of the model's dtype."""
    import torch
    import torch.nn.functional as F

    from ..measure import timed

    weight = torch.ones(40_000, 640, dtype=model.dtype, device=model.device)
    x = weight[:1].clone()
    return weight.numel() * weight.element_size() / timed(lambda: F.linear(x, weight), device=weight.device).median
