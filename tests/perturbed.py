"""Which stored digits depend on the kernel: every chapter again, with every float32 result of a kernel perturbed.

    python tests/perturbed.py                                  all chapters, one seed
    python tests/perturbed.py --seeds 1 2 3 book/07_*.ipynb    more seeds find more

Another instruction set, thread count or library adds the terms of a sum in another order. No machine has them all, so
this tool takes their place: it runs the chapters, adds to each sum what another order may add, and compares every
character outside ⟨…⟩ with the stored one (pictures are not compared). A digit that changes is printed too precisely.

**What is perturbed.** The error of a sum is relative to the magnitudes of its terms, not to the result, which may
cancel. Between five orders of adding float32 products (one call, pieces of 64, transposed and reversed, lanes of 8 and
of 16; 64 to 4,096 terms) the difference was measured: 4e-8 of the sum of magnitudes in the root mean square, nearly
the same for every number of terms, and 3e-7 at most. REAL, 1e-7, is noise of about that size: uniform, its root mean
square is 6e-8. SCALE is twenty times as much, so that a digit that stands has a margin; of a typical product of
normal numbers, which is 1/√K of the magnitudes of its K terms, it is 3e-5. What vector units compute by polynomials
(exp, sin, silu, softmax …) gets SCALE of the result, and so does what they may fuse (addcmul), of its two terms.

**What is not.** float64 stays, where kernels differ by 1e-16 and no printed digit can tell; so do integers, copies, and
single operations that IEEE 754 defines (+ − × ÷ √). Weights are read exactly. In bfloat16 and float16 a kernel adds in
float32 and rounds once, so such operations are computed in float32, perturbed there, and then rounded: an
element near the middle between two numbers flips, as it does on another processor. Codes of FP8 and INT8 are not
touched themselves, but made from perturbed values, so a code near a boundary flips; products of integers are exact.

**Noise is a function** of seed, operation and shapes, as a kernel's order is: the same call gives the same bits. One
row of a product alone and the same row in a batch differ, as they may on another processor. In all else the noise goes
with the value, not its place: equal numbers stay equal, because a vector unit treats its lanes alike. Factors that are
powers of two change nothing, and whole numbers (below 2²⁴) add exactly, in any order.

**Tolerances** of float32 parity may be tighter than this noise although no kernel breaks them. Asserts in the main line
of a cell (`assert`, `tbt.check.close`) are noted and passed over, so that the chapter runs on; inside functions they
act as written, and may turn a verdict or stop a cell. So where words change and not only digits, the chapter runs once
more at REAL. What stands there is listed apart, as are the asserts: it says
which checks have less than twentyfold margin, and is no failure. What turns at REAL is one.

**What it cannot find:** digits of a processor's own libraries outside torch (numpy's float32 products), of processes
that a cell starts (chapter 9), of results that a timed call leaves behind (`tbt.measure` runs undisturbed), and a digit
whose boundary lies farther away than this noise of these seeds reaches.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import difflib
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nbformat import NotebookNode
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT = Path(__file__).resolve().parent.parent
TOOLS = (str(ROOT / "tests"), str(ROOT / "book" / "_tools"))

SCALE, REAL = 2e-6, 1e-7
LOW = (torch.bfloat16, torch.float16)
# Where the two factors of a product stand among the arguments.
PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "addbmm": 1}
# Sums: the noise belongs to the same sum of magnitudes.
SUMS = {"sum", "mean", "cumsum", "convolution", "mkldnn_convolution", "_thnn_fused_conv", "addcmul", "addcmul_"}
# Noise by place: here a kernel's order may depend on it.
PLACED = {*PRODUCTS, "convolution", "mkldnn_convolution", "_thnn_fused_conv"}
# Approximated, or a sum inside: the noise belongs to the result.
OTHERS = {
    *("exp", "exp_", "exp2", "expm1", "log", "log_", "log2", "log10", "log1p", "logsumexp", "logcumsumexp", "pow"),
    *("sin", "sin_", "cos", "cos_", "tan", "tanh", "tanh_", "sigmoid", "sigmoid_", "silu", "silu_", "gelu", "erf"),
    *("softplus", "log_sigmoid_forward", "mish", "elu", "atan", "atan2", "rsqrt", "rsqrt_", "_softmax"),
    *("_log_softmax", "norm", "linalg_vector_norm", "var", "std", "var_mean", "std_mean", "prod", "cumprod"),
    *("native_layer_norm", "_fused_rms_norm", "rms_norm", "logaddexp", "_scaled_mm", "addcdiv", "addcdiv_"),
    *("silu_backward", "_softmax_backward_data", "_log_softmax_backward_data", "sigmoid_backward", "lerp"),
}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for one in value for tensor in tensors(one)] if isinstance(value, (tuple, list)) else []


def whole(tensor: Tensor) -> bool:
    return bool((tensor == tensor.round()).all())


def each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same arguments with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(each(one, change) for one in value) if isinstance(value, (tuple, list)) else value


class Perturbed(TorchDispatchMode):
    """Add to float32 results what another order of summation may add; see the module."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Told so, torch does not import its compiler (2 s) at first use."""
        return False

    def __init__(self, seed: int, scale: float = SCALE) -> None:
        super().__init__()
        self.seed, self.scale = seed, scale
        # Its own generator: the chapters' random numbers stay theirs. A prime length, so that no shape meets it evenly.
        self.u = torch.rand(1_000_003, generator=torch.Generator().manual_seed(seed)) * 2 - 1

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if any(tensor.is_meta for tensor in tensors([args, list(kwargs.values())])):
            return func(*args, **kwargs)  # shapes alone
        if name == ATTENTION:
            return self._attention(func, args, kwargs)
        if name in PRODUCTS or name in SUMS or name in OTHERS:
            return self._noisy(func, name, args, kwargs)
        if func._can_decompose():  # inference mode hands over composites such as matmul whole
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)

    def _noisy(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(tensor.dtype in LOW for tensor in tensors(args)) and "dtype" not in kwargs and not name.endswith("_"):
            low = next(tensor.dtype for tensor in tensors(args) if tensor.dtype in LOW)
            wide = self._noisy(func, name, each(args, lambda t: t.float() if t.dtype in LOW else t), kwargs)
            return each(wide, lambda t: t.to(low) if t.dtype == torch.float32 else t)
        size = self._size(func, name, args, kwargs)  # before the call, which may write over its arguments
        out = func(*args, **kwargs)
        key = f"{self.seed} {name} {[tuple(tensor.shape) for tensor in tensors(args)]}"
        for tensor in tensors(out):
            if tensor.dtype == torch.float32 and tensor.numel():
                u = self._by_place(key, tensor) if name in PLACED else self._by_value(key, tensor)
                # An infinite or undefined result stays as it is.
                noise = torch.nan_to_num(self.scale * u * (tensor.abs() if size is None else size), 0.0, 0.0, 0.0)
                tensor.add_(noise)
        return out

    def _size(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | float | None:
        """The sum of magnitudes that the error is relative to; None where that is the result."""
        if not any(tensor.dtype == torch.float32 for tensor in tensors(args)):
            return None
        if name in PRODUCTS:
            a, b = args[PRODUCTS[name] : PRODUCTS[name] + 2]
            size: Tensor = a.abs() @ b.abs()
            return 0.0 if whole(a) and whole(b) and size.max() < 2**24 else size
        return tensors(func(*each(args, torch.abs), **kwargs))[0] if name in SUMS else None

    def _by_place(self, key: str, tensor: Tensor) -> Tensor:
        """Uniform in (−1, 1), the same for the same key."""
        start, n = zlib.crc32(key.encode()) % len(self.u), tensor.numel()
        if start + n <= len(self.u):
            return self.u[start : start + n].view(tensor.shape)
        return torch.cat((self.u[start:], self.u.repeat(n // len(self.u) + 1)))[:n].view(tensor.shape)

    def _by_value(self, key: str, tensor: Tensor) -> Tensor:
        """Uniform in (−1, 1), the same for the same key and the same bits but for sign and exponent."""
        mantissa = tensor.contiguous().view(torch.int32).bitwise_and(0x7FFFFF).long()
        return self.u[mantissa.mul_(48_271).add_(zlib.crc32(key.encode())).remainder_(len(self.u))]

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The fused kernel by its parts, whose products are perturbed; its own second result is kept for backward."""
        out, logsumexp = func(*args, **kwargs)
        q, k, v = args[:3]
        if q.dtype == torch.float64:
            return out, logsumexp
        causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
        with self:
            parts, _ = torch.ops.aten._scaled_dot_product_attention_math(
                *(t.float() for t in (q, k, v)),
                kwargs.get("attn_mask"),
                0.0,
                causal,
                scale=kwargs.get("scale"),
                enable_gqa=q.shape[-3] != k.shape[-3],
            )
        return out.copy_(parts), logsumexp


# --- inside the kernel ------------------------------------------------------------------------------------------------


class _Noting(ast.NodeTransformer):
    """Asserts of a cell's main line note that they failed; in functions and in `try` they act as written."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        words = ast.Constant(f"assert {ast.unparse(node.test)}")
        note = ast.Expr(ast.Call(ast.Name("__note__", ast.Load()), [words], []))
        return ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), node.test), [note], []), node)

    def visit(self, node: ast.AST) -> Any:
        inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Try)
        return node if isinstance(node, inner) else ast.fix_missing_locations(super().visit(node))


