"""Train the siblings: small byte-level models of equal size and training, one for each architecture.

    python book/experiments/siblings.py                        every run that siblings.json lacks
    python book/experiments/siblings.py --names gqa --seeds 1  these only
    python book/experiments/siblings.py --quick --folder F     a few steps of each, to see that it works

All twenty-one runs take about an hour on one core.

A run is one (name, seed). Its curve, minutes and losses are written to siblings.json as soon as it ends, and the
weights of seed 0 beside the package, so that a run that was stopped is the only one repeated. Every architecture
sees the same bytes in the same order. To add a sibling, add its Hugging Face config to ``SIBLINGS``.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import platform
import re
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

import tokenbytoken as tbt
from tokenbytoken.layers.feed_forward import Router
from tokenbytoken.measure import book_file

HERE = Path(__file__).resolve().parent
WEIGHTS = Path(tbt.__file__).resolve().parent / "weights"

SHAPE = {
    "vocab_size": 256,  # a token is a byte
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
}
LATENT = {  # 32 + 8 numbers a token and layer, where the eight heads of "mha" keep 256
    "model_type": "deepseek_v3",
    **SHAPE,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 317,
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
# The feed-forward takes up what keys and values give away: 2 · 128 · 16 weights for each KV head, 3 · 128 for each
# unit of width. From 8 heads to 2 that is exactly 64 units, to 1 it is 74.7.
SIBLINGS: dict[str, dict[str, Any]] = {
    "mha": {"model_type": "llama", **SHAPE, "num_key_value_heads": 8, "intermediate_size": 288},
    "gqa": {"model_type": "llama", **SHAPE, "num_key_value_heads": 2, "intermediate_size": 352},
    "mqa": {"model_type": "llama", **SHAPE, "num_key_value_heads": 1, "intermediate_size": 363},
    "mla": {**LATENT, "first_k_dense_replace": 6},
    # 13 experts of width 24 are as large as one feed-forward of width 317, and a token passes through four of them.
    "mla-moe": {**LATENT, "first_k_dense_replace": 1},
    # A Mamba layer has no feed-forward beside it: nine are as large as six of attention.
    "mamba": {
        "model_type": "mamba",
        **{field: SHAPE[field] for field in ("vocab_size", "hidden_size", "hidden_act", "tie_word_embeddings")},
        **{field: SHAPE[field] for field in ("bos_token_id", "eos_token_id", "torch_dtype")},
        "num_hidden_layers": 9,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "intermediate_size": 256,
        "state_size": 16,
        "conv_kernel": 4,
        "time_step_rank": 8,
        "use_bias": False,
        "use_conv_bias": True,
    },
    # One attention layer, the fourth of six. It knows no positions: Jamba has no rotation.
    "hybrid": {
        "model_type": "jamba",
        **{field: value for field, value in SHAPE.items() if field != "rope_theta"},
        "num_key_value_heads": 2,
        "intermediate_size": 188,
        "attn_layer_period": 6,
        "attn_layer_offset": 3,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
}
SEEDS = (0, 1, 2)
# Short sequences first, because attention costs less there; a batch is always 512 bytes.
RECIPE: dict[str, Any] = {
    "steps": 500,
    "batch_bytes": 512,
    "lengths": [[0.75, 128], [1.0, 256]],  # up to this share of the steps, sequences of this length
    "learning_rate": 4e-3,
    "warmup": 25,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "clip": 1.0,
}
QUICK: dict[str, Any] = {**RECIPE, "steps": 8, "warmup": 2}
BIAS_STEP = 1e-3  # by which an expert's selection bias moves after each step, as in DeepSeek-V3


# --- The text ----------------------------------------------------------------------------------------


def documents() -> Iterator[str]:
    """English that every Python carries, and this book's prose as it stood when the first sibling was trained."""
    from pydoc_data.topics import topics

    yield from topics.values()
    library = Path(sysconfig.get_path("stdlib"))
    yield from (path.read_text(encoding="utf-8") for path in sorted(library.glob("LICENSE*")))
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
    for path in sorted(library.rglob("*.py")):
        if not skipped & set(path.relative_to(library).parts):
            yield "\n\n".join(docstrings(path.read_text(encoding="utf-8", errors="replace")))
    yield from re.split(r"\n(?=# )", (HERE / "siblings_prose.txt").read_text(encoding="utf-8"))


