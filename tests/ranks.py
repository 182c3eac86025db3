"""Tensor-parallel ranks for test_parallel.py: imports PyTorch once, then forks the ranks of each case.

``python tests/ranks.py CASES.json`` runs every case and writes what each rank found to ``results.json`` beside it.
The last one, "launched", is started by torchrun's own launcher, which forks as well.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import torch
import torch.distributed as dist

import tokenbytoken as tbt
from tokenbytoken.__main__ import main
from tokenbytoken.run.parallel import Collectives, RankLost, load_parallel, parallelize, ranks, shard


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Peak:
    """The growth of this process's own memory (files mapped into it left out) inside a ``with``, at its highest."""

    def __enter__(self) -> Peak:
        self.start, self.bytes, self.done = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(0.002):
            self.bytes = max(self.bytes, self.now() - self.start)

    @staticmethod
    def now() -> int:
        with open("/proc/self/status") as status:
            return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

    def __exit__(self, *error: Any) -> None:
        self.done.set()
        self.thread.join()
        self.bytes = max(self.bytes, self.now() - self.start)


def parameter_bytes(model: tbt.Decoder) -> int:
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return sum(p.numel() * p.element_size() for p in local)


# --- cases: each takes (case, group) and returns what it found, as JSON --------------------------------


def parity(case: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Logits of every kind of pass, tokens, bytes and collectives of one checkpoint."""
    from torch.distributed.tensor.debug import CommDebugMode

    model = load_parallel(case["source"], group)
    own = shard(model.config, group.rank(), group.size()).config
    tokens = torch.tensor(case["tokens"])  # (2, T)
    B, T = tokens.shape
    with Collectives() as counted:
        logits = model(tokens)
    with CommDebugMode() as reference:
        model(tokens)
    state = model.new_state(B, T)
    chunks = [model(chunk, state) for chunk in tokens.split([5, 1, T - 6], dim=1)]
    padded = model.new_state(B, T, padding=[0, 3])
    shifted = torch.stack([tokens[0], torch.cat([tokens[1, :3] * 0, tokens[1, : T - 3]])])
    try:
        model(tokens, tbt.load(case["source"]).new_state(B, T))
        foreign = ""
    except ValueError as error:
        foreign = str(error)
    torch.manual_seed(group.rank())
    prompts = [row[:4].tolist() for row in tokens]
    return {
        "logits": logits.tolist(),
        "chunked": torch.cat(chunks, dim=1).tolist(),
        "padded": model(shifted, padded)[1, 3:].tolist(),
        "tokens": tbt.generate(model, prompts, case["steps"]),
        # Without a seed every rank draws its own.
        "sampled": tbt.generate(model, prompts, 2 * case["steps"], temperature=1.0),
        "ended": tbt.generate(model, prompts, 12, eos_ids=case["eos"], temperature=1.0),
        "foreign": foreign,
        "parameter_bytes": parameter_bytes(model),
        "planned_parameter_bytes": 4 * tbt.count_parameters(own).total,
        "state_bytes": state.nbytes,
        "planned_state_bytes": tbt.state_bytes(own, B, T, bytes_per_element=4),
        "calls": counted.calls,
        "nbytes": counted.nbytes,
        "calls_by_torch": sum(reference.get_comm_counts().values()),
    }


def alone(case: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """One rank is the plain model, to the bit; and a model in memory can be cut as well as a file."""
    plain = tbt.load(case["source"])
    tokens = torch.tensor(case["tokens"])
    return {"equal": torch.equal(load_parallel(case["source"], group)(tokens), plain(tokens)),
            "from_memory": torch.equal(parallelize(plain, group)(tokens), plain(tokens))}  # fmt: skip


def memory(case: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    with Peak() as peak:
        model = load_parallel(case["source"], group)
    found: dict[str, Any] = {"peak": peak.bytes, "held": parameter_bytes(model)}
    if "prompt" in case:
        found["tokens"] = tbt.generate(model, case["prompt"], 6)
    del model
    if case.get("control") and group.rank() == 0:  # that the measurement can fail: the whole model is seen
        with Peak() as peak:
            whole = tbt.load(case["source"])
        found["held_whole"] = parameter_bytes(whole)
        found["whole_peak"] = peak.bytes
    return found


def refused(case: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    with Collectives() as counted:
        try:
            load_parallel(case["source"], group)
        except ValueError as error:
            return {"error": str(error), "calls": counted.calls}
    return {"error": None}


def lost(case: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Rank 1 is killed, hangs, or fails by itself before its second collective."""
    dist.all_reduce(torch.ones(3))
    if group.rank() == 1:
        if case["how"] == "raise":
            raise KeyError("only rank 1")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}[case["how"]])
    dist.all_reduce(torch.ones(3))
    return {"error": None}


def command(case: dict[str, Any]) -> dict[str, Any]:
    """``python -m tokenbytoken generate --tensor-parallel``, with some options of rank 1 alone."""
    options = case["options"] + (case["of_rank_1"] if os.environ["RANK"] == "1" else [])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["generate", *options, "--tensor-parallel"])
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


CASES: dict[str, Callable[[dict[str, Any], dist.ProcessGroup], dict[str, Any]]] = {
    f.__name__: f for f in (parity, alone, memory, refused, lost)
}


def rank_main(case: dict[str, Any], out: Path) -> None:
    started = time.monotonic()
    try:
        if case["kind"] == "command":
            found = command(case)
        else:
            with torch.no_grad(), ranks(timeout=case.get("timeout", 60.0)) as group:
                found = CASES[case["kind"]](case, group)
    except RankLost as error:
        found = {"lost": str(error)}
    except Exception:
        found = {"raised": traceback.format_exc()}
    found["seconds"] = time.monotonic() - started
    out.write_text(json.dumps(found))


def run(case: dict[str, Any], folder: Path) -> list[dict[str, Any] | None]:
    """Fork the ranks of one case and wait for them; None for a rank that wrote nothing."""
    os.environ.update(WORLD_SIZE=str(case["world"]), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    children = {}
    for rank in range(case["world"]):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(rank)
            try:
                rank_main(case, folder / f"{case['name']}.{rank}.json")
            finally:
                os._exit(0)
        children[rank] = child
    os.waitpid(children.pop(0), 0)
    for child in children.values():
        if case["kind"] == "lost":
            os.kill(child, signal.SIGKILL)  # one that hangs would never end by itself
        os.waitpid(child, 0)
    files = [folder / f"{case['name']}.{rank}.json" for rank in range(case["world"])]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def die() -> None:
    """A rank that sums until rank 1 is killed."""
    with ranks() as group:
        for step in range(1000):
            dist.all_reduce(torch.ones(3))
            if step == 20 and group.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def launched() -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="die",
        max_restarts=0, start_method="fork",
    )  # fmt: skip
    started = time.monotonic()
    try:
        elastic_launch(config, die)()
        failed = ""
    except ChildFailedError as error:
        failed = str(error)
    return {"failed": failed, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    import torch._dynamo  # DTensor imports it at its first use: once, here, rather than in every rank
    import torch.distributed.tensor.parallel

    path = Path(sys.argv[1])
    results = {case["name"]: run(case, path.parent) for case in json.loads(path.read_text())}
    results["launched"] = [launched()]
    (path.parent / "results.json").write_text(json.dumps(results))
