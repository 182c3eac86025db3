"""Published measurements of other people's systems, as data: what was measured, where, by whom.

A row says which pass, message or memory it measured, in the terms of :func:`tokenbytoken.cost.predict`, so that
:mod:`tokenbytoken.world.floors` can recompute its floor. Rows that cannot be computed are left out: servers that do not
say how many requests ran at once, and speculation, which writes several tokens in one pass.

>>> next(row.what for row in measurements if row.id == "P06")
'Llama 3.1 405B, int8, gpt-fast'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, get_args

from ..config import DecoderConfig
from ..cost import Accelerator, CacheLayout, ExpertLayout, Link, accelerators
from ..cost.messages import Algorithm
from ..models import published

__all__ = [
    "KINDS",
    "MISSED",
    "Kind",
    "Measurement",
    "Message",
    "Rate",
    "Read",
    "Reason",
    "Room",
    "Stored",
    "Timed",
    "measurements",
]  # fmt: skip

Kind = Literal[
    "lone decode", "batch decode", "prompt", "many nodes", "prompt on many nodes", "small computers", "messages",
    "memory", "stored", "peaks",
]  # fmt: skip

#: What is measured: a decode step of one request, or of many, or a whole prompt, on one node; the same on several
#: nodes; one request on a single card or a desktop computer; a message; bytes left for states; bytes of what is
#: stored; the rates of a data sheet.
KINDS: tuple[Kind, ...] = get_args(Kind)

Read = Literal["primary", "excerpt", "second-hand", "figure"]


@dataclass(frozen=True)
class Measurement:
    """One published figure.

    ``id``: the series it belongs to. ``read``: whether the publisher's own text was read ("primary"), an excerpt of
    it, another's account of it, or a value off a figure. ``sets``: the constant of the model of time that was taken
    from this row, which therefore confirms nothing. ``aside``: why the row stands in no range although it is computed.
    """

    id: str
    kind: Kind
    what: str
    _: KW_ONLY
    source: str
    read: Read = "primary"
    note: str = ""
    sets: str = ""
    aside: str = ""


@dataclass(frozen=True, kw_only=True)
class _Placed(Measurement):
    """A model on GPUs, in the terms of :class:`tokenbytoken.cost.Placement`."""

    model: str | DecoderConfig
    accelerator: str | Accelerator
    gpus: int = 1
    tensor_parallel: int | None = None
    recipe: str = "bf16"
    state_bytes_per_element: float = 2
    cache: CacheLayout = "heads"
    experts: ExpertLayout = "split"

    @property
    def config(self) -> DecoderConfig:
        return published[self.model] if isinstance(self.model, str) else self.model


@dataclass(frozen=True, kw_only=True)
class Timed(_Placed):
    """Seconds of a pass of ``new_tokens`` tokens of each of ``batch_size`` requests, which saw ``context`` before.

    ``weight_sizes``: bytes a number of the weights, by role ("" for all others), where no recipe of the package
    stores them so. ``own_messages``: the system sends other messages than the package knows of, and the floor leaves
    them out. ``launched``: how its operations are started, where that is known.
    """

    seconds: float
    batch_size: int = 1
    context: int = 0
    new_tokens: int = 1
    weight_sizes: Mapping[str, float] | None = None
    own_messages: bool = False
    launched: Literal["graphed", "eager"] | None = None


@dataclass(frozen=True, kw_only=True)
class Message(Measurement):
    """Seconds of a collective of ``size`` bytes that each of ``gpus`` brings."""

    accelerator: str | Accelerator
    gpus: int
    size: float
    seconds: float
    collective: Literal["all-reduce", "all-to-all"] = "all-reduce"
    algorithm: Algorithm = "fastest"


@dataclass(frozen=True, kw_only=True)
class Room(_Placed):
    """Memory that was left for the states of readers.

    ``tokens``: so many were seen to fit, in all GPUs together, and ``too_many`` were not; or ``bytes`` of each GPU, as
    the server said. ``tokens_a_pass``: those of the largest pass, or None for the whole of one prompt of that length.
    """

    tokens: int | None = None
    too_many: int | None = None
    bytes: float | None = None
    tokens_a_pass: int | None = 8192


@dataclass(frozen=True, kw_only=True)
class Stored(_Placed):
    """Bytes of the weights on each GPU; with a ``context``, those of the state of one reader instead."""

    bytes: float
    context: int = 0


@dataclass(frozen=True, kw_only=True)
class Rate(Measurement):
    """Bytes, or with a ``dtype`` FLOPs, of the best run that was found."""

    accelerator: str | Accelerator
    per_second: float
    dtype: str | None = None


# --- Accelerators that the package does not list -----------------------------------------------------

_H100, _H200 = accelerators["h100"], accelerators["h200"]
assert _H100.link is not None
assert _H200.link is not None
_H800 = replace(_H100, name="H800", link=replace(_H100.link, bandwidth=200e9, adds=False))
_NVL32 = replace(_H200, name="GH200 NVL32", gpus_per_node=32)
_MI300X = Accelerator(
    name="MI300X",
    memory_bytes=192e9,
    bandwidth=5.3e12,
    flops={"bf16": 1307.4e12, "fp8": 2614.9e12},
    link=Link(latency=0.0, bandwidth=448e9, source="seven links of 64 GB/s; no step was timed, so none is counted"),
    network=Link(latency=0.0, bandwidth=50e9),
    source="github.com/stas00/ml-engineering, compute/accelerator",
)


def _memory_only(name: str, gigabytes_per_second: float) -> Accelerator:
    """A machine of which only the bandwidth counts: one token keeps no unit for products busy."""
    products = {"bf16": float("inf")}
    return Accelerator(name=name, memory_bytes=1e12, bandwidth=1e9 * gigabytes_per_second, flops=products)


# --- One request on one node -------------------------------------------------------------------------

_GPT_FAST = "github.com/meta-pytorch/gpt-fast, README.md (258ae2e)"
_GPT_FAST_NOTE = "cards limited to 330 W; pairs of GPUs are linked unevenly (hybrid cube mesh); 5 tokens in, 200 out"
_AMD_LONG = "github.com/dstackai/benchmarks, amd/tgi_vs_vllm (ac24b9d), one prompt"
_MIXTRAL_FAST = "github.com/meta-pytorch/gpt-fast, README.md and mixtral-moe/README.md (258ae2e)"


def _gpt_fast(
    id: str, model: str, label: str, recipe: str, rates: Mapping[int, float], sizes: Mapping[str, float] | None = None
) -> Iterator[Timed]:
    """Tokens a second of one request, by number of GPUs."""
    for gpus, rate in rates.items():
        yield Timed(
            id, "lone decode", label, model=model, accelerator="a100-80", gpus=gpus, recipe=recipe, context=105,
            seconds=1 / rate, weight_sizes=sizes, launched="graphed", note=_GPT_FAST_NOTE,
            source=_MIXTRAL_FAST if "mixtral" in model else _GPT_FAST,
        )  # fmt: skip


#: Four bits a number, and for each 32 of them a scale and a zero of two bytes each.
_INT4_32 = {"": 0.5 + 4 / 32}

_LONE: tuple[Timed, ...] = (
    *_gpt_fast("P01", "llama-3.1-8b", "Llama 3.1 8B, bf16, gpt-fast", "bf16", {1: 93.89}),
    *_gpt_fast("P01b", "llama-3.1-8b", "Llama 3.1 8B, int8, gpt-fast", "int8", {1: 137.64}),
    *_gpt_fast("P02", "llama-2-7b", "Llama 2 7B, bf16, gpt-fast", "bf16", {1: 104.9}),
    *_gpt_fast("P02", "llama-2-7b", "Llama 2 7B, int8, gpt-fast", "int8", {1: 155.58}),
    *_gpt_fast("P02", "llama-2-7b", "Llama 2 7B, int4, gpt-fast", "bf16", {1: 196.80}, _INT4_32),
    *_gpt_fast("P03", "llama-3.1-8b", "Llama 3.1 8B, bf16, gpt-fast", "bf16", {2: 149.10, 4: 217.21, 8: 276.01}),
    *_gpt_fast("P03", "llama-2-7b", "Llama 2 7B, bf16, gpt-fast", "bf16", {2: 168.84, 4: 254.02, 8: 328.43}),
    *_gpt_fast("P04", "llama-3.1-70b", "Llama 3.1 70B, bf16, gpt-fast", "bf16", {2: 16.03, 4: 37.45, 8: 58.78}),
    *_gpt_fast("P04", "llama-2-70b", "Llama 2 70B, bf16, gpt-fast", "bf16", {2: 21.32, 4: 38.01, 8: 62.50}),
    *_gpt_fast("P05", "llama-3.1-70b", "Llama 3.1 70B, int8, gpt-fast", "int8", {1: 18.04, 8: 75.58}),
    *_gpt_fast("P05", "llama-2-70b", "Llama 2 70B, int8, gpt-fast", "int8", {1: 19.13, 8: 80.44}),
    *_gpt_fast("P05", "llama-2-70b", "Llama 2 70B, int4, gpt-fast", "bf16", {1: 25.25, 8: 90.77}, _INT4_32),
    *_gpt_fast("P06", "llama-3.1-405b", "Llama 3.1 405B, int8, gpt-fast", "int8", {8: 15.60}),
    *_gpt_fast("P07", "mixtral-8x7b", "Mixtral 8x7B, bf16, gpt-fast", "bf16", {2: 96.67, 4: 155.35, 8: 227.82}),
    *_gpt_fast(
        "P07", "mixtral-8x7b", "Mixtral 8x7B, int8, gpt-fast", "int8", {1: 97.92, 2: 155.03, 4: 216.87, 8: 279.35}
    ),
    Timed(
        "P09", "lone decode", "Llama 3.3 70B, FP8, TensorRT-LLM", model="llama-3.1-70b", accelerator="h200",
        recipe="fp8-block", seconds=1 / 51.14, context=1024, source="NVIDIA's blog, December 2024, by cryptoflexs.com",
        read="second-hand", note="FP8 and a context of 1,024 assumed, neither is stated; with a draft, 181.74 a second",
    ),
    Timed(
        "P10", "lone decode", "Mixtral 8x7B, int8, TensorRT-LLM", model="mixtral-8x7b", accelerator="a100-80",
        recipe="int8", seconds=1 / 81, context=576, source="Baseten's blog, December 2023", read="excerpt",
    ),
    Timed(
        "P11", "lone decode", "Llama 3 8B, bf16, vLLM 0.5.3", model="llama-3.1-8b", accelerator="h100", seconds=13e-3,
        context=512, launched="graphed",
        source="github.com/vllm-project/vllm-project.github.io, 2024-09-05-perf-update",
        note="about 13 ms, under light load, taken as one request; the post is about what the host does between steps",
    ),
    *(
        Timed(
            "P13", "lone decode", "Llama 3.3 70B, FP8, NIM 1.8", model="llama-3.1-70b", accelerator="h100", gpus=2,
            recipe="fp8-block", seconds=seconds, context=context,
            source="docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance", read="excerpt",
            note="precision not stated: FP8 assumed",
        )
        for seconds, context in ((18.58e-3, 5250), (18.91e-3, 1500))
    ),
    *(
        Timed(
            "P17", "lone decode", f"Llama 3.1 405B, bf16, {software}", model="llama-3.1-405b", accelerator=_MI300X,
            gpus=8, seconds=1e-3 * time, context=1000 * thousands, source=_AMD_LONG,
        )
        for software, times in (
            ("vLLM 0.6.3", {16: 73.06, 32: 74.89, 64: 79.79, 128: 98.17}),
            ("TGI", {16: 47.56, 32: 51.19, 64: 59.20, 128: 70.17}),
        )
        for thousands, time in times.items()
    ),
    Timed(
        "P37", "lone decode", "DeepSeek-R1, FP4, TensorRT-LLM", model="deepseek-v3", accelerator="b200", gpus=8,
        seconds=1 / 111, context=2048, launched="graphed",
        weight_sizes={"expert": 0.5 + 1 / 16, "feed_forward": 0.5 + 1 / 16, "": 2},
        source="github.com/NVIDIA/TensorRT-LLM, tech_blog/blog1_Pushing_Latency_Boundaries (01c4ece)",
        note="without speculation; later versions with it 368 a second",
    ),
    *(
        Timed(
            "P39", "lone decode", "DeepSeek-V3, int4, vLLM", model="deepseek-v3", accelerator="h200", gpus=8,
            seconds=1 / rate, context=context, weight_sizes={"embedding": 2, "head": 2, "": 0.5},
            source="huggingface.co, QuixiAI/DeepSeek-V3-0324-AWQ, April 2025", read="excerpt",
            note="H100 or H200, the card does not say which: H200 assumed",
        )
        for rate, context in ((61.5, 100), (54.3, 63_000))
    ),
)  # fmt: skip

# --- Many requests on one node -----------------------------------------------------------------------

_DSTACK = "github.com/dstackai/benchmarks, comparison/h100sxm5_vs_mi300x, csv_data (85a2fe1)"

_BATCH: tuple[Timed, ...] = (
    *(
        Timed(
            "P12", "batch decode", f"{label}, bf16, vLLM", model=model, accelerator="h200", gpus=gpus, batch_size=8,
            context=96, seconds=seconds / 128, launched="graphed", read="excerpt",
            source="vLLM's performance benchmark, build 9515, late 2024",
            note="32 tokens in, 128 out; the prompt's pass is inside the time",
        )
        for label, model, gpus, seconds in (
            ("Llama 3.1 8B", "llama-3.1-8b", 1, 833.4e-3),
            ("Llama 3.1 70B", "llama-3.1-70b", 4, 2077.5e-3),
            ("Mixtral 8x7B", "mixtral-8x7b", 2, 1917.4e-3),
        )
    ),
    *(
        Timed(
            "P14", "batch decode", "Llama 3.1 405B, FP8, vLLM 0.6.3", model="llama-3.1-405b", accelerator="h100",
            gpus=8, recipe="fp8-ffn", batch_size=batch, context=128 + 1024, seconds=seconds / 2048, launched="graphed",
            source=_DSTACK, note="128 tokens in, 2,048 out; the prompt's pass is inside the time",
        )
        for batch, seconds in ((4, 71.27), (8, 75.06), (16, 75.82), (32, 78.37))
    ),
    *(
        Timed(
            "P16", "batch decode", "Llama 3.1 405B, FP8, vLLM 0.6.4", model="llama-3.1-405b", accelerator=_MI300X,
            gpus=8, recipe="fp8-ffn", state_bytes_per_element=1, batch_size=batch, context=128 + 1024,
            seconds=seconds / 2048, source=_DSTACK, note="no graphs; 128 tokens in, 2,048 out",
        )
        for batch, seconds in (
            (4, 67.79), (8, 68.70), (16, 73.07), (32, 81.62), (64, 99.37), (128, 131.64), (256, 227.29),
        )
    ),
    *(
        Timed(
            "P34", "batch decode", "DeepSeek-R1, FP8, SGLang 0.5.7", model="deepseek-v3", accelerator="h200", gpus=8,
            recipe="fp8-block", batch_size=batch, context=1024 + 512, seconds=seconds, launched="graphed",
            source="github.com/SemiAnalysisAI/InferenceX, issue 870, March 2026", read="excerpt",
            note="mean over a run with so many requests at once",
        )
        for batch, seconds in ((8, 12.8e-3), (16, 17.2e-3), (32, 25.6e-3), (64, 34.6e-3))
    ),
    Timed(
        "P36", "batch decode", "DeepSeek-R1, FP8, TensorRT-LLM", model="deepseek-v3", accelerator="h200", gpus=8,
        recipe="fp8-block", cache="readers", experts="whole", batch_size=8 * 128, context=1024 + 1024,
        seconds=8 * 128 / 11_489.27,
        source="github.com/NVIDIA/TensorRT-LLM, docs, Best_perf_practice_on_DeepSeek-R1 (01c4ece)",
        note="1,024 tokens in, 2,048 out; prompts are read in the same time",
    ),
)  # fmt: skip

# --- Prompts -----------------------------------------------------------------------------------------

_SLOWER = "the same publisher has other software that reads the same prompt on the same machine at least twice as fast"

_PROMPTS: tuple[Timed, ...] = (
    Timed(
        "P10", "prompt", "Mixtral 8x7B, int8, TensorRT-LLM", model="mixtral-8x7b", accelerator="a100-80",
        recipe="int8", seconds=127e-3, new_tokens=512, source="Baseten's blog, December 2023", read="excerpt",
    ),
    *(
        Timed(
            "P13", "prompt", "Llama 3.3 70B, FP8, NIM 1.8", model="llama-3.1-70b", accelerator="h100", gpus=2,
            recipe="fp8-block", seconds=seconds, new_tokens=tokens,
            source="docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance", read="excerpt",
            note="precision not stated: FP8 assumed",
        )
        for tokens, seconds in ((5000, 406.77e-3), (500, 47.77e-3))
    ),
    *(
        Timed(
            "P17", "prompt", f"Llama 3.1 405B, bf16, {software}", model="llama-3.1-405b", accelerator=_MI300X,
            gpus=8, seconds=1e-3 * time, new_tokens=1000 * thousands, source=_AMD_LONG, aside=aside,
        )
        for software, times, aside in (
            ("vLLM 0.6.3", {16: 23828.07, 32: 66549.57, 64: 209674.58, 128: 734188.96}, _SLOWER),
            ("TGI", {16: 5945.26, 32: 12485.37, 64: 28017.16, 128: 67651.38}, ""),
        )
        for thousands, time in times.items()
    ),
    *(
        Timed(
            "P26", "prompt", f"{label}, FP8, TensorRT-LLM", model=model, accelerator=_NVL32, gpus=32, recipe="fp8-all",
            seconds=seconds, new_tokens=tokens, source="NVIDIA's blog, September 2024, by machinedaily.ai",
            read="second-hand", note="32 GPUs on one switch; precision not stated: FP8 assumed",
        )
        for label, model, tokens, seconds in (
            ("Llama 3.1 405B", "llama-3.1-405b", 122_880, 7.5),
            ("Llama 3.1 405B", "llama-3.1-405b", 32_768, 1.6),
            ("Llama 3.1 70B", "llama-3.1-70b", 32_768, 0.472),
        )
    ),
)  # fmt: skip

# --- Several nodes -----------------------------------------------------------------------------------

_VLLM_WIDE = "github.com/vllm-project/vllm-project.github.io, 2025-12-17-large-scale-serving (341df86)"
_SGLANG_EP = "github.com/lm-sys/lm-sys.github.io, blog/2025-05-05-large-scale-ep.md (2db4e40)"

_PROFILE = "a profile with the load of experts made even; two halves of the batch take turns"


def _spread(
    id: str, kind: Kind, what: str, accelerator: str | Accelerator, gpus: int, per_gpu: int, seconds: float,
    *, source: str, read: Read = "primary", note: str = "", context: int = 0, new_tokens: int = 1,
    launched: Literal["graphed"] | None = None,
) -> Timed:  # fmt: skip
    """DeepSeek-V3 with whole experts on each GPU, and ``per_gpu`` requests there."""
    return Timed(
        id, kind, what, model="deepseek-v3", accelerator=accelerator, gpus=gpus, recipe="fp8-block", cache="readers",
        experts="whole", batch_size=gpus * per_gpu, seconds=seconds, context=context, new_tokens=new_tokens,
        source=source, read=read, note=note, launched=launched,
    )  # fmt: skip


_NODES: tuple[Timed, ...] = (
    Timed(
        "P27", "prompt on many nodes", "Llama 3 405B, FP8, Meta", model="llama-3.1-405b", accelerator="h100", gpus=128,
        cache="sequence", recipe="fp8-ffn", seconds=77, new_tokens=1_000_000, own_messages=True,
        source="arXiv 2411.01783, abstract", note="context parallelism, whose messages overlap: not counted",
    ),
    Timed(
        "P27", "prompt on many nodes", "Llama 3 405B, FP8, Meta", model="llama-3.1-405b", accelerator="h100", gpus=128,
        cache="sequence", recipe="fp8-ffn", seconds=3.8, new_tokens=131_072, own_messages=True,
        source="arXiv 2411.01783, abstract", note="context parallelism, whose messages overlap: not counted",
    ),
    _spread(
        "P29", "many nodes", "DeepSeek-V3, FP8, DeepSeek", _H800, 144, 128, 128 * 8 / 14_800, context=4989,
        source="github.com/deepseek-ai/open-infra-index, 202502OpenSourceWeek/day_6 (56d8685)",
        note="requests a GPU not stated: 128 as in DeepSeek's published profile",
    ),
    _spread(
        "P30", "many nodes", "DeepSeek-V3, FP8, DeepSeek", _H800, 128, 128, 128 * 8 / 18_598, context=4096,
        source=f"github.com/deepseek-ai/profile-data (ae7fc07); throughput: {_SGLANG_EP}", note=_PROFILE,
    ),
    _spread(
        "P30", "prompt on many nodes", "DeepSeek-V3, FP8, DeepSeek", _H800, 32, 4, 4 * 4096 * 8 / 62_713,
        new_tokens=4096, source=f"github.com/deepseek-ai/profile-data (ae7fc07); throughput: {_SGLANG_EP}",
        note=_PROFILE,
    ),
    _spread(
        "P31", "many nodes", "DeepSeek-V3, FP8, SGLang", "h100", 72, 256, 256 * 8 / 22_282, context=2000,
        source=_SGLANG_EP, launched="graphed",
    ),
    *(
        _spread(
            "P32", "prompt on many nodes", "DeepSeek-V3, FP8, SGLang", "h100", 32, 16_384 // tokens,
            16_384 * 8 / rate, new_tokens=tokens, source=_SGLANG_EP,
        )
        for tokens, rate in ((1024, 57_674), (2048, 54_543), (4096, 50_302))
    ),
    *(
        _spread(
            "P33", "many nodes", "DeepSeek-R1, FP8, vLLM", "h200", gpus, 256, 256 / rate, context=3000,
            source=_VLLM_WIDE, read="figure",
            note="2,000 tokens in, 2,000 out; the throughput of decoding",
        )
        for gpus, rate in ((32, 2190), (72, 2070), (96, 1970))
    ),
    *(
        Timed(
            "P35", "many nodes", "DeepSeek-R1, FP8, SGLang", model="deepseek-v3", accelerator="h100", gpus=16,
            recipe="fp8-block", seconds=seconds, context=prompt + 64, launched="graphed",
            source="github.com/tenstorrent/tt-inference-server, issue 356, July 2025", read="excerpt",
            note="one request on two nodes, 128 tokens out",
        )
        for prompt, seconds in ((128, 23.1e-3), (4096, 23.7e-3), (8192, 24.0e-3))
    ),
)  # fmt: skip

# --- Single cards and desktop computers --------------------------------------------------------------

#: llama.cpp's formats: 32 numbers share a scale of two bytes.
_F16, _Q8_0, _Q4_0 = {"": 2.0}, {"": 34 / 32}, {"": 18 / 32}
_APPLE = "github.com/ggml-org/llama.cpp, discussion 4167"
_CUDA = "github.com/ggml-org/llama.cpp, discussion 15013"


def _llama_cpp(id: str, source: str, machine: str | Accelerator, rates: tuple[float | None, ...]) -> Iterator[Timed]:
    """Llama 2 7B, one request, 128 tokens: tokens a second with 16, 8 and 4 bits."""
    for name, sizes, rate in zip(("F16", "Q8_0", "Q4_0"), (_F16, _Q8_0, _Q4_0), rates, strict=True):
        if rate is not None:
            yield Timed(
                id, "small computers", f"Llama 2 7B, {name}, llama.cpp", model="llama-2-7b", accelerator=machine,
                seconds=1 / rate, context=64, weight_sizes=sizes, source=source, read="second-hand",
            )  # fmt: skip


_SMALL: tuple[Timed, ...] = (
    *_llama_cpp("P51", _APPLE, _memory_only("M1", 68), (None, 7.91, 14.15)),
    *_llama_cpp("P51", _APPLE, _memory_only("M2", 100), (6.72, 12.21, 21.91)),
    *_llama_cpp("P51", _APPLE, _memory_only("M4", 120), (7.43, 13.54, 24.11)),
    *_llama_cpp("P51", _APPLE, _memory_only("M1 Pro", 200), (12.75, 22.34, 36.41)),
    *_llama_cpp("P51", _APPLE, _memory_only("M4 Pro", 273), (17.18, 30.69, 50.74)),
    *_llama_cpp("P51", _APPLE, _memory_only("M1 Max", 400), (23.03, 40.20, 61.19)),
    *_llama_cpp("P51", _APPLE, _memory_only("M2 Max", 400), (24.65, 41.83, 65.95)),
    *_llama_cpp("P51", _APPLE, _memory_only("M3 Max", 400), (25.09, 42.75, 66.31)),
    *_llama_cpp("P51", _APPLE, _memory_only("M4 Max", 546), (31.64, 54.05, 83.06)),
    *_llama_cpp("P51", _APPLE, _memory_only("M1 Ultra", 800), (37.01, 59.87, 83.73)),
    *_llama_cpp("P51", _APPLE, _memory_only("M2 Ultra", 800), (41.02, 66.64, 94.27)),
    *_llama_cpp("P51", _APPLE, _memory_only("M3 Ultra", 800), (39.78, 63.93, 92.14)),
    *_llama_cpp("P52", _CUDA, _memory_only("RTX 3090", 936), (None, None, 158.16)),
    *_llama_cpp("P52", _CUDA, _memory_only("RTX 4090", 1008), (None, None, 186.21)),
    *_llama_cpp("P52", _CUDA, _memory_only("RTX 5090", 1792), (None, None, 290.02)),
    *_llama_cpp("P52", _CUDA, "a100-80", (None, None, 190.88)),
    *_llama_cpp("P52", _CUDA, "h100", (None, None, 267.81)),
)

# --- Messages ----------------------------------------------------------------------------------------

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
#: 128 tokens of each GPU go to 8 experts each: 7,168 numbers of one byte there, of two bytes back.
_DISPATCHED = 128 * 8 * 7168
_DEEPEP_NOTE = "kernels for decoding: 128 tokens a GPU, 8 experts each, 7,168 numbers"
_NCCL = "github.com/stas00/ml-engineering, network/benchmarks (744d01e)"
_NCCL_NEW = "github.com/stas00/ml-engineering, network/benchmarks/README.md (0cc3de5)"
_QUEUED = "ten calls queued on the GPU, so that the host's time does not count"
_SGLANG_AR = "github.com/sgl-project/sglang, pull request 2904, January 2025"
#: DeepEP's first kernels for decoding reached every GPU by its network adapter, the neighbour in the node too.
_BY_NETWORK = replace(_H800, name="H800 by network", gpus_per_node=1)


def _sent(gpus: int, size: float, bus: float) -> float:
    """Seconds of an all-reduce from its bus bandwidth, as NCCL's tests define it."""
    return 2 * (gpus - 1) / gpus * size / bus