def docstrings(source: str) -> Iterator[str]:
    """Those of a module and of all that it defines. Expressions define nothing, and are most of a tree: left out."""
    nodes: deque[ast.AST] = deque([ast.parse(source)])
    while nodes:
        node = nodes.popleft()
        inside = ast.iter_child_nodes(node)
        nodes.extend(child for child in inside if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) > 60:  # shorter ones are labels, not English
                yield text


@lru_cache(maxsize=1)
def texts() -> tuple[np.ndarray, np.ndarray]:
    """(training, held out) bytes: every twentieth document is held out, and none occurs twice."""
    parts: list[bytes] = sorted({text.strip().encode() + b"\n\n" for text in documents() if text.strip()})
    order = np.random.default_rng(0).permutation(len(parts))
    kept = b"".join(parts[i] for i in order if i % 20)
    held = b"".join(parts[i] for i in order if i % 20 == 0)
    return np.frombuffer(kept, np.uint8), np.frombuffer(held, np.uint8)


def provenance(train: np.ndarray, held: np.ndarray) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "train_bytes": len(train),
        "held_out_bytes": len(held),
        "sha256": hashlib.sha256(train.tobytes() + held.tobytes()).hexdigest(),
    }


# --- A run -------------------------------------------------------------------------------------------


def fresh(hf: dict[str, Any], seed: int) -> tbt.Decoder:
    """Random weights of variance 1 / fan-in; layers that write into the residual stream are scaled down.

    The embedding is also the head, and counts as one. Ten times smaller, and a short training would spend itself on
    letting the logits grow.
    """
    torch.manual_seed(seed)
    model = tbt.Decoder(tbt.DecoderConfig.from_hf(hf))
    writes = sum(1 + (layer.feed_forward is not None) for layer in model.config.layers)
    for name, weight in model.named_parameters():
        name = name.removesuffix(".weight")
        if name.endswith("_proj") and not name.endswith("dt_proj"):  # Mamba's Δ has a start of its own
            last = name.endswith(("o_proj", "down_proj", "out_proj"))
            nn.init.normal_(weight, std=(weight.shape[-1] * (writes if last else 1)) ** -0.5)
    nn.init.normal_(model.embed.weight, std=model.config.hidden_size**-0.5)
    return model


