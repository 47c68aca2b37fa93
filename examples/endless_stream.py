"""An endless source: a function that makes a fresh stream for each run, and `take` to end an epoch."""

import itertools
from collections.abc import Iterator

import numpy as np

from pipes import batch, collate, from_iterable, map, pipe, take


def readings(rng: np.random.Generator) -> Iterator[tuple[int, float]]:
    """Yield (time, temperature) for ever; `rng` is the run's own, so each epoch is another stream."""
    temperature = 20.0
    for second in itertools.count():
        temperature += rng.normal(0, 0.1)
        yield second, temperature


def to_fahrenheit(reading: tuple[int, float]) -> tuple[int, float]:
    """Convert one reading."""
    second, celsius = reading
    return second, celsius * 1.8 + 32


def main() -> None:
    """Average batches of an endless stream."""
    endless = pipe(from_iterable(readings), map(to_fahrenheit), batch(60), collate(to="numpy"))
    hour = pipe(endless, take(60))

    for seconds, temperatures in itertools.islice(endless, 2):  # a loop may also just stop
        print(f"from second {seconds[0]}: {temperatures.mean():.2f} F")
    means = [float(temperatures.mean()) for _, temperatures in hour]
    assert len(means) == 60
    assert means == [float(temperatures.mean()) for _, temperatures in hour], "a run can be repeated"
    assert means != [float(temperatures.mean()) for _, temperatures in hour.at_epoch(1)], "the next epoch is another"
    print(f"an hour: from {min(means):.2f} to {max(means):.2f} F")


if __name__ == "__main__":
    main()
