"""Real weights and real files: SmolLM2 against transformers on the same GGUF, and directories transformers wrote."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import assert_close, llama, ours, random_tokens, reference_logits

import tokenbytoken as tbt
from tokenbytoken.layers import Attention, SwiGLU
from tokenbytoken.measure import book_file

SMOLLM2 = "smollm2-135m"


@pytest.fixture(scope="module")
def smollm2() -> tbt.Decoder:
    return tbt.load(SMOLLM2)


# transformers asks for the first again for the configuration, the weights and the tokenizer, and for the second again
# for each of 397 modules: half a minute for the same answers.
ONCE = {name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}


def from_gguf(auto: Any, **options: Any) -> Any:
    """What transformers makes of the file, with the library's own reader."""
    path = tbt.checkpoints.find(SMOLLM2)
    with pytest.MonkeyPatch.context() as patch:
        for name, cached in ONCE.items():
            patch.setattr(gguf, name, cached)
        return auto.from_pretrained(path.parent, gguf_file=path.name, **options)


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return from_gguf(AutoModelForCausalLM, dtype=torch.float32).eval()


def prompts() -> list[list[int]]:
    tokenizer = tbt.load_tokenizer(SMOLLM2)
    passage = tokenizer.encode(book_file("data/passage.txt").read_text(encoding="utf-8"))
    texts = [
        "The capital of France is",
        "def mean(values):\n    return sum(values) / len(values)  # 1234",
        "Ünïcödé ☃ 日本語",
        tokenizer.chat([{"role": "user", "content": "Why is the sky blue?"}]),
    ]
    return [*(tokenizer.encode(text) for text in texts), passage[:300], [0]]


def test_smollm2_logits_equal_transformers(smollm2: tbt.Decoder, reference: Any) -> None:
    """Every position of six prompts, one of 300 tokens.

    The weights are bit for bit the same, so only the order of float32 sums differs: thirty layers of sums of 576
    and 1,536 terms. 1e-5 of the logit scale (about 30) is eighty units in the last place; we see about 2e-6.
    """
    checked = prompts()
    assert len(checked[4]) == 300
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
        mixer, feed_forward = layer.mixer, layer.feed_forward
        assert isinstance(mixer, Attention)
        assert isinstance(feed_forward, SwiGLU)
        assert torch.equal(mixer.q_proj.weight, theirs[prefix + "self_attn.q_proj.weight"])
        assert torch.equal(mixer.k_proj.weight, theirs[prefix + "self_attn.k_proj.weight"])
        assert torch.equal(feed_forward.down_proj.weight, theirs[prefix + "mlp.down_proj.weight"])
    assert smollm2.config.name.startswith("SmolLM2")
    published = tbt.published[SMOLLM2]
    assert (smollm2.config.layers, smollm2.config.norm_eps) == (published.layers, published.norm_eps)
    assert sum(p.numel() for p in smollm2.parameters()) == 134_515_008


@pytest.fixture(scope="module")
def reference_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return from_gguf(AutoTokenizer)


def test_tokenizer_equals_transformers(reference_tokenizer: Any) -> None:
    theirs = reference_tokenizer
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
    for bad in ("float32", torch.int8, torch.float8_e4m3fn, None):
        with pytest.raises(ValueError, match=r"dtype must be torch\.float32, float64, bfloat16 or float16, not"):
            tbt.load(tmp_path, bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="source must be a name or a path, not None"):
        tbt.load(None)  # type: ignore[arg-type]


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of eight words, as transformers writes it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ("<|unk|>", "<|im_start|>", "<|im_end|>", "Hi", "Hello", "world", "4", "2")
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=words[0], bos_token=words[1], eos_token=words[2],
        chat_template="{% for m in messages %}{{ bos_token + m.role + ' ' + m.content + eos_token }}{% endfor %}",
    )  # fmt: skip
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def edit(file: Path, **fields: Any) -> None:
    """Set fields of a JSON file; ``...`` takes one away."""
    found = (json.loads(file.read_text()) if file.exists() else {}) | fields
    file.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))


CHAT = [{"role": "user", "content": "Hi"}]


