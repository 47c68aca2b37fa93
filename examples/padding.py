"""Sequences of different lengths: `collate(fn)` with a function that pads each batch to its longest."""

from typing import NamedTuple

import torch

from pipes import batch, collate, map, pipe, sample, shuffled

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "immediately"]


class Padded(NamedTuple):
    """A batch: one row per word, zeros behind its end, and how long each word is."""

    letters: torch.Tensor
    lengths: torch.Tensor


def encode(word: str) -> torch.Tensor:
    """Number the letters from 1, so that 0 is free for padding."""
    return torch.tensor([ord(letter) - ord("a") + 1 for letter in word])


def pad(words: list[torch.Tensor]) -> Padded:
    """Put the words of one batch into one tensor."""
    letters = torch.nn.utils.rnn.pad_sequence(words, batch_first=True)
    return Padded(letters, torch.tensor([len(word) for word in words]))


def main() -> None:
    """Pad, and show that nothing was lost; without `fn`, collate says what does not fit."""
    encoded = pipe(WORDS, sample(shuffled()), map(encode), batch(4))
    padded = pipe(encoded, collate(pad))
    for letters, lengths in padded:
        print(f"{letters.shape[0]} words, longest {letters.shape[1]}, lengths {lengths.tolist()}")
        assert letters.shape == (len(lengths), int(lengths.max()))
        assert torch.equal((letters > 0).sum(dim=1), lengths)
    assert sum(int(lengths.sum()) for _, lengths in padded) == sum(len(word) for word in WORDS)

    try:
        list(pipe(encoded, collate()))
    except ValueError as error:
        print(error)


if __name__ == "__main__":
    main()
