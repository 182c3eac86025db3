"""``python -m tokenbytoken size MODEL --gpu NAME``: does it fit, and how fast can it be at best?

Needs no torch. MODEL is the name of a published model, or a path to a Hugging Face ``config.json`` (or to
the folder that holds it).
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from .._numbers import whole
from .._paths import read_json
from ..config import DecoderConfig
from ..cost import (
    Placement,
    Prediction,
    WorkingMemory,
    accelerators,
    count_parameters,
    find_accelerator,
    footprint_per_gpu,
    predict,
    recipes,
    state_bytes,
    state_bytes_per_token,
    weight_bytes,
    working_memory_per_gpu,
)
from ..models import AttentionShape, published
from ..world import Kind, reached, rows_of, typical

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "size"
HELP = "does a model fit, and how fast can it be at best"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "Does a model fit, and how fast can it be? Times are the roofline plus messages between GPUs."
    parser.epilog = f"models: {', '.join(published)}. GPUs: {', '.join(accelerators)}."
    parser.add_argument("model", metavar="MODEL", help="a published model, or a path to a Hugging Face config.json")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="accelerator, by name")
    parser.add_argument("--gpus", type=int, default=1, help="how many of them (default 1)")
    parser.add_argument("--tensor-parallel", type=int, metavar="T", help="GPUs that share each layer (default: all)")
    parser.add_argument("--recipe", default="bf16", help=f"how weights are stored: {', '.join(recipes)} (default bf16)")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each sequence (default 8192)")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once (default 1)")
    parser.add_argument("--state-bytes", type=float, default=2, metavar="B", help="bytes of a cached number (2)")
    parser.add_argument("--cache", default="heads", help="who keeps what: heads (default), readers or sequence")
    parser.add_argument("--experts", default="split", help="split (default), or whole: expert parallelism")
    parser.add_argument("--busiest", type=float, default=1.0, help="load of the busiest GPU's experts ÷ the mean (1)")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prompt in one pass, for working memory")
    parser.add_argument("--usable", type=float, default=1.0, help="share of memory for weights and state (default 1)")
    parser.add_argument("--efficiency", type=float, default=1.0, help="share of the peak rates reached (default 1)")


def _config(model: str) -> DecoderConfig:
    if model in published:
        found = published[model]
        if isinstance(found, AttentionShape):
            raise ValueError(f"{model} is known by the shape of its attention only: its parameters cannot be counted")
        return found
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"unknown model {model!r}: no such file, and none of {', '.join(published)}")
    fields = read_json(path)
    return DecoderConfig.from_hf(fields, name=str(fields.get("_name_or_path") or path.resolve().parent.name))


def _bytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB ({count / 2**30:,.2f} GiB)"


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.2f} ms" if seconds >= 1e-5 else "0 ms"


def _pass(prediction: Prediction) -> str:
    terms = ", ".join(
        f"{name} {_time(seconds)}"
        for name, seconds in (
            ("memory", prediction.memory_seconds),
            ("compute", prediction.compute_seconds),
            ("messages", prediction.communication_seconds),
        )
        if seconds
    )
    return f"{_time(prediction.seconds)}, bound by {prediction.binds} ({terms})"


def _working(working: WorkingMemory) -> str:
    parts = {"kept free": working.reserved, "graphs": working.graphs, "activations": working.activations}
    return ", ".join(f"{name} {size / 1e9:,.2f} GB" for name, size in parts.items())


def _others(kind: Kind) -> str:
    (least, most), (low, high) = reached(kind), typical(kind)
    rows = f"{len(rows_of(kind))} published rows ({kind})"
    return f"{rows} took {least:g} to {most:g} times their floors, half of them {low:g} to {high:g}"


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Raises ValueError for bad input."""
    print(_report(arguments))
    return 0


def _report(arguments: argparse.Namespace) -> str:
    """One fact a line, each with its unit."""
    config, gpu = _config(arguments.model), find_accelerator(arguments.gpu)
    gpus, batch, context = arguments.gpus, arguments.batch, arguments.context
    placement = {
        "gpus": gpus,
        "tensor_parallel": arguments.tensor_parallel,
        "recipe": arguments.recipe,
        "state_bytes_per_element": arguments.state_bytes,
        "cache": arguments.cache,
        "experts": arguments.experts,
    }
    options = placement | {
        "efficiency": arguments.efficiency,
        "usable": arguments.usable,
        "busiest": arguments.busiest,
    }
    context = whole("context", context)
    step = predict(config, gpu, batch, context - 1, **options)  # the step that fills the last of the context
    prompt = predict(config, gpu, batch, 0, new_tokens=context, causal=True, **options)

    counted = count_parameters(config)
    parameters = f"{counted.total:,}"
    if counted.active != counted.total:
        parameters += f", of which one token uses {counted.active:,}"
    per_gpu = footprint_per_gpu(config, **placement)
    memory = arguments.usable * gpu.memory_bytes
    longest = per_gpu.max_context(memory, batch)
    state = state_bytes(config, batch, context, arguments.state_bytes)
    room = (
        f"{per_gpu.max_batch(memory, context):,} sequences of {context:,} tokens, or {batch:,} of "
        f"{'any length' if longest == math.inf else f'{longest:,} tokens'}"
    )
    working = working_memory_per_gpu(config, gpu, Placement(**placement), min(arguments.chunk, context))
    served = per_gpu.max_batch(max(0, gpu.memory_bytes - working.bytes), context)
    if per_gpu.weights > memory:
        room = f"0 sequences: the weights alone need {_bytes(gpus * per_gpu.weights)}"
    share = "" if arguments.usable == 1 else f", {arguments.usable:.0%} of it usable"
    many = gpus > gpu.gpus_per_node
    lines = [
        ("model", f"{config.name or arguments.model}, {config.num_layers} layers, weights as {arguments.recipe}"),
        ("on", f"{gpus} × {gpu.name}, {_bytes(gpu.memory_bytes)} each by the data sheet{share}"),
        ("parameters", parameters),
        ("weights", _bytes(weight_bytes(config, arguments.recipe))),
        ("state per token", f"{state_bytes_per_token(config, arguments.state_bytes):,} B"),
        ("state", f"{_bytes(state)} for {batch:,} × {context:,} tokens"),
        ("fits", f"{'yes' if step.fits else 'no'}: {_bytes(step.bytes_needed)} of {_bytes(step.bytes_available)}"),
        ("room for", f"{room}, weights and state alone"),
        ("", f"{served:,} sequences with working memory, {_bytes(working.bytes)} a GPU: {_working(working)}"),
        ("decode step", _pass(step)),
        ("", f"{step.tokens_per_second:,.1f} tokens/s over the batch, {step.cost.intensity:,.1f} FLOP/B"),
        ("", _others("many nodes" if many else "lone decode" if batch == 1 else "batch decode")),
        ("prefill", _pass(prompt)),
        ("", _others("prompt on many nodes" if many else "prompt")),
        ("", "both are floors: data-sheet rates plus messages, attention without masked pairs"),
    ]
    if config.max_positions is not None and context > config.max_positions:
        lines.append(("note", f"the publisher states at most {config.max_positions:,} positions"))
    if not step.fits:
        lines.append(("note", "the times are those of hardware on which it would fit"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}   {text}" for name, text in lines)