NOTES: list[str] = []


def install(seed: int, scale: float) -> None:
    """Called in the kernel before the first cell: perturb from now on, and note failed asserts instead of stopping."""
    from IPython import get_ipython

    from tokenbytoken import check, measure

    def undisturbed(fn: Callable[..., Any]) -> Callable[..., Any]:
        """What is measured is not compared, and noise makes it several times longer."""

        def call(*arguments: Any, **words: Any) -> Any:
            with _disable_current_modes():
                return fn(*arguments, **words)

        return call

    for name in ("calibrate", "timed", "interleaved"):
        setattr(measure, name, undisturbed(getattr(measure, name)))
    close = check.close

    def noting_close(got: Any, want: Any, tolerance: float, **words: Any) -> None:
        try:
            close(got, want, tolerance, **words)
        except AssertionError as error:
            if sys._getframe(1).f_code.co_name != "<module>":
                raise
            NOTES.append(str(error))
            close(want, want, tolerance, **words)  # the line that is stored

    check.close = noting_close
    builtins.__note__ = NOTES.append  # type: ignore[attr-defined]
    get_ipython().ast_transformers.append(_Noting())
    Perturbed(seed, scale).__enter__()


def noted() -> None:
    """Print and forget the asserts that failed since the last call."""
    print("\n".join(NOTES))
    NOTES.clear()


