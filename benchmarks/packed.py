"""SmolLM2's decode step from packed weights beside float32, and beside llama.cpp on the same file where there is one.

    python -m benchmarks.packed          about a minute; pip install --no-deps xllamacpp adds llama.cpp to it

A lone reader, in rounds that run each of them once. Of each the fastest round counts: what disturbs a machine only ever
adds. Ratios can be compared between machines, and only while nothing else runs there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

import tokenbytoken as tbt
from tokenbytoken.checkpoints.packed import Weights
from tokenbytoken.measure import busy, machine

SOURCE, HELD, NEW, ROUNDS = "smollm2-135m", 16, 24, 9
FORMS: dict[str, Weights] = {"float32": "float", "8 bits": "int8", "packed 4 bits": "packed"}


def decoding(model: tbt.Decoder) -> Callable[[], float]:
    """A call that decodes after ``HELD`` tokens and says the seconds of the fastest step."""
    tokens = torch.arange(1000, 1000 + HELD)[None]
    state = model.new_state(1, HELD + NEW)
    model(tokens, state, logits="none")
    mark = state.mark()

    def run() -> float:
        state.rewind(mark)
        token, fastest = tokens[:, :1], float("inf")
        for _ in range(NEW):
            start = perf_counter()
            token = model(token, state, logits="last", checked=True)[:, -1].argmax(-1, keepdim=True)
            fastest = min(fastest, perf_counter() - start)
        return fastest

    return run


def llama_cpp() -> Callable[[], float] | None:
    """The same of llama.cpp, on as many threads; None where its wheel is not installed. It tells means, not minima."""
    try:
        import xllamacpp
    except ImportError:
        return None
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(tbt.checkpoints.find(SOURCE))
    parameters.n_ctx, parameters.n_parallel = 256, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = torch.get_num_threads()
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)

    def run() -> float:
        asked: dict[str, Any] = {"prompt": list(range(1000, 1000 + HELD)), "n_predict": NEW, "temperature": 0,
                                 "ignore_eos": True, "cache_prompt": False}  # fmt: skip
        answer: Any = server.handle_completions(asked)
        answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
        return float(answer["timings"]["predicted_per_token_ms"]) / 1e3

    return run


@torch.inference_mode()
def main() -> int:
    print(machine())
    if disturbed := busy():
        print(disturbed)
    ways: dict[str, Callable[[], float]] = {
        name: decoding(tbt.load(SOURCE, weights=weights)) for name, weights in FORMS.items()
    }
    if (other := llama_cpp()) is not None:
        ways["llama.cpp"] = other
    seconds = {name: float("inf") for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            seconds[name] = min(seconds[name], way())
    print(f"\n{'decode, 1 sequence':20}{'a token':>12}{'× float32':>12}{'× llama.cpp':>14}")
    for name, own in seconds.items():
        against = f"{seconds['llama.cpp'] / own:14.2f}" if "llama.cpp" in seconds else ""
        print(f"{name:20}{1e3 * own:9.1f} ms{seconds['float32'] / own:12.2f}{against}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
