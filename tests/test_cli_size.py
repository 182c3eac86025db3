"""``python -m tokenbytoken``: its commands; ``size``: right figures with units, and one clear line for bad input."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from tokenbytoken.__main__ import COMMANDS, main
from tokenbytoken.models import published

ROOT = Path(__file__).resolve().parents[1]
# The command line must start on a machine that has Python and nothing else.
WITHOUT = """
import runpy, sys
for name in ("torch", "numpy", "matplotlib", "safetensors", "transformers"):
    sys.modules[name] = None
sys.argv = ["tokenbytoken", *sys.argv[1:]]
runpy.run_module("tokenbytoken", run_name="__main__")
"""


def size(*arguments: str) -> int:
    """Exit code of the command, as argparse and ``main`` agree on it."""
    try:
        return main(["size", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert size(*arguments) == 0
    out = capsys.readouterr().out
    lines = [line.split("   ", 1) for line in out.splitlines() if not line.startswith(" ")]
    starts = {len(line) - len(line.split("   ", 1)[1].lstrip()) for line in out.splitlines()}
    assert len(starts) == 1, "the texts of all lines start in one column"
    return {name.strip(): text.strip() for name, text in lines}


def test_405b_on_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    told = report(
        capsys, "llama-3.1-405b", "--gpu", "H100", "--gpus", "8", "--recipe", "fp8-ffn", "--context", "131072"
    )
    assert told["weights"] == "487.23 GB (453.77 GiB)"
    assert told["parameters"] == "405,853,388,800"
    assert told["state per token"] == "516,096 B"
    assert told["state"] == "67.65 GB (63.00 GiB) for 1 × 131,072 tokens"
    assert told["fits"].startswith("yes: 554.87 GB")
    assert told["room for"].startswith("2 sequences of 131,072 tokens")
    assert told["decode step"].startswith("21.59 ms, bound by memory (memory 20.55 ms, ")
    assert told["prefill"].startswith("19.61 s, bound by compute (memory 20.70 ms, ")


def test_c67_does_not_fit_is_said_and_never_negative(capsys: pytest.CaptureFixture[str]) -> None:
    told = report(capsys, "llama-3.1-8b", "--gpu", "t4", "--usable", "0.9")
    assert told["fits"].startswith("no: ")
    assert told["room for"].startswith("0 sequences: the weights alone need 16.06 GB (14.96 GiB)")
    assert "-" not in told["room for"]
    assert "90% of it usable" in told["on"]


def test_models_of_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert "any length" in report(capsys, "mamba-2.8b", "--gpu", "t4")["room for"]
    told = report(capsys, "deepseek-v3", "--gpu", "h200", "--gpus", "8", "--recipe", "fp8-block", "--context", "131072")
    assert "of which one token uses 37,552,297,472" in told["parameters"]
    assert told["room for"].startswith("5 sequences")
    for cache, readers in (("readers", 32), ("sequence", 47)):
        told = report(
            capsys,
            *("deepseek-v3", "--gpu", "h200", "--gpus", "8", "--recipe", "fp8-block", "--context", "131072"),
            *("--cache", cache),
        )
        assert told["room for"].startswith(f"{readers} sequences")


def test_working_memory_is_set_aside(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("llama-3.1-405b", "--gpu", "h100", "--gpus", "8", "--recipe", "fp8-ffn", "--context", "131072")
    assert size(*arguments) == 0
    told = capsys.readouterr().out
    assert "2 sequences of 131,072 tokens, or 1 of 296,012 tokens, weights and state alone" in told
    assert "0 sequences with working memory, 10.94 GB (10.18 GiB) a GPU: kept free 8.00 GB" in told
    assert size(*arguments, "--chunk", "0") == 2
    assert "tokens must be a positive integer, not 0" in capsys.readouterr().err


def test_a_context_beyond_the_publishers_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert "8,192 positions" in report(capsys, "smollm2-135m", "--gpu", "t4", "--context", "8193")["note"]
    assert "note" not in report(capsys, "smollm2-135m", "--gpu", "t4", "--context", "8192")


CONFIG = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("folder", [False, True])
def test_a_config_json_of_ones_own(folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    told = report(capsys, str(path if folder else path / "config.json"), "--gpu", "l4")
    assert told["parameters"] == "134,515,008"
    assert told["model"].startswith("my model, 30 layers")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: MODEL, --gpu"),
        (("smollm2-135m",), "the following arguments are required: --gpu"),
        (("llama-9", "--gpu", "t4"), "unknown model 'llama-9'"),
        (("gpt-3", "--gpu", "t4"), "gpt-3 is known by the shape of its attention only"),
        (("smollm2-135m", "--gpu", "a100"), "unknown accelerator 'a100': one of t4"),
        (("smollm2-135m", "--gpu", "t4", "--recipe", "fp4"), "unknown recipe 'fp4': one of fp32, bf16"),
        (("smollm2-135m", "--gpu", "t4", "--batch", "0"), "batch_size must be a positive integer, not 0"),
        (("smollm2-135m", "--gpu", "t4", "--batch", "two"), "argument --batch: invalid int value: 'two'"),
        (("smollm2-135m", "--gpu", "t4", "--context", "0"), "context must be a positive integer, not 0"),
        (("smollm2-135m", "--gpu", "t4", "--gpus", "-1"), "gpus must be a positive integer, not -1"),
        (("smollm2-135m", "--gpu", "t4", "--gpus", "4"), "tensor_parallel = 4 does not divide 9 query heads"),
        (("smollm2-135m", "--gpu", "t4", "--gpus", "4", "--tensor-parallel", "3"), "must divide gpus (4)"),
        (("smollm2-135m", "--gpu", "t4", "--efficiency", "2"), "efficiency must be above 0 and at most 1, not 2.0"),
        (("smollm2-135m", "--gpu", "t4", "--usable", "0"), "usable must be above 0"),
        (
            ("smollm2-135m", "--gpu", "t4", "--state-bytes", "0"),
            "state_bytes_per_element must be a number above 0, not 0",
        ),
        (
            ("smollm2-135m", "--gpu", "t4", "--state-bytes", "nan"),
            "state_bytes_per_element must be a number above 0, not nan",
        ),
        *(
            (("smollm2-135m", "--gpu", "t4", f"{option}={number}"), f"{name} must ")
            for option, name in (
                ("--state-bytes", "state_bytes_per_element"),
                ("--usable", "usable"),
                ("--efficiency", "efficiency"),
            )
            for number in ("1e308", "-1e308", "1e-320", "inf", "-1")
        ),
        *(
            (("smollm2-135m", "--gpu", "t4", option, number), words)
            for option in ("--gpus", "--context", "--batch")
            for number, words in (("1e308", "invalid int value"), ("9" * 400, "must be below 2^63"), ("2.5", "invalid"))
        ),
        (("smollm2-135m", "--gpu", "t4", "--tensor-parallel", "9" * 400), "tensor_parallel must be below 2^63"),
        (
            ("smollm2-135m", "--gpu", "t4", "--gpus", "31", "--tensor-parallel", "1"),
            "31 pipeline stages, but the model has 30 layers",
        ),
        (("smollm2-135m", "--gpu", "t4", "--cache", "split"), "cache must be 'heads', 'readers' or 'sequence', not"),
        (("smollm2-135m", "--gpu", "t4", "--colour"), "unrecognized arguments: --colour"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert size(*arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert message in told.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not valid JSON"),
        ("[1]", "holds no JSON object"),
        ('{"model_type": "bloom"}', "model_type 'bloom' is not one of"),
        (json.dumps(CONFIG | {"hidden_size": None}), "config field hidden_size is missing"),
        (json.dumps(CONFIG | {"model_type": "mistral", "sliding_window": 4096}), "sliding_window = 4096"),
        (json.dumps(CONFIG | {"num_key_value_heads": 2}), "must be a multiple of"),
        (json.dumps(CONFIG | {"num_attention_heads": 0}), "num_attention_heads must be a positive integer, not 0"),
        (json.dumps(CONFIG | {"tie_word_embeddings": "false"}), "tie_word_embeddings must be true or false"),
        (json.dumps(CONFIG | {"rope_scaling": "yarn"}), "rope_scaling must map names to values"),
    ],
)
def test_bad_config_files(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert size(str(path), "--gpu", "t4") == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert message in told.err


def test_help_names_all_models_and_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert size("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in (*published, "b200", "--recipe"))


def test_needs_nothing_but_python() -> None:
    command = [sys.executable, "-c", WITHOUT, "size", "jamba-1.5-large", "--gpu", "h100", "--gpus", "8"]
    done = subprocess.run(
        [*command, "--recipe", "int8-experts"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "427.47 GB" in done.stdout


def test_the_module_ends_with_the_exit_code_of_its_command() -> None:
    command = [sys.executable, "-m", "tokenbytoken", "size", "llama-9", "--gpu", "h100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


# --- the one command ------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, and what was printed, with every space one."""
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, " ".join(out.split()), err


def test_the_command_lists_its_commands_and_each_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    status, overview, _ = told(capsys, "--help")
    assert status == 0
    for name, file in COMMANDS.items():
        command = importlib.import_module(f"tokenbytoken.commands.{file}")
        assert name == command.NAME
        assert f"{name} {command.HELP}" in overview
        status, text, _ = told(capsys, name, "--help")
        assert status == 0
        assert text.startswith(f"usage: tokenbytoken {name} ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "tokenbytoken: the following arguments are required: command"),
     (("write",), "tokenbytoken: argument command: invalid choice: 'write'"),
     (("generate",), "tokenbytoken generate: the following arguments are required: --prompt"),
     (("size", "llama-9", "--gpu", "t4"), "tokenbytoken size: unknown model 'llama-9'"),
     (("calibrate", "float12"), "tokenbytoken calibrate: unknown dtype 'float12'")],
)  # fmt: skip
def test_an_error_names_the_command(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = told(capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)


def test_the_installed_script_is_the_same_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert {name: pkgutil.resolve_name(where) for name, where in scripts.items()} == {"tokenbytoken": main}
