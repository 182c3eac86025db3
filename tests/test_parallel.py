"""Tensor parallelism against one process: the plan as data, the ranks as processes on gloo, and torchrun itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from filelock import FileLock
from hypothesis import assume, given
from hypothesis import strategies as st

import tokenbytoken as tbt
from tokenbytoken.__main__ import main
from tokenbytoken.cost import ALL_REDUCES
from tokenbytoken.run.parallel import deal_heads, shard

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(HERE.parent)}
SMOLLM2 = tbt.published["smollm2-135m"]


def config(**changes: Any) -> tbt.DecoderConfig:
    return tbt.DecoderConfig.from_hf({"model_type": "llama", **families.T_LLAMA, **changes})


# --- the plan, without any process -------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 24))
def test_every_query_head_is_dealt_once_and_finds_its_key_value_head(K: int, G: int, world: int) -> None:
    H = K * G
    assume(world <= K or (world % K == 0 and H % world == 0))
    seen: list[int] = []
    for rank in range(world):
        query, kv = deal_heads(H, K, rank, world)
        assert len(query) % len(kv) == 0
        for i, head in enumerate(query):  # head i of the rank reads the rank's key/value head i // (its own group size)
            assert kv[i // (len(query) // len(kv))] == head // G
        seen += query
    assert seen == list(range(H))


def test_smollm2_on_two_ranks_is_dealt_by_whole_groups() -> None:
    assert [tuple(map(len, deal_heads(9, 3, rank, 2))) for rank in (0, 1)] == [(6, 2), (3, 1)]


def test_more_ranks_than_key_value_heads_share_neighbouring_copies() -> None:
    assert [deal_heads(8, 2, rank, 4)[1].start for rank in range(4)] == [0, 0, 1, 1]  # r // 2, not r % 2
    share = [shard(tbt.published["llama-3.1-405b"], rank, 16).config for rank in (0, 15)]
    assert [tbt.state_bytes_per_token(c) for c in share] == [516_096 // 8] * 2  # one head each: half of it a copy


@pytest.mark.parametrize(
    ("changes", "world", "words"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}, 4, ("6 query heads", "4 ranks")),
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, 8, ("4 query heads", "8 ranks")),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}, 4, ("3 key/value heads", "4 ranks")),
        ({"intermediate_size": 3}, 4, ("intermediate_size (3)", "4 ranks")),
        ({"intermediate_size": 9, "num_attention_heads": 8}, 8, ("intermediate_size (9)", "8 ranks")),
        ({"vocab_size": 3}, 4, ("vocab_size (3)", "4 ranks")),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(changes: dict[str, Any], world: int, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be") as error:
        shard(config(**changes), 0, world)
    assert all(word in str(error.value) for word in words), error.value


def test_other_layers_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 0 is LatentAttentionConfig"):
        shard(tbt.published["deepseek-v3"], 0, 8)
    with pytest.raises(ValueError, match="rank 2 is not one of"):
        shard(SMOLLM2, 2, 2)


CUTS = [
    ("smollm2", SMOLLM2, 2),
    ("ragged", config(intermediate_size=95, num_attention_heads=9, num_key_value_heads=3, head_dim=8), 2),
    ("biased", config(attention_bias=True, mlp_bias=True), 2),
    ("replicated", config(num_attention_heads=8, head_dim=8), 4),
    ("405b", tbt.published["llama-3.1-405b"], 8),
]


@pytest.mark.parametrize(("name", "whole", "world"), CUTS, ids=[c[0] for c in CUTS])
def test_the_parts_tile_every_parameter_and_the_smaller_decoder_counts_them(
    name: str, whole: tbt.DecoderConfig, world: int
) -> None:
    with torch.device("meta"):
        parameters = dict(tbt.Decoder(whole).named_parameters())
    plans = [shard(whole, rank, world) for rank in range(world)]
    for key, tensor in parameters.items():
        if key not in plans[0].parts:
            assert "norm" in key or key.endswith(("o_proj.bias", "down_proj.bias"))
            continue
        stretches = sorted({(plan.parts[key].start, plan.parts[key].stop) for plan in plans})
        assert len({plan.parts[key].dim for plan in plans}) == 1
        assert [stop for _, stop in stretches[:-1]] == [start for start, _ in stretches[1:]]
        assert (stretches[0][0], stretches[-1][1]) == (0, tensor.shape[plans[0].parts[key].dim])
    for plan in plans:
        held = sum(plan.of(key, tensor).numel() for key, tensor in parameters.items())
        assert held == tbt.count_parameters(plan.config).total


# --- the ranks ---------------------------------------------------------------------------------------

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "uneven": (2, {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8,
                   "intermediate_size": 95, "tie_word_embeddings": True}),
    "biased": (2, {"attention_bias": True, "mlp_bias": True}),
    "four": (4, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}),
    "replicated": (4, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 98}),
    "refused": (4, {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}),
}  # fmt: skip
TOKENS = families.random_tokens(2, 12)
PROMPT = [504, 10734, 2668]
BIG = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 4096,
       "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}  # fmt: skip


# Commands that end with status 2 and one message: ranks, options, options of rank 1 alone, what rank 0 prints.
COMMANDS: dict[str, tuple[int, list[str], list[str], str]] = {
    "four ranks": (4, ["--prompt", "x"], [], "9 query heads and 3 key/value heads cannot be dealt to 4 ranks"),
    "empty prompt": (2, ["--prompt", ""], [], "the prompt is empty: it needs at least one token\n"),
    "no source": (2, ["--prompt", "x", "--source", "/nowhere"], [], "'/nowhere' is neither one of"),
    "no device": (2, ["--prompt", "x", "--device", "cuda:99"], [], "device 'cuda:99' cannot be used here"),
    "rank 1 alone": (2, ["--prompt", "x"], ["--prompt", ""], "rank 1: the prompt is empty"),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Random models written by transformers, with its logits."""
    found = {}
    for name, (_, changes) in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        reference = families.llama(**changes)
        reference.save_pretrained(folder, max_shard_size="100KB" if name == "four" else "1GB")
        found[name] = (folder, families.reference_logits(reference, TOKENS), reference)
    return found


