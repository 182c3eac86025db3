"""Tensor parallelism: every rank holds a slice of every matrix, and the ranks add up what they computed.

:func:`shard` is the plan, pure data: which heads, channels and rows of the vocabulary a rank holds, and the smaller
decoder that they make. :func:`load_parallel` realises it over torch.distributed. Attention is cut by whole
key/value heads, by our own code; the feed-forward layers, the embedding and the head are cut evenly, by PyTorch's
tensor-parallel API.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Pope et al. 2022 (arXiv 2211.05102) for inference.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..checkpoints.sources import open_source
from ..checkpoints.tensors import Part, Stored, fill, usable_device
from ..config import AttentionConfig, DecoderConfig, LayerConfig, SwiGLUConfig
from ..decoder import Decoder

__all__ = [
    "Collectives",
    "Part",
    "RankLost",
    "Shard",
    "deal_heads",
    "load_parallel",
    "parallelize",
    "ranks",
    "settled",
    "shard",
]

TIMEOUT = 40.0  # seconds a rank waits for the others in one collective


# --- the plan ----------------------------------------------------------------------------------------


def deal_heads(num_heads: int, num_kv_heads: int, rank: int, world: int) -> tuple[range, range]:
    """(query heads, key/value heads) of one rank.

    Key/value heads are dealt whole, each with the query heads that read it; where they do not divide, the first
    ranks hold one more. With more ranks than key/value heads, world / K neighbours hold a copy of the same one and
    share its query heads. Raises ValueError where that does not come out even.
    """
    H, K = num_heads, num_kv_heads
    if world <= K:
        kv = range(_dealt(K, rank, world), _dealt(K, rank + 1, world))
        return range(kv.start * (H // K), kv.stop * (H // K)), kv
    if world % K or H % world:
        raise ValueError(
            f"{H} query heads and {K} key/value heads cannot be dealt to {world} ranks: with more ranks than key/value "
            f"heads, {world} must be a multiple of {K} and divide {H}"
        )
    one = rank // (world // K)
    return range(rank * H // world, (rank + 1) * H // world), range(one, one + 1)


def _dealt(count: int, rank: int, world: int) -> int:
    """How many of ``count`` things lie with the ranks before this one."""
    return rank * (count // world) + min(rank, count % world)


def _chunk(size: int, rank: int, world: int, what: str) -> range:
    """Equal pieces, rounded up, so that the last is smaller: how ``torch.chunk`` and DTensor divide."""
    piece = -(-size // world)
    if piece * (world - 1) >= size:
        raise ValueError(
            f"{what} ({size}) cannot be cut for {world} ranks: in pieces of {piece}, the last gets nothing"
        )
    return range(rank * piece, min(size, (rank + 1) * piece))


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one rank holds of a model.

    ``config`` is the smaller decoder that the rank's own heads, channels and rows of the vocabulary make:
    ``count_parameters`` and ``state_bytes`` of it are the rank's. ``parts`` says, for each parameter that is cut, which
    stretch the rank holds; parameters that are not named (norms, biases added after a sum) are held whole.
    """

    rank: int
    world: int
    config: DecoderConfig
    parts: Mapping[str, Part]

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """The rank's part of a parameter, as a view."""
        return self.parts[name].of(tensor) if name in self.parts else tensor


