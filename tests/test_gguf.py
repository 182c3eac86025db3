"""Reading GGUF: what is shortened here for speed gives bit for bit what the gguf library gives."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

import tokenbytoken as tbt
from tokenbytoken.checkpoints.gguf_fast import _BLOCKS, expand, gguf_reader

SMOLLM2 = tbt.checkpoints.find("smollm2-135m")


def test_fields_are_those_of_the_library() -> None:
    ours, theirs = gguf_reader(SMOLLM2), gguf.GGUFReader(SMOLLM2)
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert ours.fields[name].contents() == field.contents(), name
    assert [(t.name, t.tensor_type, t.shape.tolist(), t.data_offset) for t in ours.tensors] == [
        (t.name, t.tensor_type, t.shape.tolist(), t.data_offset) for t in theirs.tensors
    ]


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.Q4_0, Kind.F16, Kind.F32])
@pytest.mark.parametrize("rows", [1, 3])
def test_expansion_is_the_librarys_to_the_bit(kind: Kind, rows: int) -> None:
    values = np.random.default_rng(0).standard_normal((rows, 32 * 25)).astype(np.float32)
    values[0, :32] = 0
    data = quantize(values, kind)
    want = torch.from_numpy(dequantize(data, kind).astype(np.float32))
    assert torch.equal(expand(data, kind).float().view(rows, -1), want)


def test_expansion_goes_on_past_its_first_blocks() -> None:
    values = np.random.default_rng(1).standard_normal((1, 32 * (_BLOCKS + 5))).astype(np.float32)
    data = quantize(values, Kind.Q4_1)
    assert torch.equal(expand(data, Kind.Q4_1), torch.from_numpy(dequantize(data, Kind.Q4_1).reshape(-1)))


def test_every_tensor_of_the_model_is_the_librarys() -> None:
    for tensor in gguf_reader(SMOLLM2).tensors:
        if tensor.name in ("token_embd.weight", "output_norm.weight") or tensor.name.startswith("blk.17."):
            want = dequantize(tensor.data.reshape(1, -1), tensor.tensor_type).reshape(-1)
            assert torch.equal(expand(tensor.data, tensor.tensor_type), torch.from_numpy(want.copy())), tensor.name


@pytest.mark.parametrize("kind", ["strings", "numbers"])
def test_an_array_longer_than_the_file_is_refused(kind: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_array("letters", ["a", "b"] if kind == "strings" else [7, 9])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    count = data.rindex((2).to_bytes(8, "little"))
    data[count : count + 8] = (3000).to_bytes(8, "little")
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.gguf is not a readable GGUF file.*past the end"):
        gguf_reader(tmp_path / "model.gguf")