@pytest.fixture(scope="module")
def results(references: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the ranks of every case found: run once, also when several test workers ask."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "ranks"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "results.json").exists():
            run_ranks(references, folder)
    return json.loads((folder / "results.json").read_text())


def run_ranks(references: dict[str, Any], folder: Path) -> None:
    big = folder / "big"
    families.llama(**BIG).bfloat16().save_pretrained(big)  # so that loading in float32 is a copy, not a map
    cases: list[dict[str, Any]] = [
        {"name": name, "kind": {"alone": "alone", "refused": "refused"}.get(name, "parity"), "world": world,
         "source": str(references[name][0]), "tokens": TOKENS.tolist(), "eos": list(range(0, 97, 2)),
         "steps": 4}  # ranks take turns on the cores, at each message
        for name, (world, _) in MODELS.items()
    ]  # fmt: skip
    cases += [
        {"name": "big", "kind": "memory", "world": 4, "source": str(big), "control": True},
        {"name": "smollm2", "kind": "memory", "world": 2, "source": "smollm2-135m", "prompt": PROMPT},
        {"name": "killed", "kind": "lost", "world": 2, "how": "kill"},
        {"name": "raised", "kind": "lost", "world": 2, "how": "raise"},
        {"name": "hung", "kind": "lost", "world": 2, "how": "hang", "timeout": 3.0},
    ]
    cases += [
        {"name": name, "kind": "command", "world": world, "options": options, "of_rank_1": of_rank_1}
        for name, (world, options, of_rank_1, _) in COMMANDS.items()
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, HERE / "ranks.py", folder / "cases.json"], env=ENVIRONMENT, timeout=240, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def all_ranks(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    for rank, found in enumerate(results[name]):
        assert found is not None, f"rank {rank} of {name} wrote nothing"
        assert "raised" not in found, found.get("raised")
        assert "lost" not in found, found.get("lost")
    return results[name]


PARITY = ["uneven", "biased", "four", "replicated"]


@pytest.mark.parametrize("name", PARITY)
def test_every_rank_has_the_logits_of_transformers(results: dict, references: dict, name: str) -> None:
    _, want, reference = references[name]
    shifted = families.reference_logits(reference, TOKENS[1:, :-3])[0]
    for found in all_ranks(results, name):
        families.assert_close(torch.tensor(found["logits"]), want)
        families.assert_close(torch.tensor(found["chunked"]), want)
        families.assert_close(torch.tensor(found["padded"]), shifted)


@pytest.mark.parametrize("name", PARITY)
def test_every_rank_chooses_the_tokens_of_one_process(results: dict, references: dict, name: str) -> None:
    ranks = all_ranks(results, name)
    plain = tbt.generate(
        tbt.load(references[name][0]), [row[:4].tolist() for row in TOKENS], len(ranks[0]["tokens"][0])
    )
    for found in ranks:
        assert found["tokens"] == plain
        assert found["sampled"] == ranks[0]["sampled"]  # although nobody gave them a common seed
        assert found["ended"] == ranks[0]["ended"]
    assert min(map(len, ranks[0]["ended"])) < 12


@pytest.mark.parametrize("name", PARITY)
def test_a_rank_holds_its_shard_and_the_state_of_its_own_heads(results: dict, references: dict, name: str) -> None:
    for found in all_ranks(results, name):
        assert found["parameter_bytes"] == found["planned_parameter_bytes"]
        assert found["state_bytes"] == found["planned_state_bytes"]
        assert "the state was made for a model of other layers" in found["foreign"]  # that of the whole model
    world, changes = MODELS[name]
    whole = config(**changes)
    mixer = whole.layers[0].mixer
    assert isinstance(mixer, tbt.AttentionConfig)
    kept = sum(found["state_bytes"] for found in results[name]) / tbt.state_bytes(whole, 2, 12, bytes_per_element=4)
    assert kept == max(1, world / mixer.num_kv_heads)  # every head once, or on world / K ranks


@pytest.mark.parametrize("name", PARITY)
def test_a_pass_sends_two_sums_a_layer_one_for_the_embedding_and_gathers_the_logits(results: dict, name: str) -> None:
    world, changes = MODELS[name]
    whole = config(**changes)
    for found in all_ranks(results, name):
        sums = 2 * whole.num_layers + 1
        assert found["calls"] == {"all-reduce": sums, "all-gather": 1}
        assert found["calls_by_torch"] == sums + 1  # CommDebugMode's own count
        rows, piece = TOKENS.numel(), -(-whole.vocab_size // world)
        assert found["nbytes"] == {"all-reduce": sums * rows * whole.hidden_size * 4,
                                   "all-gather": rows * piece * world * 4}  # fmt: skip


def test_the_communication_model_counts_the_same_messages() -> None:
    h100 = tbt.accelerators["h100"]
    assert h100.link is not None
    whole, t = tbt.published["llama-3.1-405b"], 8
    seconds = tbt.cost.communication_seconds(whole, h100, rows=4, gpus=t, logit_rows=4)
    sums, size = 2 * 126 + 1, 4 * 2  # rows, bytes of a number
    reduce = min(ALL_REDUCES[name](t, 16384 * size).seconds(h100.link) for name in ("one-shot", "two-shot", "switch"))
    gather = h100.link.latency + 128_256 * size * (t - 1) / t / h100.link.bandwidth
    assert seconds == pytest.approx(sums * reduce + gather)
    assert tbt.cost.links["nvlink"] == h100.link
    assert tbt.cost.links["network"] == h100.network


def test_one_rank_is_the_plain_model_to_the_bit(results: dict) -> None:
    (found,) = all_ranks(results, "alone")
    assert found["equal"]
    assert found["from_memory"]


def test_a_model_that_cannot_be_cut_is_refused_on_every_rank_before_anything_is_sent(results: dict) -> None:
    for found in all_ranks(results, "refused"):
        assert "6 query heads and 2 key/value heads cannot be dealt to 4 ranks" in found["error"]
        assert found["calls"] == {}
        assert found["seconds"] < 30


def test_loading_never_holds_the_whole_model(results: dict) -> None:
    whole = 4 * tbt.count_parameters(config(**BIG)).total
    ranks = all_ranks(results, "big")
    assert ranks[0]["held_whole"] == whole
    assert ranks[0]["whole_peak"] > 0.95 * whole  # the measurement sees a whole model when there is one
    for found in ranks:
        assert found["held"] < 0.3 * whole  # a quarter, and the norms
        assert found["peak"] < 0.45 * whole


def test_smollm2_on_two_ranks_reads_its_share_and_says_the_same(results: dict) -> None:
    plain = tbt.generate(tbt.load("smollm2-135m"), PROMPT, 6)
    whole = 4 * tbt.count_parameters(SMOLLM2).total
    for rank, found in enumerate(all_ranks(results, "smollm2")):
        assert found["tokens"] == plain
        assert found["held"] == 4 * tbt.count_parameters(shard(SMOLLM2, rank, 2).config).total
        assert found["peak"] < 0.75 * whole  # half of it, and the blocks being expanded


def test_a_rank_that_dies_hangs_or_fails_ends_the_others_with_a_message(results: dict) -> None:
    for name, limit in (("killed", 30), ("raised", 30), ("hung", 30)):
        survivor, other = results[name]
        assert "rank 0 of 2 stops: another rank died, or did not answer within" in survivor["lost"], name
        assert survivor["seconds"] < limit
        assert other is None or "KeyError: 'only rank 1'" in other["raised"]


# --- the command, and torchrun -----------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_cannot_be_obeyed_ends_every_rank_with_one_message(results: dict, name: str) -> None:
    words = COMMANDS[name][-1]
    for rank, found in enumerate(all_ranks(results, name)):
        assert (found["status"], found["out"]) == (2, "")
        assert found["err"].startswith(f"tokenbytoken generate: {words}") if rank == 0 else found["err"] == ""
        assert found["err"].count("\n") == (rank == 0)
        assert found["seconds"] < 30


def test_torchrun_prints_on_rank_0_alone_what_one_process_prints(capsys: pytest.CaptureFixture) -> None:
    options = ["--prompt", "The tallest mountain on Earth is", "--max-new-tokens", "5"]
    assert main(["generate", *options, "--weights", "float32"]) == 0
    one = capsys.readouterr().out
    two = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "tokenbytoken", "generate", *options, "--tensor-parallel"],
        env=ENVIRONMENT, timeout=180, capture_output=True, text=True,
    )  # fmt: skip
    assert two.returncode == 0, two.stderr
    assert two.stdout == one
    assert len(one) > len(options[1])


def test_torchrun_ends_within_a_minute_when_a_rank_is_killed(results: dict) -> None:
    (found,) = results["launched"]
    assert "SIGKILL" in found["failed"] or "another rank died" in found["failed"]  # whoever is noticed first
    assert found["seconds"] < 60


def test_tensor_parallel_outside_torchrun_says_how_to_start_it(capsys: pytest.CaptureFixture) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        assert name not in os.environ
    assert main(["generate", "--prompt", "x", "--tensor-parallel"]) == 2
    assert "start the ranks with torchrun" in capsys.readouterr().err
