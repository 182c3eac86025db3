"""Is the cache of a trained model of low rank? SmolLM2's keys and values, cut to R numbers a token and layer.

    python book/experiments/low_rank.py             runs what is missing; writes low_rank.json beside it
    python book/experiments/low_rank.py --again     forgets what was recorded

One layer makes its keys and values with one matrix, W_k above W_v: 384 rows on 576 columns. A cache of R numbers is
a latent A x with two matrices B A of rank R in its place. Whatever R is, the latent holds the keys *before* their
rotation by position, because a rotated key is no fixed matrix times x: every key must be formed from the latent again
and rotated at each step. B A may be the best approximation

- ``weights``  of the matrix itself: its singular value decomposition, cut;
- ``outputs``  of the keys and values that it makes of a text: their principal components;
- ``balanced`` of the same, with keys and values first divided by their sizes, so that an error of either counts alike.

Beside them, at the bytes of two heads and of one: heads ``merged`` into their mean, in each layer those whose loss is
least on the same text, and heads ``dropped`` together with their three query heads, those whose W_o W_v is least. The
text is this book's prose; perplexity is that of the first 512 tokens of the passage. The model is a 4-bit file, so
every figure is damage that is added to an already 4-bit model. The run can be interrupted at any case; "minutes" adds
up all runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from resumable import Record, asked_again
from torch import Tensor

import tokenbytoken as tbt

HERE = Path(__file__).resolve().parent
RECORD = HERE / "low_rank.json"
TOKENS, CALIBRATION = 512, 2048
RANKS = (384, 352, 320, 288, 256, 192, 128, 64)
WAYS = ("weights", "outputs", "balanced")
HEADS = (2, 1)


class Layer:
    """One layer's joint matrix (2 K D, M) in float64, and the second moments of what it makes of a text."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.heads, self.width = attention.config.num_kv_heads, attention.config.head_dim
        self.joint = torch.cat((attention.k_proj.weight, attention.v_proj.weight)).double()
        self.inputs = torch.zeros(self.joint.shape[1], self.joint.shape[1], dtype=torch.float64)

    @property
    def moments(self) -> Tensor:
        """Sum over the text of y yᵀ, for y = (k, v): (2 K D, 2 K D)."""
        return self.joint @ self.inputs @ self.joint.T

    def see(self, module: Any, x: tuple[Tensor, ...]) -> None:
        flat = x[0].flatten(0, -2).double()
        self.inputs += flat.T @ flat

    def sizes(self) -> Tensor:
        """Root mean square of a key's and of a value's numbers, each as often as there are such numbers."""
        each = self.moments.diagonal().view(2, -1).mean(1).sqrt()
        return each.repeat_interleave(len(self.joint) // 2)

    def basis(self, way: str) -> tuple[Tensor, Tensor]:
        """(singular values, directions as columns) in the space of (k, v), strongest first."""
        if way == "weights":
            u, s, _ = torch.linalg.svd(self.joint, full_matrices=False)
            return s, u
        scale = self.sizes() if way == "balanced" else torch.ones(len(self.joint), dtype=torch.float64)
        values, vectors = torch.linalg.eigh(self.moments / scale[:, None] / scale)
        return values.flip(0).clamp(min=0).sqrt(), vectors.flip(1)

    def replace(self, joint: Tensor) -> None:
        for projection, part in zip((self.attention.k_proj, self.attention.v_proj), joint.chunk(2), strict=True):
            projection.weight.copy_(part)

    def truncate(self, way: str, rank: int) -> None:
        """B A of rank ``rank``: the projection of (k, v) on the strongest directions."""
        scale = self.sizes() if way == "balanced" else torch.ones(len(self.joint), dtype=torch.float64)
        directions = self.basis(way)[1][:, :rank]
        self.replace(scale[:, None] * (directions @ (directions.T @ (self.joint / scale[:, None]))))

    def with_heads(self, change: Any) -> Tensor:
        """The joint matrix after ``change`` of the heads (K, D, M) of its keys, and of its values."""
        return torch.cat([change(part.unflatten(0, (self.heads, -1))).flatten(0, 1) for part in self.joint.chunk(2)])

    def merge(self, count: int) -> None:
        """``count`` different heads: one group of heads becomes its mean, the group that loses least."""

        def mean(group: tuple[int, ...], heads: Tensor) -> Tensor:
            merged = heads.clone()
            merged[list(group)] = heads[list(group)].mean(0)
            return merged

        scale = self.sizes()[:, None]
        made = [self.with_heads(partial(mean, g)) for g in combinations(range(self.heads), self.heads - count + 1)]
        lost = [float((((m - self.joint) / scale) @ self.inputs @ ((m - self.joint) / scale).T).trace()) for m in made]
        self.replace(made[lost.index(min(lost))])

    def drop(self, count: int) -> None:
        """``count`` heads stay; the query heads of the others add nothing. Those go whose W_o W_v is least."""
        o = self.attention.o_proj.weight.unflatten(1, (self.heads, -1, self.width)).double()  # (M, K, G, D)
        v = self.joint.chunk(2)[1].unflatten(0, (self.heads, -1))  # (K, D, M)
        weight = [float((o[:, j].flatten(0, 1) @ v[j]).square().sum()) for j in range(self.heads)]
        gone = sorted(range(self.heads), key=lambda j: weight[j])[: self.heads - count]
        self.replace(self.with_heads(lambda heads: heads.index_fill(0, torch.tensor(gone), 0.0)))


def cases() -> Iterator[tuple[str, int, Any]]:
    """(name, numbers cached for a token and layer, what is done to a layer)."""
    for way in WAYS:
        for rank in RANKS:
            yield f"{way} {rank}", rank, lambda layer, way=way, rank=rank: layer.truncate(way, rank)
    for count in HEADS:
        yield f"merged {128 * count}", 128 * count, lambda layer, count=count: layer.merge(count)
        yield f"dropped {128 * count}", 128 * count, lambda layer, count=count: layer.drop(count)


def calibrated(model: tbt.Decoder) -> list[Layer]:
    """The layers, each with the second moments of its inputs on the book's prose."""
    layers = [Layer(layer.mixer) for layer in model.layers]
    hooks = [layer.attention.k_proj.register_forward_pre_hook(layer.see) for layer in layers]
    prose = (HERE / "siblings_prose.txt").read_text(encoding="utf-8")
    tokens = torch.tensor(tbt.load_tokenizer("smollm2-135m").encode(prose[: 8 * CALIBRATION])[:CALIBRATION])
    for window in tokens.split(TOKENS):
        model(window[None], logits="none")
    for hook in hooks:
        hook.remove()
    return layers


def needed(values: Tensor, share: float) -> int:
    """Directions that hold this share of the sum of squares."""
    return int((values.square().cumsum(0) / values.square().sum() < share).sum()) + 1


def spectra(layers: list[Layer]) -> dict[str, Any]:
    """Every eighth singular value, the largest being 1, and how many hold 90 and 99 % of the squares."""
    found: dict[str, Any] = {"step": 8}
    random = torch.linalg.svdvals(torch.randn(384, 576, generator=torch.Generator().manual_seed(0)).double())
    kinds = {way: [layer.basis(way)[0] for layer in layers] for way in WAYS} | {"random": [random]}
    for kind, values in kinds.items():
        found[kind] = {
            "values": [[float(f"{x:.4g}") for x in (s / s[0])[::8].tolist()] for s in values],
            "90 %": [needed(s, 0.90) for s in values],
            "99 %": [needed(s, 0.99) for s in values],
        }
    return found


def main() -> None:
    again = asked_again(__doc__)
    passage = tbt.measure.book_file("data/passage.txt").read_text(encoding="utf-8")
    tokens = torch.tensor(tbt.load_tokenizer("smollm2-135m").encode(passage)[:TOKENS])
    model = tbt.load("smollm2-135m")
    layers = calibrated(model)

    def perplexity() -> float:
        logits = model(tokens[None])[0, :-1]
        return torch.nn.functional.cross_entropy(logits, tokens[1:]).double().exp().item()

    whole = float(f"{perplexity():.5g}")
    facts = {"tokens": TOKENS, "calibration tokens": CALIBRATION, "perplexity": whole}
    record = Record(RECORD, again=again, indent=None, **facts)
    record.values.setdefault("spectra", spectra(layers))
    for name, numbers, change in cases():
        if name in record:
            continue
        for layer in layers:
            change(layer)
        found = perplexity()
        for layer in layers:
            layer.replace(layer.joint)
        record.keep({name: {"numbers": numbers, "perplexity": float(f"{found:.5g}")}})
        print(f"{name:14} perplexity {found:10.2f}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