def _custom(what: str, size: int, times: Mapping[int, float]) -> Iterator[Message]:
    """Microseconds by number of GPUs."""
    for gpus, microseconds in times.items():
        yield Message(
            "P47", "messages", what, accelerator="h100", gpus=gpus, size=size, seconds=1e-6 * microseconds,
            source=_SGLANG_AR, read="excerpt", note="called from the host one by one, without a graph",
            sets="latency of a step inside a node" if (what, size, gpus) == _STEP_ROW else "",
        )  # fmt: skip


_STEP_ROW = ("all-reduce, SGLang", 16 * _KIB, 4)

_MESSAGES: tuple[Message, ...] = (
    Message(
        "P43", "messages", "dispatch, DeepEP", accelerator=_BY_NETWORK, gpus=8, size=_DISPATCHED, seconds=163e-6,
        collective="all-to-all", source="github.com/deepseek-ai/DeepEP, README.md (e0eaaf9)", note=_DEEPEP_NOTE,
        sets="latency of a step between nodes",
    ),
    Message(
        "P43", "messages", "combine, DeepEP", accelerator=_BY_NETWORK, gpus=8, size=2 * _DISPATCHED, seconds=318e-6,
        collective="all-to-all", source="github.com/deepseek-ai/DeepEP, README.md (e0eaaf9)", note=_DEEPEP_NOTE,
    ),
    *(
        Message(
            "P43", "messages", f"{name}, DeepEP", accelerator=_H800, gpus=gpus, size=size, seconds=1e-6 * time,
            collective="all-to-all", source="github.com/deepseek-ai/DeepEP, docs/legacy.md (0297fc8)",
            note=_DEEPEP_NOTE,
        )
        for name, size, times in (
            ("dispatch", _DISPATCHED, {8: 77, 16: 118, 32: 155, 64: 173, 128: 192, 256: 194}),
            ("combine", 2 * _DISPATCHED, {8: 114, 16: 195, 32: 273, 64: 314, 128: 369, 256: 360}),
        )
        for gpus, time in times.items()
    ),
    *(
        Message(
            "P44", "messages", "all-reduce, NCCL", accelerator="h200", gpus=8, size=size,
            seconds=_sent(8, size, 1e9 * bus), source=_NCCL_NEW, note=_QUEUED,
        )
        for size, bus in (
            (32 * _KIB, 3.15), (128 * _KIB, 12.46), (_MIB, 74.57), (16 * _MIB, 255.90), (128 * _MIB, 414.54),
            (16 * _GIB, 482.25),
        )
    ),
    Message(
        "P44", "messages", "all-reduce, NCCL, ring", accelerator="h200", gpus=8, size=16 * _GIB, algorithm="ring",
        seconds=_sent(8, 16 * _GIB, 367.61e9), source=_NCCL,
    ),
    *(
        Message(
            "P45", "messages", "all-reduce, NCCL", accelerator="a100-80", gpus=8, size=size, seconds=seconds,
            source=_NCCL,
        )
        for size, seconds in (
            (32 * _KIB, 43.83e-6),
            (_MIB, 101.9e-6),
            (16 * _GIB, _sent(8, 16 * _GIB, 234.89e9)),
        )
    ),
    *(
        Message(
            "P46", "messages", "all-reduce, NCCL", accelerator="b200", gpus=32, size=size,
            seconds=_sent(32, size, 1e9 * bus), source=_NCCL_NEW, note=_QUEUED,
        )
        for size, bus in (
            (32 * _KIB, 0.65), (128 * _KIB, 2.35), (_MIB, 12.47), (16 * _MIB, 71.80), (128 * _MIB, 260.50),
            (16 * _GIB, 376.71),
        )
    ),
    Message(
        "P46", "messages", "all-reduce, NCCL", accelerator="h200", gpus=32, size=4 * _GIB,
        seconds=_sent(32, 4 * _GIB, 364.87e9), source=_NCCL,
    ),
    *_custom("all-reduce, SGLang", 2 * _KIB, {2: 3.7, 4: 4.8, 8: 5.9}),
    *_custom("all-reduce, SGLang", 16 * _KIB, {2: 3.9, 4: 3.7, 8: 5.7}),
    *_custom("all-reduce, SGLang", 128 * _KIB, {2: 4.5, 4: 4.8, 8: 7.8}),
    *_custom("all-reduce, SGLang", _MIB, {2: 7.9, 4: 13.9, 8: 16.7}),
    *_custom("all-reduce, SGLang", 2 * _MIB, {2: 12.5, 4: 20.2, 8: 22.1}),
    *_custom("all-reduce, SGLang", 4 * _MIB, {2: 19.9, 4: 31.1, 8: 33.8}),
    *_custom("all-reduce, vLLM", 2 * _KIB, {2: 9.5, 4: 9.1, 8: 10.1}),
    *_custom("all-reduce, vLLM", 16 * _KIB, {2: 8.8, 4: 8.5, 8: 9.3}),
    *_custom("all-reduce, vLLM", 128 * _KIB, {2: 8.7, 4: 9.2, 8: 11.8}),
    *_custom("all-reduce, vLLM", _MIB, {2: 12.9, 4: 20.6, 8: 24.1}),
    *_custom("all-reduce, vLLM", 2 * _MIB, {2: 17.7, 4: 26.9, 8: 30.4}),
    *_custom("all-reduce, vLLM", 4 * _MIB, {2: 26.6, 4: 40.2, 8: 45.0}),
    Message(
        "P50", "messages", "all-reduce, NCCL", accelerator="h100", gpus=16, size=4 * _KIB, seconds=75e-6,
        source="github.com/NVIDIA/nccl, issue 1453", read="excerpt", note="two nodes or more: two assumed",
    ),
)  # fmt: skip

