"""The siblings: small models that were trained alike by book/experiments/siblings.py, and the record of it."""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenbytoken as tbt
from tokenbytoken.layers import MoE

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "experiments"))

import siblings  # noqa: E402

NAMES = list(siblings.SIBLINGS)
RECORD: dict[str, Any] = json.loads((ROOT / "book" / "experiments" / "siblings.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_weights_load_in_transformers_too_with_equal_logits(name: str) -> None:
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor([list(b"A token is a byte; ")])
    folder = tbt.checkpoints.find(f"sibling-{name}")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = reference(tokens, use_cache=False).logits
    got = tbt.load(f"sibling-{name}")(tokens)
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()  # float32, sums in another order
    assert want.abs().max() > 1


def test_sizes_are_equal_and_small() -> None:
    counts = {name: tbt.count_parameters(tbt.load(f"sibling-{name}").config).total for name in NAMES}
    assert max(counts.values()) <= 1.01 * min(counts.values())
    assert all(1_000_000 <= count <= 1_200_000 for count in counts.values())
    assert {name: RECORD["runs"][f"{name}/0"]["parameters"] for name in NAMES} == counts
    stored = sum(path.stat().st_size for path in tbt.checkpoints.WEIGHTS.rglob("*") if path.is_file())
    assert stored <= 16e6  # all of them together


def test_what_a_token_leaves_behind() -> None:
    configs = {name: tbt.load(f"sibling-{name}").config for name in NAMES}
    numbers = {name: tbt.state_bytes_per_token(config, bytes_per_element=1) for name, config in configs.items()}
    #  6 layers of 2 · K · 16; of 32 + 8; of nothing; one layer of 2 · 2 · 16
    assert numbers == {
        "mha": 1536, "gqa": 384, "mqa": 192, "mla": 240, "mla-moe": 240, "mamba": 0, "hybrid": 64}  # fmt: skip
    constant = {name: tbt.state_bytes(config, 1, 0) for name, config in configs.items()}
    layers = {"mamba": 9, "hybrid": 5}
    # per layer 256 channels: 16 numbers of 4 bytes, and 3 columns of 2
    assert constant == {name: layers.get(name, 0) * 256 * (16 * 4 + 3 * 2) for name in NAMES}


def test_the_experts_are_balanced_by_a_bias_that_moved() -> None:
    model, text = tbt.load("sibling-mla-moe"), torch.from_numpy(siblings.passage().astype("int64"))
    routers = []
    for layer in model.layers[1:]:
        assert isinstance(layer.feed_forward, MoE)
        routers.append(layer.feed_forward.router)
    loads = [torch.zeros(12) for _ in routers]
    for router, load in zip(routers, loads, strict=True):
        router.register_forward_hook(partial(siblings.count_choices, load))
    whole = len(text) // 256 * 256
    for windows in (text[:whole].view(-1, 256), text[None, whole:]):
        model(windows, logits="none")
    for router, load in zip(routers, loads, strict=True):
        assert load.sum() == 3 * len(text)
        assert (load > 0).all()  # no expert died
        assert router.selection_bias is not None
        steps = router.selection_bias / siblings.BIAS_STEP
        assert 1 < steps.abs().max() <= siblings.RECIPE["steps"]


def test_the_hybrid_has_one_attention_layer_in_six() -> None:
    kinds = [type(layer.mixer).__name__ for layer in tbt.load("sibling-hybrid").config.layers]
    assert kinds == ["MambaConfig"] * 3 + ["AttentionConfig"] + ["MambaConfig"] * 2


def test_they_differ_in_the_key_value_heads_they_are_named_after() -> None:
    heads = {name: tbt.load(f"sibling-{name}").config.layers[0].mixer for name in ("mha", "gqa", "mqa")}
    assert {name: (m.num_heads, m.num_kv_heads) for name, m in heads.items() if isinstance(m, tbt.AttentionConfig)} == {
        "mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1)}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_token_is_a_byte(name: str) -> None:
    tokenizer = tbt.load_tokenizer(f"sibling-{name}")
    text = "½ of it: “ü”, \t\x00\n 東 <|endoftext|>"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.vocab_size == 256
    assert [tokenizer.tokens([byte])[0] for byte in b"a z"] == ["a", " ", "z"]
    written = tbt.generate(tbt.load(f"sibling-{name}"), tokenizer.encode("The "), 8)
    assert len(tokenizer.decode(written)) > 0


def test_the_alphabet_is_the_librarys() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(siblings.byte_tokenizer().get_vocab()) == set(ByteLevel.alphabet())


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_perplexity_is_that_of_the_weights(name: str) -> None:
    """Computed another way here: with a state, in chunks, from the logits' own log-softmax."""
    model, text = tbt.load(f"sibling-{name}"), siblings.passage()
    nats: list[float] = []
    tokens, whole = torch.tensor(text.tolist()), (len(text) - 1) // 256 * 256
    for read, said in ((tokens[:whole], tokens[1 : whole + 1]), (tokens[whole:-1], tokens[whole + 1 :])):
        windows = read.view(-1, min(256, len(read)))  # all that are whole together, then the rest
        state = model.new_state(*windows.shape)
        logits = torch.cat([model(chunk, state) for chunk in windows.split(100, dim=1)], dim=1).flatten(0, 1)
        nats += (-logits.double().log_softmax(-1).gather(1, said[:, None]))[:, 0].tolist()
    assert len(nats) == len(text) - 1
    recorded = RECORD["runs"][f"{name}/0"]["passage_perplexity"]
    assert math.exp(statistics.fmean(nats)) == pytest.approx(recorded, rel=1e-4)


def test_the_record_is_complete() -> None:
    assert set(RECORD["runs"]) == {f"{name}/{seed}" for name in NAMES for seed in (0, 1, 2)}
    assert RECORD["recipe"] == siblings.RECIPE
    assert len(RECORD["text"]["sha256"]) == 64
    seen = RECORD["recipe"]["steps"] * RECORD["recipe"]["batch_bytes"]
    for key, one in RECORD["runs"].items():
        assert {"minutes", "machine", "date", "command", "held_out_nats"} <= set(one), key
        assert 0 <= seen - one["curve"][-1][0] < seen / 40, key  # a point for each fortieth that is complete
        assert one["curve"][-1][1] < one["curve"][0][1] - 1, key
        assert one["passage_perplexity"] == pytest.approx(math.exp(one["passage_nats"]), rel=1e-4)
        assert one["passage_nats"] < math.log(256) / 2, key
    for name in NAMES:  # a seed that changes nothing would make the spread a lie
        assert len({RECORD["runs"][f"{name}/{seed}"]["passage_nats"] for seed in (0, 1, 2)}) == 3


def test_the_passage_is_in_no_training_text() -> None:
    train, held = siblings.texts()
    if RECORD["text"]["python"] == platform.python_version():
        assert RECORD["text"] == siblings.provenance(train, held)  # a later sibling can still join the earlier ones
    seen, passage = train.tobytes() + held.tobytes(), siblings.passage().tobytes()
    for start in range(0, len(passage) - 60, 150):
        assert passage[start : start + 60] not in seen
    trained, kept = train.tobytes(), held.tobytes()
    assert not any(kept[start : start + 200] in trained for start in range(0, len(kept) - 200, 5000))


def test_every_architecture_sees_the_same_bytes() -> None:
    data = siblings.passage()
    one, two, other = (list(siblings.batches(data, siblings.QUICK, seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], other[0])
    assert {(batch.shape[1] - 1, batch[:, 1:].numel()) for batch in one} == {
        (length, siblings.RECIPE["batch_bytes"]) for _, length in siblings.RECIPE["lengths"]
    }


def test_quick_runs_learn_and_are_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--quick", "--folder", str(tmp_path), "--seeds", "0", "--names"]
    siblings.main([*quick, "gqa"])
    first = json.loads((tmp_path / "siblings.json").read_text())["runs"]["gqa/0"]
    assert first["curve"][-1][1] < first["curve"][0][1] - 0.5
    loaded = tbt.load(tmp_path / "sibling-gqa")
    text = siblings.texts()[1][:1024]
    assert siblings.nats_per_byte(loaded, text) == pytest.approx(first["held_out_nats"], abs=1e-4)

    capsys.readouterr()
    siblings.main([*quick, "gqa", "mqa"])
    assert "mqa/0" in (said := capsys.readouterr().out)
    assert "gqa/0" not in said
    runs = json.loads((tmp_path / "siblings.json").read_text())["runs"]
    assert runs["gqa/0"] == first
    assert set(runs) == {"gqa/0", "mqa/0"}


def test_runs_that_cannot_be_compared_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "siblings.json"
    siblings.write(path, {"recipe": siblings.QUICK, "text": {"python": "2.7"}, "runs": {}})
    with pytest.raises(SystemExit, match="another recipe"):
        siblings.opened(path, siblings.RECIPE, {})
    with pytest.raises(SystemExit, match=r"another text \(Python 2\.7"):
        siblings.opened(path, siblings.QUICK, {"python": "3.11"})
    with pytest.raises(SystemExit):
        siblings.main(["--quick"])


def test_an_unknown_sibling_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"sibling-lost.*sibling-gqa.*sibling-mha"):
        tbt.load("sibling-lost")
