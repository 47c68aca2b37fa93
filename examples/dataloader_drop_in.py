"""The `DataLoader` of pipes in the place of torch's: one script, two loaders, the same losses to the last digit.

    python examples/dataloader_drop_in.py --loader pipes --workers 2 --epochs 3
    python examples/dataloader_drop_in.py --loader torch --workers 2 --epochs 3

The data set draws its augmentation from torch's global generator, as many do. What is printed on stdout depends on the
number of workers, since torch seeds each worker by its number, but not on the loader. The time goes to stderr.
"""

import argparse
import sys
import time

import torch
from sklearn.datasets import load_digits

from pipes import DataLoader

type Sample = tuple[torch.Tensor, torch.Tensor]
type Loader = torch.utils.data.DataLoader[Sample]

LOADERS: dict[str, type[Loader]] = {"pipes": DataLoader, "torch": torch.utils.data.DataLoader}


class Digits(torch.utils.data.Dataset[Sample]):
    """Handwritten digits: four fifths to train on, augmented, or the held-out fifth as it is."""

    def __init__(self, held_out: bool) -> None:
        digits = load_digits()
        here = (torch.arange(len(digits.target)) % 5 == 4) == held_out
        self.images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)[here]
        self.labels = torch.tensor(digits.target)[here]
        self.augmented = not held_out

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        image = self.images[index]
        return augment(image) if self.augmented else image, self.labels[index]


def augment(image: torch.Tensor) -> torch.Tensor:
    """Shift an image by up to one pixel and make it noisy, by draws from torch's global generator."""
    down, right = torch.randint(0, 3, (2,)).tolist()
    shifted = torch.nn.functional.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
    return shifted + 0.05 * torch.randn(image.shape)


def network() -> torch.nn.Module:
    """Return a convolution and a linear layer."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 4 * 4, 10),
    )


def accuracy(model: torch.nn.Module, loader: Loader) -> float:
    """Return the share of images whose digit is recognised, in percent."""
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(dim=1) == labels).sum())
            total += len(labels)
    return 100 * right / total


def main() -> None:
    """Train, and print a line per epoch."""
    options = argparse.ArgumentParser(description="Train on handwritten digits with either of two loaders.")
    options.add_argument("--loader", choices=sorted(LOADERS), default="pipes")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--workers", type=int, default=2)
    args = options.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # enough for a small network, and its sums do not depend on the number of cores
    make = LOADERS[args.loader]  # nothing below knows which of the two it is
    train = make(
        Digits(held_out=False),
        batch_size=32,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    held_out = make(Digits(held_out=True), batch_size=256)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for epoch in range(args.epochs):
        total, samples, start = 0.0, 0, time.perf_counter()
        for images, labels in train:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            optimizer.step()
            total, samples = total + loss.item() * len(labels), samples + len(labels)
        took = time.perf_counter() - start
        print(f"epoch {epoch}  loss {total / samples:.9f}  held-out accuracy {accuracy(model, held_out):.2f} %")
        print(f"epoch {epoch}  {took:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