def shard(config: DecoderConfig, rank: int, world: int) -> Shard:
    """Plan what rank ``rank`` of ``world`` holds.

    Raises ValueError, naming the dimension and the number of ranks, for heads that cannot be dealt, for a width or a
    vocabulary too small to cut, and for layers that are not attention with a SwiGLU.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of 0 … {world - 1}")
    vocabulary = _chunk(config.vocab_size, rank, world, "vocab_size")
    parts = {"embed.weight": Part(0, vocabulary.start, vocabulary.stop)}
    if not config.tie_embeddings:
        parts["head.weight"] = parts["embed.weight"]
    layers = []
    for i, layer in enumerate(config.layers):
        mixer, feed_forward = layer.mixer, layer.feed_forward
        if not isinstance(mixer, AttentionConfig) or not isinstance(feed_forward, SwiGLUConfig):
            kinds = f"{type(mixer).__name__} with {type(feed_forward).__name__}"
            raise ValueError(f"layer {i} is {kinds}: only attention with a SwiGLU can be cut for {world} ranks")
        D = mixer.head_dim
        query, kv = deal_heads(mixer.num_heads, mixer.num_kv_heads, rank, world)
        channels = _chunk(feed_forward.intermediate_size, rank, world, "intermediate_size")
        rows = {
            "mixer.q_proj": (query.start * D, query.stop * D),
            "mixer.k_proj": (kv.start * D, kv.stop * D),
            "mixer.v_proj": (kv.start * D, kv.stop * D),
            "feed_forward.gate_proj": (channels.start, channels.stop),
            "feed_forward.up_proj": (channels.start, channels.stop),
        }
        for name, (start, stop) in rows.items():
            parts[f"layers.{i}.{name}.weight"] = Part(0, start, stop)
            if mixer.bias if name.startswith("mixer") else feed_forward.bias:
                parts[f"layers.{i}.{name}.bias"] = Part(0, start, stop)
        # The second matrix of each pair is cut by columns; its bias is added once, after the sum, and stays whole.
        parts[f"layers.{i}.mixer.o_proj.weight"] = Part(1, query.start * D, query.stop * D)
        parts[f"layers.{i}.feed_forward.down_proj.weight"] = Part(1, channels.start, channels.stop)
        layers.append(
            LayerConfig(
                mixer=replace(mixer, num_heads=len(query), num_kv_heads=len(kv)),
                feed_forward=replace(feed_forward, intermediate_size=len(channels)),
            )
        )
    own = replace(config, layers=tuple(layers), vocab_size=len(vocabulary))
    return Shard(rank=rank, world=world, config=own, parts=parts)


# --- the ranks ---------------------------------------------------------------------------------------


class RankLost(RuntimeError):
    """Another rank died, or did not answer in time."""


@contextmanager
def ranks(device: str | torch.device = "cpu", timeout: float = TIMEOUT) -> Iterator[dist.ProcessGroup]:
    """The process group that torchrun describes in the environment: NCCL where every rank has a GPU, else gloo.

    A collective that another rank does not join within ``timeout`` seconds, or whose partner is gone, ends this rank
    with :class:`RankLost`. Raises ValueError outside torchrun.
    """
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"{missing[0]} is not set: start the ranks with torchrun, as in "
            "torchrun --nproc-per-node 2 -m tokenbytoken generate --tensor-parallel …"
        )
    # Without enough GPUs the ranks meet all the same, so that load_parallel refuses with one voice.
    on_gpus = str(device).startswith("cuda") and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=timeout))
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RankLost(
            f"rank {group.rank()} of {group.size()} stops: another rank died, or did not answer within {timeout:.0f} s"
        ) from error
    finally:
        dist.destroy_process_group()


def settled(group: dist.ProcessGroup, error: str | None) -> str | None:
    """Every rank says what stopped it, or None; each learns what stopped any of them, or None if nothing did.

    A message that all ranks share is given once.
    """
    errors: list[str | None] = [None] * group.size()
    dist.all_gather_object(errors, error, group=group)
    if len(set(errors)) == 1:
        return errors[0]
    return "\n".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None)


# PyTorch's operations, plain and functional, by what they do.
_KINDS = {
    "c10d::allreduce_": "all-reduce",
    "_c10d_functional::all_reduce": "all-reduce",
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "c10d::broadcast_": "broadcast",
}
_SILENT = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}  # these send nothing


class Collectives(TorchDispatchMode):
    """Counts the collectives inside a ``with``: ``calls`` and ``nbytes``, each by kind.

    The bytes of an all-reduce or a broadcast are those of the tensor, those of an all-gather of what it gathers. A ring
    sends 2 (t - 1) / t of them over each link for an all-reduce, (t - 1) / t for an all-gather.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.nbytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, _dtensor()) for kind in types):
            return NotImplemented  # DTensor works first; then its own collectives come through here
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and name not in _SILENT:
            if name not in _KINDS:
                raise NotImplementedError(f"no rule to count {name}")
            kind = _KINDS[name]
            tensor = out if isinstance(out, Tensor) else args[0][0]
            self.calls[kind] = self.calls.get(kind, 0) + 1
            self.nbytes[kind] = self.nbytes.get(kind, 0) + tensor.numel() * tensor.element_size()
        return out


