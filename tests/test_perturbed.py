"""The tool that looks for kernel-dependent digits finds them, and is silent where another kernel changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import execute
import matrix
import nbformat
import perturbed
import pytest
import torch
import torch.nn.functional as F
from nbformat.v4 import new_code_cell, new_notebook
from torch import Tensor

from tokenbytoken import measure

SETUP = """\
import torch
import tokenbytoken as tbt
a, b = (torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
exact = a.double() @ b.double()"""
CELLS = {
    SETUP: "",
    "print(f'{float((a @ b)[0, 0]):.8f}')": "changed",
    "print(f'{float((a @ b)[0, 0]):.2f}', f'⟨{float((a @ b)[0, 0]):.8f}⟩')": "",
    "tbt.check.close(a @ b, exact, 1e-5, label='product')": "",
    "tbt.check.close(a @ b, exact, 1e-6, label='product'); print('and the rest')": "narrow",
    "assert ((a @ b) - exact).abs().max() < 1e-2; print('small')": "",
    "assert ((a @ b) - exact).abs().max() < 2e-5; print('and the rest')": "narrow",
    "def strict():\n    assert ((a @ b) - exact).abs().max() < 2e-5\nstrict(); print('the end')": "narrow",
    "print(*('odd' if bits % 2 else 'even' for bits in (a @ b).view(torch.int32)[0, :16].tolist()))": "changed",
    "try:\n    assert float((a @ b)[0, 0]) > 1e9\nexcept AssertionError:\n    print('caught')": "",
    "print(f'{float(exact[0, 0]):.12f}', (a @ b).argmax().item())": "",
    "with torch.inference_mode():\n    print(f'{float(torch.nn.functional.linear(a, b).sum()):.6f}')": "changed",
    "tbt.table([('one', float((a @ b)[0, 0]))], {'': '', 'product': '.1f'})": "",
    "tbt.table([('one', float((a @ b)[0, 0]))], {'': '', 'product': '.8f'})": "changed",
    "print(torch.randn(1, generator=torch.Generator().manual_seed(7)), torch.manual_seed(3) and torch.rand(2))": "",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[perturbed.Found, bytes, bytes]:
    path = tmp_path_factory.mktemp("book") / "made_up.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in CELLS]), path)
    execute.execute(path)
    before = path.read_bytes()
    return perturbed.examine(path, seed=1), before, path.read_bytes()


@pytest.mark.parametrize("kind", ["changed", "narrow", "asserts"])
def test_finds_each_and_no_other(kind: str, found: tuple[perturbed.Found, bytes, bytes]) -> None:
    """Digits and words that another kernel turns; checks that only this noise turns; no assert fails for a kernel."""
    cells = getattr(found[0], kind)
    assert sorted(cells) == [number for number, says in enumerate(CELLS.values(), start=1) if says == kind], cells


def test_reads_the_notebook_only(found: tuple[perturbed.Found, bytes, bytes]) -> None:
    _, before, after = found
    assert before == after


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ x.T,
    "batched": lambda x: x[None] @ x.T,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "linear": lambda x: F.linear(x, x, x[0]),
    "row": lambda x: x @ x[0],
    "dot": lambda x: x[0] @ x[1],
    "attention": lambda x: F.scaled_dot_product_attention(*(x[None, None],) * 3, is_causal=True),
    "attention of one row": lambda x: F.scaled_dot_product_attention(x[None, None, :1], *(x[None, None],) * 2),
    "convolution": lambda x: F.conv1d(x[None], x[:, None, :4].contiguous(), groups=32),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(-1),
    "softmax": lambda x: x.softmax(-1),
    "silu": F.silu,
    "norm": lambda x: F.rms_norm(x, (32,)),
    "in place": lambda x: x.clone().exp_(),
}


@pytest.mark.parametrize("inference", [True, False], ids=["inference", "autograd"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_kind_of_kernel_is_perturbed_a_little(name: str, inference: bool) -> None:
    x = randn(32, 32)
    with torch.inference_mode(inference):
        exact = OPERATIONS[name](x)
        with perturbed.Perturbed(1):
            one, same = OPERATIONS[name](x), OPERATIONS[name](x)
        with perturbed.Perturbed(2):
            other = OPERATIONS[name](x)
    assert torch.equal(one, same)
    assert not torch.equal(one, exact)
    assert not torch.equal(one, other)
    assert (one - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.double() @ x.double().T,
        lambda x: x.long() @ x.long().T,
        lambda x: (x * x + x - x / 3).sqrt(),
        lambda x: x.abs().amax(-1).clamp(max=1),
        lambda x: x[x > 0].sort().values,
        lambda x: torch.zeros(4, 32) @ x,
        lambda x: x.mul(9).round() @ x.mul(9).round().T,
        lambda x: torch.cat((x, x)).to(torch.bfloat16),
        lambda x: torch.full((2, 2), -torch.inf).softmax(-1) + x.new_full((2, 2), torch.inf).sum(-1),
    ],
)
def test_what_every_kernel_gives_stays(operation: Callable[[Tensor], Tensor]) -> None:
    x = randn(32, 32)
    with perturbed.Perturbed(1):
        got = operation(x)
    assert torch.equal(got.nan_to_num(), operation(x).nan_to_num())


def test_equal_numbers_stay_equal_and_powers_of_two_change_nothing() -> None:
    x = randn(32, 32)
    with perturbed.Perturbed(1):
        twice = torch.cat((x, x))
        for result in (twice.exp(), twice.softmax(-1), torch.addcmul(twice, twice, twice), twice.mean(-1)):
            assert torch.equal(*result.chunk(2))
        assert torch.equal((2 * x) @ (x / 8), (x @ x) / 4)
        assert torch.equal((4 * x).sum(-1), 4 * x.sum(-1))
        upper, lower = (twice @ x).chunk(2)
    assert not torch.equal(upper, lower)  # of a product they are other rows, for which a kernel may use other code


def test_low_precision_is_rounded_after_the_noise() -> None:
    """A few elements flip to the neighbouring number; the others are the float32 result, rounded once."""
    a, b = randn(64, 256, dtype=torch.bfloat16), randn(256, 512, dtype=torch.bfloat16)
    with perturbed.Perturbed(1):
        got = a @ b
    want = (a.float() @ b.float()).to(torch.bfloat16)
    assert got.dtype == torch.bfloat16
    flipped = (got != want).float().mean()
    assert 0 < flipped < 0.05
    # One step of bfloat16, or what cancelled: noise is relative to the terms.
    assert ((got.float() - want.float()).abs() <= want.float().abs() * 2**-7 + 1e-3).all()


def test_noise_is_relative_to_the_terms_not_to_the_result() -> None:
    a = torch.cat((torch.ones(1, 50), torch.full((1, 50), -0.999)), dim=1)  # the sum is 0.05
    with perturbed.Perturbed(1):
        cancelled = a @ torch.ones(100, 8)
    noise = (cancelled - a.sum()).abs().max()
    assert 10 * perturbed.SCALE < noise <= 110 * perturbed.SCALE


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_the_count_of_a_pass_is_undisturbed(where: str) -> None:
    layer, x = torch.nn.Linear(16, 8).to(where), randn(2, 16).to(where)
    want = measure.count(lambda: layer(x))
    with perturbed.Perturbed(1):
        got = measure.count(lambda: layer(x))
    assert (got.flops, got.operations, got.calls_by_operation) == (want.flops, want.operations, want.calls_by_operation)


def test_make_test_matrix_runs_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row of its own, red when a digit changed."""
    ran = []

    def run(command: list[str], environment: dict[str, str]) -> tuple[bool, str]:
        ran.append(command)
        return not command[1].endswith("perturbed.py"), "done"

    monkeypatch.setattr(matrix, "run", run)
    assert matrix.main() == 1
    assert [Path(command[1]).name for command in ran].count("perturbed.py") == 1
    assert re.search(r"^perturbed +FAILED", capsys.readouterr().out, re.MULTILINE)