# --- Memory ------------------------------------------------------------------------------------------

_ROOMS: tuple[Room, ...] = (
    Room(
        "P15", "memory", "Llama 3.1 405B, FP8, vLLM 0.6.3", model="llama-3.1-405b", accelerator="h100", gpus=8,
        recipe="fp8-ffn", tokens=32 * (128 + 2048), too_many=32 * (2048 + 2048), source=_DSTACK,
        note="32 requests of 2,176 tokens take the time of 16, 32 of 4,096 take 1.7 times that of 16",
    ),
    *(
        Room(
            "P53", "memory", f"Jamba 1.5 Mini, {label}, vLLM", model="jamba-1.5-mini", accelerator="a100-80",
            gpus=gpus, recipe=recipe, tokens=tokens, tokens_a_pass=None, read="second-hand",
            source="model card of AI21-Jamba-1.5-Mini, August 2024", note="the whole prompt in one pass",
        )
        for label, recipe, gpus, tokens in (("bf16", "bf16", 2, 200_000), ("ExpertsInt8", "int8-experts", 1, 100_000))
    ),
    Room(
        "P33", "memory", "DeepSeek-R1, FP8, vLLM", model="deepseek-v3", accelerator="h200", gpus=8,
        recipe="fp8-block", bytes=34e9, source=_VLLM_WIDE,
    ),
)  # fmt: skip

