"""The book's running answer: does it fit, how long does one reader wait, how many readers at once?

One node of eight GPUs; a reader pastes 131,072 tokens and wants 1,000 back. Each row asks the question of
one model in one form. Nothing in it is typed in: weights and state are counted from the config, times are floors, the
roofline plus the messages between GPUs (:mod:`tokenbytoken.cost.messages`). ``readers`` counts weights and state
alone; ``served`` sets aside what a server needs besides (:func:`tokenbytoken.cost.working_memory`, an estimate).

>>> print(ledger("llama-3.1-405b", recipe="fp8-ffn"))
131,072 tokens in; state and times of one reader; times are floors (half of published tokens took 1.7 to 2.9 times that)
                         node       memory   weights   a reader   readers   served   first token   a token
llama-3.1-405b fp8-ffn   8 × H100   640 GB    487 GB    67.6 GB         2        0        19.6 s   21.6 ms
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .._numbers import positive, whole
from .._table import Table, table
from ..config import DecoderConfig, MixerConfig
from ..cost import (
    Accelerator,
    CacheLayout,
    Footprint,
    Placement,
    Prediction,
    find_accelerator,
    footprint_on,
    predict,
    state_bytes,
    weight_bytes,
    working_memory_per_gpu,
)
from ..models import AttentionShape, published
from .floors import typical

__all__ = ["Ledger", "Row", "ledger", "row"]


def _with_kv_heads(config: DecoderConfig, kv_heads: int) -> DecoderConfig:
    """The same decoder with another number of KV heads in every mixer that has any."""

    def change(mixer: Any) -> MixerConfig:
        return replace(mixer, num_kv_heads=kv_heads) if hasattr(mixer, "num_kv_heads") else mixer

    if not any(hasattr(mixer, "num_kv_heads") for mixer in config.mixers):
        raise ValueError(f"{config.name or 'this model'} has no attention layers whose KV heads could be set")
    return replace(config, layers=tuple(replace(layer, mixer=change(layer.mixer)) for layer in config.layers))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model in one form on one node, and what the question's answer is for it.

    ``kv_heads`` counts the heads in the *cache* alone: the weights stay those of the published model, as
    when the heads of a GQA checkpoint are repeated before they are cached. ``cache`` as in
    :class:`tokenbytoken.cost.Placement`, ``tensor_parallel`` too.
    """

    config: DecoderConfig
    accelerator: Accelerator
    gpus: int
    tensor_parallel: int | None
    recipe: str
    context: int
    state_bytes_per_element: float
    kv_heads: int | None
    cache: CacheLayout
    label: str

    @property
    def _cached(self) -> DecoderConfig:
        return self.config if self.kv_heads is None else _with_kv_heads(self.config, self.kv_heads)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on the whole node."""
        return weight_bytes(self.config, self.recipe)

    @property
    def reader_bytes(self) -> int:
        """Bytes of the state of one reader, once the prompt is read, each number counted once."""
        return state_bytes(self._cached, 1, self.context, self.state_bytes_per_element)

    @property
    def _placement(self) -> Placement:
        return Placement(
            gpus=self.gpus,
            tensor_parallel=self.tensor_parallel,
            recipe=self.recipe,
            state_bytes_per_element=self.state_bytes_per_element,
            cache=self.cache,
        )

    @property
    def _footprint(self) -> Footprint:
        weights = footprint_on(self.config, self._placement).weights
        return replace(footprint_on(self._cached, self._placement), weights=weights)

    @property
    def weights_fit(self) -> bool:
        return self._footprint.weights <= self.accelerator.memory_bytes

    @property
    def readers(self) -> int:
        """Readers whose state fits on the node beside the weights."""
        return self._footprint.max_batch(self.accelerator.memory_bytes, self.context)

    @property
    def served(self) -> int | None:
        """Readers beside whom a server still has its working memory, an estimate; None for a machine that is none."""
        if self.accelerator.measured:
            return None
        working = working_memory_per_gpu(self.config, self.accelerator, self._placement).bytes
        return self._footprint.max_batch(max(0, self.accelerator.memory_bytes - working), self.context)

    def prefill(self) -> Prediction:
        """The pass that reads the whole prompt; of causal attention only the pairs that count."""
        return self._predict(context=0, new_tokens=self.context)

    def step(self) -> Prediction:
        """The pass that writes the first token after it."""
        return self._predict(context=self.context, new_tokens=1)

    def _predict(self, context: int, new_tokens: int) -> Prediction:
        if self.kv_heads is not None:
            raise ValueError("with kv_heads the row describes a cache, not a model: its passes cannot be predicted")
        return predict(
            self.config,
            self.accelerator,
            1,
            context,
            new_tokens=new_tokens,
            gpus=self.gpus,
            tensor_parallel=self.tensor_parallel,
            recipe=self.recipe,
            state_bytes_per_element=self.state_bytes_per_element,
            cache=self.cache,
            causal=True,
        )

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds until the prompt is read; None if not one reader fits."""
        return self.prefill().seconds if self.readers and self.kv_heads is None else None

    @property
    def token_seconds(self) -> float | None:
        """Seconds for each token of one reader's answer; None if not one reader fits."""
        return self.step().seconds if self.readers and self.kv_heads is None else None

    def cells(self) -> list[str]:
        """The row as text; what depends on a calibrated machine stands in ⟨ ⟩, at a fixed width."""
        node = self.accelerator.name if self.gpus == 1 else f"{self.gpus} × {self.accelerator.name}"
        memory = f"{self.gpus * self.accelerator.memory_bytes / 1e9:,.0f} GB"
        depends = [f"{self.readers:,}", _seconds(self.first_token_seconds), _seconds(self.token_seconds)]
        if self.accelerator.measured:
            node, memory, *depends = "this machine", f"⟨{memory:>8}⟩", *(f"⟨{text:>9}⟩" for text in depends)
        depends.insert(1, "-" if self.served is None else f"{self.served:,}")
        return [self.label, node, memory, _gigabytes(self.weight_bytes), _gigabytes(self.reader_bytes), *depends]


