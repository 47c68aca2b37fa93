"""A batch of a class of your own: made by `collate_fn`, pinned by its `pin_memory` method.

    python examples/custom_batch_pin.py --workers 2

Pinned memory is memory that an accelerator copies from without waiting. Without an accelerator there is nothing to pin
for, and the script says so.
"""

import argparse
from dataclasses import dataclass
from typing import Self

import torch
from sklearn.datasets import load_digits

from pipes import DataLoader

type Sample = tuple[torch.Tensor, ...]


@dataclass
class Batch:
    """Images and labels; it is the loader that calls `pin_memory`."""

    x: torch.Tensor
    y: torch.Tensor

    def pin_memory(self) -> Self:
        """Move the tensors to pinned memory; what is returned is what the loader yields."""
        self.x, self.y = self.x.pin_memory(), self.y.pin_memory()
        return self


def join(samples: list[Sample]) -> Batch:
    """Make a batch of samples; this runs in the workers, and pinning does not."""
    images, labels = zip(*samples)
    return Batch(torch.stack(images), torch.stack(labels))


def load(workers: int) -> DataLoader[Sample]:
    """Return a loader of the digits, which pins if there is something to pin for."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    can_pin = torch.accelerator.is_available()  # a plain True works anywhere, but warns where there is no accelerator
    data = torch.utils.data.TensorDataset(images, labels)
    return DataLoader(data, batch_size=256, num_workers=workers, collate_fn=join, pin_memory=can_pin)


def main() -> None:
    """Load an epoch, and say of what type its batches are and whether they are pinned."""
    options = argparse.ArgumentParser(description="Load batches of a class of your own, in pinned memory.")
    options.add_argument("--workers", type=int, default=2)
    args = options.parse_args()

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    print(f"accelerator: {device.type if accelerator else 'none'}")
    for batch in load(args.workers):
        pinned = "pinned" if batch.x.is_pinned() and batch.y.is_pinned() else "not pinned"
        x = batch.x.to(device, non_blocking=True)  # goes on at once if the batch is pinned
        print(f"{type(batch).__name__} of {len(batch.y)}: {pinned}, mean {x.mean().item():.4f}")


if __name__ == "__main__":
    main()