_STORED: tuple[Stored, ...] = (
    Stored(
        "P18", "stored", "Llama 3.1 405B, FP8, vLLM", model="llama-3.1-405b", accelerator="h100", gpus=8,
        recipe="fp8-ffn", bytes=57.7520 * _GIB, source="github.com/vllm-project/vllm, issue 6746, July 2024",
        read="excerpt", note="the first upload held each of the 8 KV heads twice",
    ),
    *(
        Stored(
            "P54", "stored", f"{label}, state", model=model, accelerator="h100", bytes=gigabytes * _GIB,
            context=262_144, source="arXiv 2408.12570, in a digest", read="second-hand",
        )
        for label, model, gigabytes in (
            ("Jamba 1.5 Large", "jamba-1.5-large", 9),
            ("Jamba 1.5 Mini", "jamba-1.5-mini", 4),
        )
    ),
)  # fmt: skip

# --- Rates of the data sheets ------------------------------------------------------------------------

_MAMF = "github.com/stas00/ml-engineering, compute/accelerator/benchmarks (744d01e)"

_RATES: tuple[Rate, ...] = (
    *(
        Rate("P48", "peaks", f"products in {dtype}", accelerator=gpu, per_second=1e12 * tera, dtype=dtype, source=_MAMF)
        for gpu, dtype, tera in (
            ("a100-80", "bf16", 271.2), ("h100", "bf16", 794.5), ("b200", "bf16", 1745), (_MI300X, "bf16", 668.4),
            ("h100", "fp8", 1402.6), ("h200", "fp8", 1453.4), ("b200", "fp8", 3432.5),
        )
    ),
    Rate(
        "P49", "peaks", "bytes copied", accelerator="h100", per_second=2903e9, read="excerpt",
        source="github.com/aigatech/vpbenchmarking, README",
    ),
    Rate(
        "P41", "peaks", "bytes of a cache read, FlashMLA", accelerator=_H800, per_second=3000e9,
        source="github.com/deepseek-ai/FlashMLA, README.md (9241ae3)",
    ),
)  # fmt: skip