def _gigabytes(count: float) -> str:
    """Three significant digits, in GB (10^9 bytes) or MB."""
    value, unit = (count / 1e9, "GB") if count >= 1e9 else (count / 1e6, "MB")
    return f"{_three_digits(value)} {unit}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for scale, unit in ((1, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds * 1e6)} µs"


def _three_digits(value: float) -> str:
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


_COLUMNS = {"": "", "node": ""} | dict.fromkeys(
    ("memory", "weights", "a reader", "readers", "served", "first token", "a token"), ">"
)


@dataclass(frozen=True)
class Ledger:
    """Rows, as a table: HTML where a notebook shows it, aligned text where it is printed."""

    rows: tuple[Row, ...]

    def _table(self) -> Table:
        contexts = sorted({row.context for row in self.rows})
        title = " or ".join(f"{context:,}" for context in contexts) + " tokens in; state and times of one reader; "
        title += "times are floors"
        if not all(row.accelerator.measured for row in self.rows):
            low, high = typical("lone decode")
            title += f" (half of published tokens took {low:.1f} to {high:.1f} times that)"
        return table([row.cells() for row in self.rows], _COLUMNS, caption=title)

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(self.rows + other.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


def row(
    model: str | DecoderConfig,
    *,
    recipe: str = "bf16",
    gpu: Accelerator | str = "h100",
    gpus: int | None = None,
    tensor_parallel: int | None = None,
    context: int = 131_072,
    state_bytes_per_element: float | None = None,
    kv_heads: int | None = None,
    cache: CacheLayout = "heads",
    label: str | None = None,
) -> Row:
    """One row of the ledger: a published model by name, or any config.

    ``gpus`` is eight, or one where ``gpu`` is a calibrated machine. The state takes two bytes a number,
    or four where the recipe is fp32. Raises ValueError for an unknown model, recipe or accelerator.
    """
    if isinstance(model, str):
        if model not in published:
            raise ValueError(f"unknown model {model!r}: one of {', '.join(published)}")
        found = published[model]
    else:
        found = model
    if isinstance(found, AttentionShape):
        raise ValueError(f"{found.name} is known here by the shape of its attention only: it has no row")
    if not isinstance(found, DecoderConfig):
        raise ValueError(f"a row is a model's name, a DecoderConfig or what row() made, not {found!r}")
    node = find_accelerator(gpu)
    if state_bytes_per_element is None:
        state_bytes_per_element = 4 if recipe == "fp32" else 2
    if kv_heads is not None:
        kv_heads = whole("kv_heads", kv_heads)
    if label is None:
        label = f"{found.name} {recipe}"
        label += f", {kv_heads} KV {'head' if kv_heads == 1 else 'heads'}" if kv_heads is not None else ""
        label += ", 1 B cache" if state_bytes_per_element == 1 else ""
        label += f", by {cache}" if cache != "heads" else ""
    built = Row(
        config=found,
        accelerator=node,
        gpus=(1 if node.measured else 8) if gpus is None else whole("gpus", gpus),
        tensor_parallel=tensor_parallel,
        recipe=recipe,
        context=whole("context", context),
        state_bytes_per_element=positive("state_bytes_per_element", state_bytes_per_element),
        kv_heads=kv_heads,
        cache=cache,
        label=label,
    )
    built.cells()  # whatever cannot be counted is refused here, not when the ledger is printed
    return built


def book() -> tuple[Row, ...]:
    """The rows to which the book's chapters come, in their order."""
    return (
        row("llama-3.1-405b", kv_heads=128),
        row("llama-3.1-405b"),
        row("llama-3.1-405b", recipe="fp8-ffn"),
        row("llama-3.1-405b", recipe="fp8-ffn", state_bytes_per_element=1),
        row("deepseek-v3", recipe="fp8-block"),
        row("deepseek-v3", recipe="fp8-block", gpu="h200"),
        row("deepseek-v3", recipe="fp8-block", gpu="h200", cache="readers"),
        row("deepseek-v3", recipe="fp8-block", gpu="h200", cache="sequence"),
        row("jamba-1.5-large", recipe="int8-experts"),
    )


def ledger(*rows: str | DecoderConfig | Row, **options: object) -> Ledger:
    """The ledger of some rows; without any, that of the whole book.

    A row is a name, a config, or what :func:`row` made; ``options`` are those of :func:`row` and go to
    every name and config. Ledgers with different options add up: ``ledger(a, recipe="bf16") + ledger(b)``.
    Raises ValueError for options without a model, or beside a finished row, which they could not change.
    """
    if not rows:
        if options:
            raise ValueError("options describe a row: name a model as well")
        return Ledger(book())
    if options and (finished := [r for r in rows if isinstance(r, Row)]):
        raise ValueError(f"the row {finished[0].label!r} is finished: {', '.join(options)} would not change it")
    return Ledger(tuple(r if isinstance(r, Row) else row(r, **options) for r in rows))  # type: ignore[arg-type]