def batches(train: np.ndarray, recipe: dict[str, Any], seed: int) -> Iterator[Tensor]:
    """(B, T + 1) of bytes for each step, the same for every architecture of this seed."""
    rng = np.random.default_rng(seed)
    for step in range(recipe["steps"]):
        length = next(n for share, n in recipe["lengths"] if step < share * recipe["steps"])
        starts = rng.integers(0, len(train) - length, recipe["batch_bytes"] // length)
        yield torch.from_numpy(np.stack([train[s : s + length + 1] for s in starts]).astype(np.int64))


def rate(step: int, recipe: dict[str, Any]) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step < recipe["warmup"]:
        return recipe["learning_rate"] * (step + 1) / recipe["warmup"]
    share = (step - recipe["warmup"]) / (recipe["steps"] - recipe["warmup"])
    return recipe["learning_rate"] * 0.5 * (1 + math.cos(math.pi * share))


def train(hf: dict[str, Any], seed: int, data: np.ndarray, recipe: dict[str, Any]) -> tuple[tbt.Decoder, list[Any]]:
    """A trained model and its curve, [[bytes seen, mean loss since the last point], …] in nats a byte."""
    model = fresh(hf, seed)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": recipe["weight_decay"]}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=tuple(recipe["betas"]), fused=True)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    loads = [torch.zeros(router.config.num_experts) for router in routers]
    for router, load in zip(routers, loads, strict=True):
        router.register_forward_hook(partial(count_choices, load))
    curve, recent = [], []
    for step, batch in enumerate(batches(data, recipe, seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, recipe)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"])
        optimizer.step()
        for router, load in zip(routers, loads, strict=True):
            assert router.selection_bias is not None
            router.selection_bias.data.add_((load.mean() - load).sign_(), alpha=BIAS_STEP)
            load.zero_()
        recent.append(loss.item())
        if (step + 1) % max(1, recipe["steps"] // 40) == 0:
            curve.append([(step + 1) * recipe["batch_bytes"], round(float(np.mean(recent)), 4)])
            recent.clear()
    for router in routers:
        router._forward_hooks.clear()
    return model.eval(), curve


def count_choices(load: Tensor, router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    """Add to ``load`` (E,) how many tokens chose each expert."""
    load += output[1].flatten().bincount(minlength=len(load))


# --- What it learnt ----------------------------------------------------------------------------------


@torch.no_grad()
def nats_per_byte(model: tbt.Decoder, text: np.ndarray, window: int = 256) -> float:
    """Mean cross-entropy of the text in windows that each begin with nothing before them."""
    total = count = 0.0
    for start in range(0, len(text) - 1, window):
        part = torch.from_numpy(text[start : start + window + 1].astype(np.int64))[None]
        total += F.cross_entropy(model(part[:, :-1])[0], part[0, 1:], reduction="sum").item()
        count += part.shape[1] - 1
    return total / count


def passage() -> np.ndarray:
    return np.frombuffer(book_file("data/passage.txt").read_bytes(), np.uint8)


def rounded(model: tbt.Decoder) -> tbt.Decoder:
    """The model as it is kept: weights rounded to bfloat16, computed in float32."""
    for parameter in model.parameters():
        parameter.requires_grad_(False).copy_(parameter.bfloat16().float())
    return model


def save(model: tbt.Decoder, hf: dict[str, Any], folder: Path) -> None:
    """A Hugging Face directory: config, tokenizer, and weights in bfloat16 under the names of its library."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n", encoding="utf-8")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tensors = {}
    for name, parameter in model.named_parameters():
        name, weight = hf_name(name, hf["model_type"]), parameter.detach().bfloat16()
        if ".experts." in name:  # stored one by one
            before, after = name.split(".experts.")
            tensors.update({f"{before}.experts.{e}.{after}.weight": w.clone() for e, w in enumerate(weight)})
        else:
            tensors[name] = weight.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def byte_tokenizer() -> Tokenizer:
    """A token is a byte, and its id is the byte's value."""
    # GPT-2's alphabet writes a printable byte as itself, and the others, in their order, from U+0100 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    backend = Tokenizer(models.BPE({chr(b if b in printable else next(others)): b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


HF_NAMES: dict[str, dict[str, str]] = {  # by model type, in this order
    "llama": {
        r"^embed\.": "model.embed_tokens.",
        r"^norm\.": "model.norm.",
        r"^layers\.": "model.layers.",
        r"\.mixer_norm\.": ".input_layernorm.",
        r"\.feed_forward_norm\.": ".post_attention_layernorm.",
        r"\.mixer\.": ".self_attn.",
        r"\.feed_forward\.": ".mlp.",
    },
    "mamba": {
        r"^embed\.": "backbone.embeddings.",
        r"^norm\.": "backbone.norm_f.",
        r"^layers\.": "backbone.layers.",
        r"\.mixer_norm\.": ".norm.",
        r"\.dt_bias$": ".dt_proj.bias",
    },
}
HF_NAMES["deepseek_v3"] = {
    r"\.mixer\.kv_a_proj\.": ".self_attn.kv_a_proj_with_mqa.",
    r"\.mixer\.kv_a_norm\.": ".self_attn.kv_a_layernorm.",
    r"\.feed_forward\.router\.selection_bias$": ".mlp.gate.e_score_correction_bias",
    r"\.feed_forward\.router\.": ".mlp.gate.",
    r"\.feed_forward\.shared\.": ".mlp.shared_experts.",
    **HF_NAMES["llama"],
}
HF_NAMES["jamba"] = {
    r"^embed\.": "model.embed_tokens.",
    r"^norm\.": "model.final_layernorm.",
    r"^layers\.": "model.layers.",
    r"\.mixer_norm\.": ".input_layernorm.",
    r"\.feed_forward_norm\.": ".pre_ff_layernorm.",
    r"\.mixer\.([qkvo]_proj)\.": r".self_attn.\1.",
    r"\.mixer\.(dt|b|c)_norm\.": r".mamba.\1_layernorm.",
    r"\.mixer\.dt_bias$": ".mamba.dt_proj.bias",
    r"\.mixer\.": ".mamba.",
}


def hf_name(name: str, model_type: str = "llama") -> str:
    for own, theirs in HF_NAMES[model_type].items():
        name = re.sub(own, theirs, name)
    return name


# --- All runs ----------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=list(SIBLINGS), choices=list(SIBLINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--quick", action="store_true", help="a few steps and a little text, into --folder")
    parser.add_argument("--folder", type=Path, help="where record and weights go, instead of the book's own places")
    chosen = parser.parse_args(arguments)
    if chosen.quick and chosen.folder is None:
        parser.error("--quick needs a --folder: its runs must not replace the book's")
    recipe = QUICK if chosen.quick else RECIPE
    data, held = texts()
    tests = {"held_out": held, "passage": passage()}
    if chosen.quick:
        tests = {what: text[:1024] for what, text in tests.items()}
    path = (chosen.folder or HERE) / "siblings.json"
    record = opened(path, recipe, provenance(data, held))
    for seed in chosen.seeds:  # all architectures of a seed before the next seed
        for name in chosen.names:
            key = f"{name}/{seed}"
            if key in record["runs"]:
                continue
            model, entry = run(SIBLINGS[name], seed, data, tests, recipe)
            if seed == 0:
                save(model, SIBLINGS[name], (chosen.folder or WEIGHTS) / f"sibling-{name}")
            record["runs"] = dict(sorted({**record["runs"], key: entry}.items()))
            write(path, record)
            print(f"{key}: passage {entry['passage_nats']} nats a byte, {entry['minutes']} min", flush=True)
    return 0


def opened(path: Path, recipe: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """The record so far, or a new one. Runs on another text or by another recipe cannot be compared: SystemExit."""
    if not path.exists():
        return {"recipe": recipe, "text": text, "runs": {}}
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record["recipe"] != recipe:
        raise SystemExit(f"{path.name} was made by another recipe; move it away to begin anew")
    if record["text"] != text:
        raise SystemExit(
            f"{path.name} was made on another text (Python {record['text']['python']}, this is {text['python']})"
        )
    return record


def run(
    hf: dict[str, Any], seed: int, data: np.ndarray, tests: dict[str, np.ndarray], recipe: dict[str, Any]
) -> tuple[tbt.Decoder, dict[str, Any]]:
    started, spent = time.monotonic(), time.process_time()
    model, curve = train(hf, seed, data, recipe)
    minutes, cpu_minutes = (time.monotonic() - started) / 60, (time.process_time() - spent) / 60
    rounded(model)
    nats = {what: nats_per_byte(model, text) for what, text in tests.items()}
    entry = {
        "parameters": sum(p.numel() for p in model.parameters()),
        **({"bias_step": BIAS_STEP} if any(isinstance(module, Router) for module in model.modules()) else {}),
        **{f"{what}_nats": round(value, 5) for what, value in nats.items()},
        "passage_perplexity": round(math.exp(nats["passage"]), 4),
        "minutes": round(minutes, 2),
        "cpu_minutes": round(cpu_minutes, 2),
        "machine": tbt.measure.machine("cpu").strip("⟨⟩"),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": "python book/experiments/siblings.py",
        "curve": curve,
    }
    return model, entry


def write(path: Path, record: dict[str, Any]) -> None:
    """All or nothing, so that a stop in the middle loses no earlier run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1)
    text = re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", text)  # a point of a curve on one line
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
