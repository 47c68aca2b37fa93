"""A training run that is killed in the middle of an epoch and goes on as if nothing had happened.

The second run has another number of workers, and ends with the weights of a run that was never killed, bit for bit.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits

from pipes import Loader, batch, collate, execute, from_arrays, map, pipe, sample, shuffled

EPOCHS = 3
DIES_AFTER = 60  # of 45 steps an epoch


def noisy(row: tuple[npt.NDArray[np.float32], int], rng: np.random.Generator) -> tuple[npt.NDArray[np.float32], int]:
    """Augment an image; `rng` belongs to this sample in this epoch, whoever computes it."""
    image, label = row
    return image + rng.normal(0, 0.1, image.shape).astype(np.float32), label


def load(workers: int) -> Loader:
    """Return the digits, shuffled, augmented and in batches."""
    images, labels = load_digits(return_X_y=True)
    digits = from_arrays((images / 16).astype(np.float32)[:1437], labels.astype(np.int64)[:1437])
    return execute(pipe(digits, sample(shuffled()), map(noisy), batch(32), collate()), workers=workers, seed=5)


def train(checkpoint: Path, workers: int, dies_after: int) -> dict[str, torch.Tensor]:
    """Train from the checkpoint, if there is one; die after so many steps, if that is not 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = load(workers)
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])

    step = 0
    while loader.epoch < EPOCHS:
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if step == dies_after:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(states | {"loader": loader.state_dict()}, checkpoint)
                os.kill(os.getpid(), signal.SIGKILL)
    loader.close()
    return model.state_dict()


def run(folder: str, workers: int, dies_after: int = 0) -> int:
    """Train in a process of its own, and return how it ended."""
    arguments = [__file__, "--folder", folder, "--workers", str(workers), "--dies-after", str(dies_after)]
    return subprocess.run([sys.executable, *arguments], check=False).returncode


def main() -> None:
    """Train, be killed, go on, and compare with a run that was never killed."""
    options = argparse.ArgumentParser(description="Be killed in the middle of an epoch, and go on.")
    options.add_argument("--folder", default="", help="train there instead of showing the whole story")
    options.add_argument("--workers", type=int, default=0)
    options.add_argument("--dies-after", type=int, default=0)
    args = options.parse_args()
    if args.folder:
        weights = train(Path(args.folder, "checkpoint.pt"), args.workers, args.dies_after)
        torch.save(weights, Path(args.folder, "weights.pt"))
        return

    with tempfile.TemporaryDirectory() as folder:
        ended = run(folder, workers=2, dies_after=DIES_AFTER)
        assert ended == -signal.SIGKILL
        state = torch.load(Path(folder, "checkpoint.pt"), weights_only=True)["loader"]
        print(f"killed in epoch {state['epoch']} after {state['outputs']} batches, with 2 workers")
        assert run(folder, workers=1) == 0
        resumed = torch.load(Path(folder, "weights.pt"), weights_only=True)
        whole = train(Path(folder, "none"), workers=0, dies_after=0)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    print("gone on with 1 worker: the final weights are those of an uninterrupted run, bit for bit")


if __name__ == "__main__":
    main()