# --- outside ----------------------------------------------------------------------------------------------------------


# What may differ when only digits do; line breaks and blanks go with them, for columns are padded.
DIGITS = re.compile(r"[-−+]?\d[\d.,]*(e[-+]?\d+)?|\s+")


@dataclass
class Found:
    """What differs in one notebook, by the number of the code cell."""

    changed: dict[int, str] = field(default_factory=dict)  # stored characters, or the cell stopped
    words: set[int] = field(default_factory=set)  # those of them where no line differs in its digits alone
    asserts: dict[int, str] = field(default_factory=dict)  # failed and passed over
    narrow: dict[int, str] = field(default_factory=dict)  # words and asserts that turned at SCALE and stand at REAL


def examine(path: Path, seed: int, scale: float = SCALE) -> Found:
    """Run a notebook perturbed, and again at REAL if words or asserts turned."""
    found = rerun(path, seed, scale)
    if (found.words or found.asserts) and scale > REAL:
        real = rerun(path, seed, REAL)
        for turned, again, cells in ((found.changed, real.changed, found.words), (found.asserts, real.asserts, None)):
            for cell in sorted((turned if cells is None else cells) - again.keys()):
                found.narrow[cell] = "\n    ".join(filter(None, (found.narrow.get(cell), turned.pop(cell))))
    return found