#: All rows, by kind.
#:
#: :meta hide-value:
measurements: tuple[Measurement, ...] = (
    *_LONE, *_BATCH, *_PROMPTS, *_NODES, *_SMALL, *_MESSAGES, *_ROOMS, *_STORED, *_RATES,
)  # fmt: skip

# --- What is known of the far ones -------------------------------------------------------------------

Reason = Literal["started", "host", "short messages", "software", "unknown"]

#: Why a floor was missed by more than twice, by series and kind.
MISSED: dict[tuple[str, Kind], Reason] = {
    ("P02", "lone decode"): "started",
    ("P03", "lone decode"): "started",
    ("P05", "lone decode"): "started",
    ("P07", "lone decode"): "started",
    ("P37", "lone decode"): "started",
    ("P34", "batch decode"): "started",
    ("P51", "small computers"): "started",
    ("P52", "small computers"): "started",
    ("P11", "lone decode"): "host",
    ("P12", "batch decode"): "started",
    ("P35", "many nodes"): "short messages",
    ("P43", "messages"): "short messages",
    ("P44", "messages"): "short messages",
    ("P45", "messages"): "short messages",
    ("P46", "messages"): "short messages",
    ("P47", "messages"): "short messages",
    ("P16", "batch decode"): "software",
    ("P17", "lone decode"): "software",
    ("P17", "prompt"): "software",
    ("P06", "lone decode"): "unknown",
    ("P39", "lone decode"): "unknown",
    ("P33", "many nodes"): "unknown",
    ("P36", "batch decode"): "unknown",
    ("P10", "prompt"): "unknown",
    ("P13", "prompt"): "unknown",
    ("P27", "prompt on many nodes"): "unknown",
}