def _dtensor() -> type:
    from torch.distributed.tensor import DTensor  # two seconds to import, so only where it is used

    return DTensor


# --- the model ---------------------------------------------------------------------------------------


class SummedLinear(nn.Linear):
    """A linear layer cut by columns: every rank multiplies its own, the sum over the ranks is the product.

    The bias is added once, after the sum.
    """

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        dist.all_reduce(y, group=self.group)
        return y if self.bias is None else y + self.bias


def load_parallel(
    source: str | Path,
    group: dist.ProcessGroup,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Decoder:
    """This rank's share of ``source``, as a decoder that every rank of ``group`` calls with the same tokens.

    It is used like any other: the logits are whole on every rank, a state holds this rank's own key/value heads, and
    ``generate`` chooses the same tokens everywhere. Each tensor is read, cut and dropped: no rank ever holds the whole
    model. Raises ValueError as :func:`shard` and ``load`` do, before anything is read or sent.
    """
    device = usable_device(device)
    if device.type == "cuda" and dist.get_backend(group) != "nccl":
        raise ValueError(
            f"{group.size()} ranks on device 'cuda' need a GPU each: this machine has {torch.cuda.device_count()}"
        )
    config, tensors = open_source(source)
    return _build(config, tensors, group, dtype, device)


def parallelize(model: Decoder, group: dist.ProcessGroup) -> Decoder:
    """This rank's share of a model that is already in memory; see :func:`load_parallel`."""

    def stored(tensor: Tensor) -> Stored:
        return Stored(tuple(tensor.shape), lambda part: (tensor if part is None else part.of(tensor)).detach().clone())

    weight = model.embed.weight
    tensors = ((name, stored(parameter)) for name, parameter in model.named_parameters())
    return _build(model.config, tensors, group, weight.dtype, weight.device)


def _build(
    config: DecoderConfig,
    tensors: Iterable[tuple[str, Stored]],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    own = shard(config, group.rank(), group.size())
    # Seconds to import, so only where the plan stands.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with torch.device("meta"):
        whole, model = Decoder(config), Decoder(config)
        for layer, plan in zip(model.layers, own.config.layers, strict=True):
            assert isinstance(plan.mixer, AttentionConfig)
            layer.mixer = _own_attention(plan.mixer, config.hidden_size, group)
    mesh = DeviceMesh.from_group(group, device.type)
    # Pieces of unequal size must stay DTensors between the two products, or their total would be guessed; equal pieces
    # may be plain tensors, which cost less to handle.
    style: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate()),
                             "head": ColwiseParallel(output_layouts=Replicate())}  # fmt: skip
    for i, full in enumerate(config.layers):
        assert isinstance(full.feed_forward, SwiGLUConfig)
        plain = full.feed_forward.intermediate_size % group.size() == 0
        for name in ("gate_proj", "up_proj"):
            style[f"layers.{i}.feed_forward.{name}"] = ColwiseParallel(use_local_output=plain)
        style[f"layers.{i}.feed_forward.down_proj"] = RowwiseParallel()
    parallelize_module(model, mesh, style)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight  # one matrix of the vocabulary's rows, cut once
    placed = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}

    def wrap(name: str, tensor: Tensor) -> Tensor:
        if name not in placed:
            return tensor
        meta = placed[name]
        return DTensor.from_local(
            tensor, mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride()
        )

    model = fill(model, tensors, dtype, device, own.parts, wrap, whole).eval()
    model.agree = _Agreement(group)
    return model


def _own_attention(config: AttentionConfig, hidden_size: int, group: dist.ProcessGroup) -> nn.Module:
    from ..layers.attention import Attention

    attention = Attention(config, hidden_size)
    attention.o_proj = SummedLinear(config.num_heads * config.head_dim, hidden_size, bias=config.output_bias)
    attention.o_proj.group = group
    return attention


class _Agreement:
    """Rank 0's choice of tokens, on every rank: each samples for itself, and must not follow another sequence."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, tokens: Tensor) -> Tensor:
        chosen = tokens.clone()
        dist.broadcast(chosen, src=dist.get_global_rank(self.group, 0), group=self.group)
        return chosen
