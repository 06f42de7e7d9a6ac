"""What the model reads: characters as numbers, batches of them, and how well counting predicts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from fastattn.demo._errors import DemoError
from fastattn.demo._files import read_text
from fastattn.demo.train.model import Ints

#: How many characters, the commonest of a text, have an id of their own; the others are `OTHER`.
MAX_VOCABULARY = 512
OTHER = "\ufffd"

#: This share of a text, its end, is held out, up to so many characters.
HELD_OUT, MAX_HELD_OUT = 0.1, 65536


@dataclass(frozen=True)
class Text:
    """A text as ids of its characters, in two pieces."""

    name: str
    vocabulary: str  #: the character of each id
    training: Ints
    held_out: Ints

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.vocabulary[number] for number in ids)

    def batch(self, size: int, length: int, rng: np.random.Generator) -> Ints:
        """Pieces of the training text that start anywhere, ``(size, length)``."""
        starts = rng.integers(0, len(self.training) - length + 1, size)
        batch: Ints = self.training[starts[:, None] + np.arange(length)]
        return batch

    def held_out_windows(self, length: int) -> Ints:
        """The held-out text in rows of `length` ids; the last of each is the first of the next."""
        starts = np.arange(0, len(self.held_out) - length + 1, length - 1)
        windows: Ints = self.held_out[starts[:, None] + np.arange(length)]
        return windows


def load_text(path: Path | None, context: int) -> Text:
    """A UTF-8 text file, or Python's documentation where there is none.

    Raises
    ------
    DemoError
        If the file cannot be read as text, or is too short to hold one piece of the context out.
    """
    characters = built_in_text() if path is None else read_text(path, "the file")
    name = "Python's own documentation (pydoc's topics)" if path is None else str(path)
    num_held_out = min(int(HELD_OUT * len(characters)), MAX_HELD_OUT)
    if num_held_out <= context:
        shortest = round((context + 1) / HELD_OUT)
        raise DemoError(
            f"{name} is too short: {len(characters)} characters, expected {shortest} or more with "
            f"--context {context}, so that one piece of that length can be held out"
        )
    common = [character for character, _ in Counter(characters).most_common(MAX_VOCABULARY + 1)]
    if len(common) > MAX_VOCABULARY:
        common = [*(set(common[: MAX_VOCABULARY - 1]) - {OTHER}), OTHER]
    vocabulary = "".join(sorted(common))
    number_of = {character: number for number, character in enumerate(vocabulary)}
    ids = np.fromiter((number_of.get(it, number_of.get(OTHER, 0)) for it in characters), np.int64)
    return Text(name, vocabulary, ids[:-num_held_out], ids[-num_held_out:])


def built_in_text() -> str:
    """The topics of Python's ``help()``, some 370,000 characters.

    Some topics hold others. Each paragraph is taken once, so that none is both held out and trained on.
    """
    paragraphs = (paragraph for topic in topics.values() for paragraph in topic.strip().split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs))


@dataclass(frozen=True)
class Baselines:
    """The mean loss on the held-out text of models that count in the training text."""

    unigram: float  #: how often each character comes
    bigram: float  #: how often each character comes after each


def count(text: Text) -> Baselines:
    """Both with one added to every count, so that what never came has a probability."""
    size = len(text.vocabulary)
    singles = np.bincount(text.training, minlength=size) + 1
    pairs = np.bincount(text.training[:-1] * size + text.training[1:], minlength=size * size) + 1
    of_pairs = np.log(pairs.reshape(size, size)) - np.log(pairs.reshape(size, size).sum(axis=1))[:, None]
    before, after = text.held_out[:-1], text.held_out[1:]
    return Baselines(
        unigram=-float(np.log(singles / singles.sum())[after].mean()),
        bigram=-float(of_pairs[before, after].mean()),
    )
