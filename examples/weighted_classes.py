"""A rare class seen as often as a frequent one: draw samples by weight, with `DataLoader` and with combinators.

    python examples/weighted_classes.py --size 2000 --seed 0

Of scikit-learn's handwritten digits all zeros are kept, and a twentieth of the others. The weight of a sample is one
over the size of its class. Each line tells how often each class came in one epoch.
"""

import argparse
from collections.abc import Iterable

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset, WeightedRandomSampler

from pipes import DataLoader, Order, Pipeline, batch, collate, from_arrays, pipe, sample, shuffled, weighted

type Batch = list[torch.Tensor]


def imbalanced() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels of all zeros, and of every twentieth image of each other digit."""
    digits = load_digits()
    kept = [np.flatnonzero(digits.target == digit)[:: 1 if digit == 0 else 20] for digit in range(10)]
    here = np.concatenate(kept)
    return torch.tensor(digits.images[here] / 16, dtype=torch.float32), torch.tensor(digits.target[here])


def by_loader(images: torch.Tensor, labels: torch.Tensor, sampler: WeightedRandomSampler | None) -> Iterable[Batch]:
    """Return batches as `DataLoader` makes them: by the sampler, or shuffled."""
    data = TensorDataset(images, labels)
    return DataLoader(data, batch_size=32, sampler=sampler, shuffle=sampler is None)


def by_pipe(images: torch.Tensor, labels: torch.Tensor, order: Order) -> Pipeline:
    """Return the same as a pipeline."""
    return pipe(from_arrays(images, labels), sample(order), batch(32), collate())


def show(name: str, numbers: Iterable[int]) -> None:
    """Print a line of the table."""
    print(f"{name:34}" + "".join(f"{number:5}" for number in numbers))


def classes(batches: Iterable[Batch]) -> list[int]:
    """Return how often each class comes in an epoch."""
    counts: list[int] = torch.bincount(torch.cat([labels for _, labels in batches]), minlength=10).tolist()
    return counts


def main() -> None:
    """Count the classes of an epoch, without weights and with them, both ways."""
    options = argparse.ArgumentParser(description="Draw the samples of rare classes more often.")
    options.add_argument("--size", type=int, default=2000, help="how many samples an epoch with weights draws")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()

    torch.manual_seed(args.seed)
    images, labels = imbalanced()
    weights = 1 / torch.bincount(labels)[labels]
    sampler = WeightedRandomSampler(weights.tolist(), args.size)

    show("class", range(10))
    show("DataLoader, shuffled", classes(by_loader(images, labels, None)))
    show("DataLoader, WeightedRandomSampler", classes(by_loader(images, labels, sampler)))
    show("pipe, shuffled", classes(by_pipe(images, labels, shuffled()).seeded(args.seed)))
    show("pipe, weighted", classes(by_pipe(images, labels, weighted(weights, args.size)).seeded(args.seed)))


if __name__ == "__main__":
    main()