def test_directory_tokenizer(reference_tokenizer: Any, tmp_path: Path) -> None:
    theirs = reference_tokenizer
    theirs.save_pretrained(tmp_path)
    mine = tbt.load_tokenizer(tmp_path)
    assert mine.encode("Hello world 42") == theirs("Hello world 42").input_ids
    assert mine.eos_ids == (theirs.eos_token_id,)  # no config.json: the tokenizer's own
    assert (tmp_path / "chat_template.jinja").exists()  # how transformers 5 stores it
    assert mine.chat(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("stored", ["file and field", "field", "list", "list without a default", "nowhere"])
def test_chat_templates_wherever_they_are_stored(stored: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    loop = "{% for m in messages %}{% if not loop.first %}{% break %}{% endif %}{{ m.content + eos_token }}{% endfor %}"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": loop}]
    if stored != "file and field":
        file.unlink()
    field = {"list": named, "list without a default": named[:1], "nowhere": ...}.get(stored, loop)
    edit(config, chat_template=field)
    mine, theirs = tbt.load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    if stored in ("list without a default", "nowhere"):
        with pytest.raises(ValueError, match="no chat template, or none of several is named 'default'"):
            mine.chat(CHAT)
        return
    chat = [*CHAT, {"role": "assistant", "content": "Hello"}]
    assert mine.chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("generation", "config", "token", "want"),
    [
        ([2, 0], 5, "<|im_end|>", (2, 0)),
        (7, 5, "<|im_end|>", (7,)),
        (None, 5, "<|im_end|>", (5,)),
        (..., [5, 6], "<|im_end|>", (5, 6)),
        (None, None, "<|im_start|>", (1,)),
        (..., ..., {"content": "<|im_start|>", "lstrip": False, "__type": "AddedToken"}, (1,)),
        (..., 0, None, (0,)),
        (..., ..., None, ()),
    ],
)
def test_what_ends_a_text(generation: Any, config: Any, token: Any, want: tuple[int, ...], folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=generation)
    edit(folder / "config.json", eos_token_id=config)
    edit(folder / "tokenizer_config.json", eos_token=token)
    assert tbt.load_tokenizer(folder).eos_ids == want


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("config.json", {"eos_token_id": "2"}, "eos_token_id must be an integer of at least 0, not '2'"),
        ("config.json", {"eos_token_id": [2, True]}, "eos_token_id must be an integer of at least 0, not True"),
        ("tokenizer_config.json", {"eos_token": "<|fin|>"}, r"eos_token '<\|fin\|>' is not in the vocabulary"),
        ("tokenizer_config.json", {"bos_token": {"text": "<s>"}}, "bos_token = .* is no token"),
        ("tokenizer_config.json", {"unk_token": 3}, "unk_token = 3 is no token"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template = 3 is no text"),
        ("tokenizer.json", {"model": 3}, r"tokenizer\.json is not a readable tokenizer"),
    ],
)
def test_bad_tokenizer_files_are_refused(name: str, fields: dict[str, Any], words: str, folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder / name, **fields)
    with pytest.raises(ValueError, match=words):
        tbt.load_tokenizer(folder)


def test_a_template_that_fails_is_named(folder: Path) -> None:
    for text in ("{% for %}", "{{ messages.nothing.there }}", "{{ raise_exception('no') }}"):
        (folder / "chat_template.jinja").write_text(text)
        with pytest.raises(ValueError, match=r"the chat template (fails on|refuses) these messages"):
            tbt.load_tokenizer(folder).chat(CHAT)


# --- bad files -----------------------------------------------------------------------------------------


def config(**fields: Any) -> Callable[[Path], None]:
    """What sets fields of a folder's config.json."""
    return lambda folder: edit(folder / "config.json", **fields)


