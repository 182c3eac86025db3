"""Real weights and real files: SmolLM2 against transformers on the same GGUF, and directories transformers wrote."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import assert_close, llama, ours, random_tokens, reference_logits

import tokenbytoken as tbt
from tokenbytoken.measure import book_file

SMOLLM2 = "smollm2-135m"


@pytest.fixture(scope="module")
def smollm2() -> tbt.Decoder:
    return tbt.load(SMOLLM2)


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    path = tbt.checkpoint.find(SMOLLM2)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def prompts() -> list[list[int]]:
    tokenizer = tbt.load_tokenizer(SMOLLM2)
    passage = tokenizer.encode(book_file("data/passage.txt").read_text(encoding="utf-8"))
    texts = [
        "The capital of France is",
        "def mean(values):\n    return sum(values) / len(values)  # 1234",
        "Ünïcödé ☃ 日本語",
        tokenizer.chat([{"role": "user", "content": "Why is the sky blue?"}]),
    ]
    return [*(tokenizer.encode(text) for text in texts), passage[:600], [0]]


def test_smollm2_logits_equal_transformers(smollm2: tbt.Decoder, reference: Any) -> None:
    """Every position of six prompts, one of 600 tokens.

    The weights are bit for bit the same, so only the order of float32 sums differs: thirty layers of sums of 576
    and 1,536 terms. 1e-5 of the logit scale (about 30) is eighty units in the last place; we see about 2e-6.
    """
    checked = prompts()
    assert len(checked[4]) == 600
    for prompt in checked:
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            assert_close(smollm2(tokens), reference_logits(reference, tokens), relative=1e-5)


def test_smollm2_weights_are_those_of_transformers(smollm2: tbt.Decoder, reference: Any) -> None:
    theirs = reference.state_dict()
    assert torch.equal(smollm2.embed.weight, theirs["model.embed_tokens.weight"])
    assert smollm2.head.weight is smollm2.embed.weight
    for i, layer in enumerate(smollm2.layers):
        prefix = f"model.layers.{i}."
        assert torch.equal(layer.mixer.q_proj.weight, theirs[prefix + "self_attn.q_proj.weight"])
        assert torch.equal(layer.mixer.k_proj.weight, theirs[prefix + "self_attn.k_proj.weight"])
        assert torch.equal(layer.feed_forward.down_proj.weight, theirs[prefix + "mlp.down_proj.weight"])
    assert smollm2.config.name.startswith("SmolLM2")
    published = tbt.published[SMOLLM2]
    assert (smollm2.config.layers, smollm2.config.norm_eps) == (published.layers, published.norm_eps)
    assert sum(p.numel() for p in smollm2.parameters()) == 134_515_008


def test_tokenizer_equals_transformers() -> None:
    from transformers import AutoTokenizer

    path = tbt.checkpoint.find(SMOLLM2)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    mine = tbt.load_tokenizer(SMOLLM2)
    passage = book_file("data/passage.txt").read_text(encoding="utf-8")
    for text in [
        "", " ", "  two  spaces\n\n\ttabs", "12345 6.78e9", "it's we'll I'M", "naïve café — ☃ 日本語 🙂",
        "<|im_start|>user\nHi<|im_end|>", "a" * 300, passage,
    ]:  # fmt: skip
        ids = mine.encode(text)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        assert mine.decode(ids) == text
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    for chat in (messages, messages[1:2]):
        assert mine.chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert mine.eos_ids == (2,)
    assert mine.vocab_size == 49_152
    assert mine.decode(mine.encode("日")[:1]) == "\ufffd"  # half a character


# --- directories -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [False, True])
def test_sharded_directory(tie: bool, tmp_path: Path) -> None:
    reference = llama(tie_word_embeddings=tie)
    model = ours(reference, tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
    tokens = random_tokens(2, 20)
    assert_close(model(tokens), reference_logits(reference, tokens))


def test_dtype_and_gradients(tmp_path: Path) -> None:
    ours(llama(), tmp_path)
    model = tbt.load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training


def test_a_checkpoint_that_stores_the_tied_head_loads(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    reference = llama(tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens = random_tokens(1, 5)
    assert_close(tbt.load(tmp_path)(tokens), reference_logits(reference, tokens))


def test_directory_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = tbt.checkpoint.find(SMOLLM2)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    mine = tbt.load_tokenizer(tmp_path)
    assert mine.eos_ids == (2, 0)
    assert mine.encode("Hello world 42") == theirs("Hello world 42").input_ids


# --- bad files -----------------------------------------------------------------------------------------


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(fields)
    (folder / "config.json").write_text(json.dumps(config))


def drop_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BAD = {
    "missing tensor": (drop_tensor, r"lacks tensor layers\.1\.feed_forward\.up_proj\.weight"),
    "extra tensor": (add_tensor, r"layers\.1\.mixer\.q_norm\.weight .* no place"),
    "misshapen": (lambda f: edit(f, intermediate_size=95), r"feed_forward\.gate_proj\.weight has shape \(96, 64\)"),
    "too few layers": (lambda f: edit(f, num_hidden_layers=2), r"layers\.2\.\S+ .* no place"),
    "too many layers": (lambda f: edit(f, num_hidden_layers=4), r"lacks tensor layers\.3\.\S+ and 8 more"),
    "model type": (lambda f: edit(f, model_type="gpt2"), "model_type 'gpt2'"),
    "rope": (lambda f: edit(f, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
    "activation": (lambda f: edit(f, hidden_act="gelu"), "hidden_act = 'gelu'"),
    "no config": (lambda f: (f / "config.json").unlink(), r"holds no config\.json"),
    "bad json": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"lacks the weights file model\.safetensors"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_directories_are_refused(fault: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    spoil, words = BAD[fault]
    spoil(tmp_path)
    with pytest.raises(ValueError, match=words):
        tbt.load(tmp_path)


def test_missing_or_outside_shard_is_refused(tmp_path: Path) -> None:
    ours(llama(), tmp_path, max_shard_size="60KB")
    shard = next(tmp_path.glob("model-*.safetensors"))
    shard.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"lacks the weights file {shard.name}"):
        tbt.load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard.name, "../elsewhere"))
    with pytest.raises(ValueError, match=r"\.\./elsewhere"):
        tbt.load(tmp_path)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="smollm3"):
        tbt.load("smollm3")
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(ValueError, match=r"model\.bin"):
        tbt.load(tmp_path / "model.bin")
    (tmp_path / "model.gguf").write_bytes(b"not a GGUF file at all, but long enough to look at")
    with pytest.raises(ValueError, match="not a readable GGUF file"):
        tbt.load(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        tbt.load_tokenizer(tmp_path)


def test_a_truncated_gguf_is_refused(tmp_path: Path) -> None:
    whole = tbt.checkpoint.find(SMOLLM2)
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as source, cut.open("wb") as target:
        shutil.copyfileobj(source, target)
        target.truncate(20_000_000)
    with pytest.raises(ValueError, match=r"cut\.gguf is not a readable GGUF file"):
        tbt.load(cut)


def test_a_replaced_file_is_read_anew(tmp_path: Path) -> None:
    reader = tbt.checkpoint.gguf_reader(tbt.checkpoint.find(SMOLLM2))
    assert tbt.checkpoint.gguf_reader(tbt.checkpoint.find(SMOLLM2)) is reader
    copy = tmp_path / "model.gguf"
    shutil.copyfile(tbt.checkpoint.find(SMOLLM2), copy)
    before = tbt.checkpoint.gguf_reader(copy)
    os.utime(copy, ns=(1, 1))
    assert tbt.checkpoint.gguf_reader(copy) is not before


def test_a_damaged_safetensors_file_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 7)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable"):
        tbt.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json holds no JSON object"):
        tbt.load(tmp_path)
