"""Stages are plain functions from iterable to iterator: no torch, no executor, no framework around them."""

import random
from collections.abc import Iterable, Iterator

import more_itertools
import toolz

from pipes import batch, filter, flat_map, map, pipe, sample, shuffle_buffer, shuffled, take

TEXT = ["to be or not to be", "that is the question", "", "whether tis nobler in the mind to suffer"]


def adjacent(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pair each word with the next: any such generator function is a stage."""
    return more_itertools.pairwise(words)


def noisy(word: str) -> str:
    """Shuffle the letters with the global generator, which a pipeline seeds for it."""
    letters = list(word)
    random.shuffle(letters)
    return "".join(letters)


def main() -> None:
    """Show stages alone, in toolz, and in a pipeline."""
    # 1. A stage is called on any iterable and is lazy.
    assert list(batch(2)("abc")) == [["a", "b"], ["c"]]

    # 2. So toolz composes them, and needs to know nothing about them.
    long_words = toolz.pipe(TEXT, flat_map(str.split), filter(lambda word: len(word) > 5), list)
    assert long_words == ["question", "whether", "nobler", "suffer"]
    first_pair = toolz.compose(list, take(1), batch(2), map(str.upper), flat_map(str.split))
    assert first_pair(TEXT) == [["TO", "BE"]]

    # 3. And a function of yours, or one of more_itertools, is a stage of a pipeline.
    pairs = pipe(TEXT, flat_map(str.split), adjacent)
    assert list(pairs)[:2] == [("to", "be"), ("be", "or")]
    assert list(pipe(range(4), more_itertools.triplewise)) == [(0, 1, 2), (1, 2, 3)]

    # 4. A pipeline is a value: it has a length, random access and a repr, and it runs the same every time.
    shuffled_words = pipe(["question", "whether", "nobler", "suffer"], sample(shuffled()), map(noisy))
    random.seed(1)
    once = list(shuffled_words)
    random.seed(2)
    assert list(shuffled_words) == once
    assert shuffled_words[3] == once[3]
    assert list(shuffled_words.at_epoch(1)) != once
    print(shuffled_words)
    print(once)

    # 5. A stream has no random access, but a window of it can be shuffled.
    print(list(pipe((n * n for n in range(10)), shuffle_buffer(4), batch(5))))


if __name__ == "__main__":
    main()