def drop_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_tensor(folder: Path, name: str = "model.layers.1.self_attn.q_norm.weight") -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BAD = {
    "missing tensor": (drop_tensor, r"lacks tensor layers\.1\.feed_forward\.up_proj\.weight"),
    "extra tensor": (add_tensor, r"layers\.1\.mixer\.q_norm\.weight .* no place"),
    "misshapen": (config(intermediate_size=95), r"feed_forward\.gate_proj\.weight has shape \(96, 64\)"),
    "too few layers": (config(num_hidden_layers=2), r"layers\.2\.\S+ .* no place"),
    "too many layers": (config(num_hidden_layers=4), r"lacks tensor layers\.3\.\S+ and 8 more"),
    "model type": (config(model_type="gpt2"), "model_type 'gpt2'"),
    "rope": (config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
    "activation": (config(hidden_act="gelu"), "hidden_act = 'gelu'"),
    "type of a field": (config(tie_word_embeddings="false"), "tie_word_embeddings must be true or"),
    "no text": (lambda f: (f / "config.json").write_bytes(b'{"name": "\xff"}'), r"config\.json is not valid JSON"),
    "index without a map": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}'),
        r"index\.json has no weight_map",
    ),
    "twice": (lambda f: add_tensor(f, "embed.weight"), r"holds tensor embed\.weight twice"),
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
    whole = tbt.checkpoints.find(SMOLLM2)
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as source, cut.open("wb") as target:
        shutil.copyfileobj(source, target)
        target.truncate(20_000_000)
    with pytest.raises(ValueError, match=r"cut\.gguf is not a readable GGUF file"):
        tbt.load(cut)


