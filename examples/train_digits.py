"""Train a small network on scikit-learn's handwritten digits: shuffled, augmented, batched, collated, pinned.

    python examples/train_digits.py --epochs 15 --seed 0 --batch-size 32 --workers 2

What is printed on stdout depends on the seed, the epochs and the batch size alone: two runs print the same losses, with
any number of workers. The progress bar and the throughput, which depend on the machine, go to stderr.
"""

import argparse
import sys
import time

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits
from tqdm import tqdm

from pipes import Pipeline, batch, collate, execute, from_arrays, map, pin, pipe, sample, shuffled

type Image = npt.NDArray[np.float32]
type Sample = tuple[Image, np.int64]


def augment(sample: Sample, rng: np.random.Generator) -> Sample:
    """Shift an image by up to one pixel and make it noisy; `rng` belongs to this sample in this epoch."""
    image, label = sample
    down, right = rng.integers(0, 3, size=2)
    shifted = np.pad(image, ((0, 0), (1, 1), (1, 1)))[:, down : down + 8, right : right + 8]
    return shifted + rng.normal(0, 0.05, image.shape).astype(np.float32), label


def load(batch_size: int) -> tuple[Pipeline, Pipeline]:
    """Return the pipelines of the training data and of the held-out fifth."""
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    held_out = np.arange(len(labels)) % 5 == 4
    to_device = [pin()] if torch.accelerator.is_available() else []
    train = pipe(
        from_arrays(images[~held_out], labels[~held_out]),
        sample(shuffled()),
        map(augment),
        batch(batch_size, drop_last=True),
        collate(),
        *to_device,
    )
    return train, pipe(from_arrays(images[held_out], labels[held_out]), batch(256), collate(), *to_device)


def network() -> torch.nn.Module:
    """Return two convolutions and a linear layer."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 10),
    )


def accuracy(model: torch.nn.Module, pipeline: Pipeline, device: torch.device) -> float:
    """Return the share of images whose digit is recognised, in percent."""
    right = total = 0
    with torch.no_grad():
        for images, labels in pipeline:
            guesses = model(images.to(device)).argmax(dim=1)
            right += int((guesses == labels.to(device)).sum())
            total += len(labels)
    return 100 * right / total


def main() -> None:
    """Train, and print a line per epoch."""
    options = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    options.add_argument("--epochs", type=int, default=15)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--batch-size", type=int, default=32)
    options.add_argument("--workers", type=int, default=0)
    args = options.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # enough for a small network, and its sums do not depend on the number of cores
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    train, held_out = load(args.batch_size)
    loader = execute(train, workers=args.workers, seed=args.seed)
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    for epoch in range(args.epochs):
        total, samples, start = 0.0, 0, time.perf_counter()
        for images, labels in tqdm(loader, desc=f"epoch {epoch}", leave=False, file=sys.stderr):
            loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            optimizer.step()
            total, samples = total + loss.item() * len(labels), samples + len(labels)
        speed = samples / (time.perf_counter() - start)
        right = accuracy(model, held_out, device)
        print(f"epoch {epoch:2}  loss {total / samples:.6f}  held-out accuracy {right:.2f} %")
        print(f"epoch {epoch:2}  {speed:,.0f} samples/s", file=sys.stderr)


if __name__ == "__main__":
    main()
