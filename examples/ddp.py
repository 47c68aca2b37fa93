"""A job on two ranks, saved in the middle of an epoch and continued on one rank with the double batch size.

Positions are global: the samples that the job sees, step by step, are those of a job that ran on one rank throughout.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

from pipes import Loader, batch, collate, enumerate, execute, from_arrays, pipe, sample, shard_by_rank, shuffled

GLOBAL_BATCH = 32
STEPS_ON_TWO = 20


def load(world_size: int) -> Loader:
    """Return this rank's share of the shuffled digits, numbered, in its share of the global batch."""
    images, labels = load_digits(return_X_y=True)
    digits = pipe(from_arrays((images / 16).astype(np.float32), labels.astype(np.int64)), enumerate())
    share = shard_by_rank(uneven="drop")  # rank and world size are what torchrun put in the environment
    pipeline = pipe(digits, sample(shuffled()), share, batch(GLOBAL_BATCH // world_size), collate())
    return execute(pipeline)


def train(loader: Loader, model: torch.nn.Module, steps: int) -> list[list[int]]:
    """Train for some steps, and return the numbers of the samples of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for numbers, (images, labels) in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seen.append(numbers.tolist())
        if len(seen) == steps:
            break
    return seen


def network() -> torch.nn.Module:
    """Return the model, with the same weights in every process."""
    torch.manual_seed(0)
    return torch.nn.Linear(64, 10)


def rank(folder: Path) -> None:
    """Be one of the ranks: train with the others, and let rank 0 save the job."""
    dist.init_process_group("gloo")
    loader, model = load(dist.get_world_size()), network()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    seen = train(loader, parallel, STEPS_ON_TWO)
    del parallel  # it holds threads of the process group
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, seen)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "model.pt")
        order = [[i for turn in zip(*step, strict=True) for i in turn] for step in zip(*of_all, strict=True)]
        (folder / "job.json").write_text(json.dumps({"loader": loader.state_dict(), "seen": order}))
    loader.close()
    dist.barrier()
    dist.destroy_process_group()


def launch(folder: str, ranks: int) -> None:
    """Run this file on some ranks, over the loopback interface."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*torchrun, "--nproc-per-node", str(ranks), __file__, folder]
    subprocess.run(command, env=os.environ | settings, check=True)


def main() -> None:
    """Begin on two ranks, go on with one, and compare with a job on one rank."""
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        rank(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        launch(folder, ranks=2)
        saved = json.loads(Path(folder, "job.json").read_text())
        weights = torch.load(Path(folder, "model.pt"), weights_only=True)
    print(f"two ranks: {len(saved['seen'])} steps of 2 x {GLOBAL_BATCH // 2} samples")

    loader, model = load(world_size=1), network()
    loader.load_state_dict(saved["loader"])
    model.load_state_dict(weights)
    rest = train(loader, model, steps=0)
    print(f"one rank:  {len(rest)} steps of {GLOBAL_BATCH} samples")

    alone = network()
    whole = train(load(world_size=1), alone, steps=0)
    assert saved["seen"] + rest == whole
    print(f"the {sum(len(step) for step in whole)} samples of the epoch came in the order of a job on one rank")
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


if __name__ == "__main__":
    main()