def write_gguf(path: Path, changes: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> None:
    """A Llama of one layer; ``...`` leaves a field or a tensor out."""
    M, F, V = 8, 12, 5
    fields = {
        "embedding_length": M, "block_count": 1, "feed_forward_length": F, "context_length": 64,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    shapes = {
        "token_embd": (V, M), "output_norm": (M,), "blk.0.attn_norm": (M,), "blk.0.ffn_norm": (M,),
        "blk.0.attn_q": (M, M), "blk.0.attn_k": (M // 2, M), "blk.0.attn_v": (M // 2, M), "blk.0.attn_output": (M, M),
        "blk.0.ffn_gate": (F, M), "blk.0.ffn_up": (F, M), "blk.0.ffn_down": (M, F),
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (fields | (changes or {})).items():
        if value is ...:
            continue
        kind = {bool: "bool", int: "int32", float: "float32", str: "string", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(name if name.startswith("tokenizer.") else f"llama.{name}", value)
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {f"{name}.weight": draw.standard_normal(shape) for name, shape in shapes.items()}
    for name, array in (arrays | (tensors or {})).items():
        if array is not ...:
            writer.add_tensor(name, array if array.dtype == np.int32 else array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


BAD_GGUF: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no heads": ({"attention.head_count": 0}, {}, r"llama\.attention\.head_count must be a positive integer, not 0"),
    "heads by layer": ({"attention.head_count": [2]}, {}, r"head_count must be a positive integer, not \[2\]"),
    "heads that do not divide": ({"attention.head_count": 3}, {}, r"embedding_length \(8\) is no multiple"),
    "negative": ({"attention.head_count_kv": -1}, {}, "head_count_kv must be a positive integer, not -1"),
    "text for a number": ({"embedding_length": "8"}, {}, "embedding_length must be a positive integer, not '8'"),
    "fraction": ({"block_count": 1.0}, {}, "block_count must be a positive integer, not 1.0"),
    "text for epsilon": ({"attention.layer_norm_rms_epsilon": "x"}, {}, "layer_norm_rms_epsilon must be a number"),
    "theta that is none": ({"rope.freq_base": float("nan")}, {}, "freq_base must be a number, not nan"),
    "missing field": ({"feed_forward_length": ...}, {}, r"GGUF field llama\.feed_forward_length is missing"),
    "experts": ({"expert_count": 8}, {}, "expert_count = 8 cannot be represented"),
    "part of a head turned": ({"rope.dimension_count": 2}, {}, "dimension_count = 2 cannot be represented"),
    "no embedding": ({}, {"token_embd.weight": ...}, r"lacks tensor token_embd\.weight"),
    "flat embedding": ({}, {"token_embd.weight": np.ones(40)}, r"lacks tensor token_embd\.weight, a matrix"),
    "odd name": ({}, {"blk.0.attn-q weight": np.ones(3)}, "'blk.0.attn-q weight' of the checkpoint has no place"),
    "name without a leaf": ({}, {"rope_freqs": np.ones(3)}, "'rope_freqs' of the checkpoint has no place"),
    "unknown": ({}, {"blk.0.attn_sinks.weight": np.ones(3)}, r"attn_sinks\.weight of the checkpoint has no place"),
    "unknown layer": ({}, {"blk.7.attn_q.weight": np.ones(3)}, r"layers\.7\.\S+ of the checkpoint has no place"),
    "twice": ({}, {"embed.weight": np.ones((5, 8))}, r"holds tensor embed\.weight twice"),
    "flat queries": ({}, {"blk.0.attn_q.weight": np.ones(64)}, r"q_proj\.weight has shape \(64,\), .* \(8, 8\)"),
    "odd queries": ({}, {"blk.0.attn_q.weight": np.ones((7, 8))}, r"q_proj\.weight has shape \(7, 8\)"),
    "width": ({"embedding_length": 16}, {}, r"shape \(5, 8\), the config asks for \(5, 16\)"),
    "integers": ({}, {"output_norm.weight": np.ones(8, np.int32)}, "type I32 cannot be expanded"),
}


@pytest.mark.parametrize("fault", BAD_GGUF)
def test_bad_gguf_files_are_refused(fault: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "good.gguf")
    assert tbt.load(tmp_path / "good.gguf")(torch.tensor([[1, 4]])).isfinite().all()
    fields, tensors, words = BAD_GGUF[fault]
    write_gguf(tmp_path / "bad.gguf", fields, tensors)
    with pytest.raises(ValueError, match=words):
        tbt.load(tmp_path / "bad.gguf")


WORDS: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "<|end|>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 4,
}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tokens", [1, 2, 3, 4, 5], r"tokenizer\.ggml\.tokens must be an array of str"),
        ("tokens", "abc", r"tokenizer\.ggml\.tokens must be an array of str"),
        ("tokens", ..., r"tokenizer\.ggml\.tokens is missing"),
        ("merges", ["ab"], "tokens and .merges make no vocabulary"),
        ("merges", ["b z"], "tokens and .merges make no vocabulary"),
        ("token_type", [1, 1], "token_type has 2 entries for 5 tokens"),
        ("eos_token_id", 5, "eos_token_id = 5 is outside the 5 tokens"),
        ("eos_token_id", "a", "eos_token_id must be an integer of at least 0, not 'a'"),
    ],
)
def test_bad_gguf_tokenizers_are_refused(field: str, value: Any, words: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "good.gguf", WORDS)
    tokenizer = tbt.load_tokenizer(tmp_path / "good.gguf")
    assert (tokenizer.encode("cab<|end|>"), tokenizer.eos_ids) == ([2, 3, 4], (4,))
    write_gguf(tmp_path / "bad.gguf", WORDS | {f"tokenizer.ggml.{field}": value})
    with pytest.raises(ValueError, match=words):
        tbt.load_tokenizer(tmp_path / "bad.gguf")


def test_a_device_that_is_not_there_is_refused() -> None:
    for device in ("gpu", "cuda:99", "meta:x"):
        with pytest.raises(ValueError, match=f"device '{device}' cannot be used here: ."):
            tbt.load(SMOLLM2, device=device)


def test_a_replaced_file_is_read_anew(tmp_path: Path) -> None:
    reader = tbt.checkpoints.gguf_reader(tbt.checkpoints.find(SMOLLM2))
    assert tbt.checkpoints.gguf_reader(tbt.checkpoints.find(SMOLLM2)) is reader
    copy = tmp_path / "model.gguf"
    shutil.copyfile(tbt.checkpoints.find(SMOLLM2), copy)
    before = tbt.checkpoints.gguf_reader(copy)
    os.utime(copy, ns=(1, 1))
    assert tbt.checkpoints.gguf_reader(copy) is not before


def test_a_damaged_safetensors_file_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 7)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable"):
        tbt.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json holds no JSON object"):
        tbt.load(tmp_path)
