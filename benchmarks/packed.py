"""SmolLM2 from packed weights beside float32, and beside llama.cpp on the same file and as many threads.

A lone reader. llama.cpp tells its own times, of all tokens it wrote and of the whole prompt, so this package's are
taken over the same stretch. Medians of interleaved rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch

import tokenbytoken as tbt
from benchmarks.lines import Line
from tokenbytoken.checkpoints.packed import Weights

__all__ = ["lines"]

SOURCE, HELD, NEW, PROMPT, ROUNDS = "smollm2-135m", 16, 24, 512, 9
FORMS: dict[str, Weights] = {"packed 4 bits": "packed", "8 bits": "int8", "float32": "float"}

#: A call that says its own seconds.
Clocked = Callable[[], float]


def lines(where: torch.device) -> Iterator[Line]:
    """Decode and prefill; nothing where the kernels are not (they are a CPU's)."""
    if where.type != "cpu":
        return
    models = {name: tbt.load(SOURCE, weights=weights) for name, weights in FORMS.items()}
    theirs = llama_cpp()
    decode: dict[str, Clocked] = {name: decoding(model) for name, model in models.items()}
    prefill: dict[str, Clocked] = {name: reading(models[name]) for name in ("packed 4 bits", "float32")}
    if theirs is not None:
        decode["llama.cpp"] = lambda: theirs(HELD, NEW)[1]
        prefill["llama.cpp"] = lambda: theirs(PROMPT, 1)[0]
    for work, ways in (("decode, 1 sequence of 16", decode), (f"prefill of {PROMPT}", prefill)):
        seconds = rounds(ways)
        yield Line("SmolLM2", work, seconds)
        if "8 bits" in seconds:
            yield Line("SmolLM2", work, {name: seconds[name] for name in seconds if name != "packed 4 bits"})


def rounds(ways: dict[str, Clocked]) -> dict[str, float]:
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            seconds[name].append(way())
    return {name: median(times) for name, times in seconds.items()}


def decoding(model: tbt.Decoder) -> Clocked:
    """A call that decodes ``NEW`` tokens after ``HELD``: seconds a token."""
    tokens = torch.arange(1000, 1000 + HELD)[None]
    state = model.new_state(1, HELD + NEW)
    model(tokens, state, logits="none")
    mark = state.mark()

    def run() -> float:
        state.rewind(mark)
        token = tokens[:, :1]
        start = perf_counter()
        for _ in range(NEW):
            token = model(token, state, logits="last", checked=True)[:, -1].argmax(-1, keepdim=True)
        return (perf_counter() - start) / NEW

    return run


def reading(model: tbt.Decoder) -> Clocked:
    """A call that reads ``PROMPT`` tokens and gives one row of logits: seconds."""
    tokens = torch.arange(1000, 1000 + PROMPT)[None]

    def run() -> float:
        state = model.new_state(1, PROMPT)
        start = perf_counter()
        model(tokens, state, logits="last")
        return perf_counter() - start

    return run


def llama_cpp() -> Callable[[int, int], tuple[float, float]] | None:
    """A call (prompt, new) → (seconds of the prompt, seconds a new token); None where its wheel is not installed."""
    try:
        import xllamacpp
    except ImportError:
        return None
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(tbt.checkpoints.find(SOURCE))
    parameters.n_ctx, parameters.n_parallel = 2 * PROMPT, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = torch.get_num_threads()
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)

    def run(prompt: int, new: int) -> tuple[float, float]:
        asked: dict[str, Any] = {"prompt": list(range(1000, 1000 + prompt)), "n_predict": new, "temperature": 0,
                                 "ignore_eos": True, "cache_prompt": False}  # fmt: skip
        answer: Any = server.handle_completions(asked)
        answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
        timings = answer["timings"]
        if timings["prompt_n"] != prompt:
            raise RuntimeError(f"llama.cpp read {timings['prompt_n']} tokens of {prompt}: the times cannot be compared")
        return float(timings["prompt_ms"]) / 1e3, float(timings["predicted_per_token_ms"]) / 1e3

    return run