def rerun(path: Path, seed: int, scale: float = SCALE, timeout: float = 600) -> Found:
    """Run a notebook perturbed, beside itself, and compare with its stored outputs; the file is only read."""
    import execute
    import nbformat
    import recorded
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell

    notebook = nbformat.read(path, as_version=4)
    cells = recorded.code_cells(notebook)
    stored = [cell.outputs for cell in cells]
    start = f"import sys; sys.path += {TOOLS[:1]!r}; import perturbed; perturbed.install({seed}, {scale})"
    after = [new_code_cell("perturbed.noted()") for _ in cells]
    notebook.cells = [new_code_cell(start), *(cell for pair in zip(cells, after, strict=True) for cell in pair)]
    beside = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=timeout, allow_errors=True, kernel_name="python3", resources=beside)
    client.execute(env=execute.kernel_environment(path.name), stderr=subprocess.DEVNULL)
    if notebook.cells[0].outputs:
        raise RuntimeError(f"{path.name}: {notebook.cells[0].outputs}")

    found = Found()
    for number, (cell, note, before) in enumerate(zip(cells, after, stored, strict=True), start=1):
        place = f"{path.stem}, code cell {number}, seed {seed}"
        old, new = lines_of(before), lines_of(execute.merge_streams(cell.outputs))
        if old != new:
            diff = difflib.unified_diff(old, new, lineterm="", n=0)
            shown = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
            found.changed[number] = "\n    ".join([place, *shown])
            if not any(a != b and DIGITS.sub("", a) == DIGITS.sub("", b) for a, b in zip(old, new, strict=False)):
                found.words.add(number)
        said = "".join(output.get("text", output.get("evalue", "")) for output in note.outputs).strip()
        if said:
            found.asserts[number] = "\n    ".join([place, *said.splitlines()])
    return found


def lines_of(outputs: list[NotebookNode]) -> list[str]:
    """What is compared, line by line; an error with its words. Files hold the forms of a value in the alphabet's order,
    a kernel sends them in its own."""
    import recorded

    errors = [f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"]
    texts = [text for parts in recorded.outline(outputs) for _, text in sorted(parts.items())]
    return [line for text in (*texts, *errors) for line in text.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--scale", type=float, default=SCALE)
    parser.add_argument("--jobs", type=int, default=2, help="notebooks at a time, with one thread each")
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted((ROOT / "book").glob("[0-9][0-9]_*.ipynb")))
    arguments = parser.parse_args()

    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    runs = [(path, seed) for path in arguments.notebooks for seed in arguments.seeds]
    changed = narrow = 0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(examine, path.resolve(), seed, arguments.scale): (path, seed) for path, seed in runs}
        for future in as_completed(futures):
            (path, seed), found = futures[future], future.result()
            faults = [*found.changed.values(), *found.asserts.values()]
            changed, narrow = changed + len(faults), narrow + len(found.narrow)
            print(f"{path.stem}, seed {seed}: {len(faults)} cells changed", flush=True)
            for text in (*faults, *(f"(stands at {REAL:.0e}) {text}" for text in found.narrow.values())):
                print(f"  {text}", flush=True)
    print(f"perturbed: {changed} cells changed; {narrow} checks with less than twentyfold margin")
    return 1 if changed else 0


sys.path += [folder for folder in TOOLS if folder not in sys.path]

if __name__ == "__main__":
    sys.exit(main())
