"""Character data sets: tinyshakespeare, and synthetic sentences where that is not found."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyhands.datasets.folders import folders
from manyhands.errors import TaskError

Pair = tuple[Tensor, Tensor]


def tinyshakespeare(data: Path | str | None = None, block: int = 64) -> tuple[Pair, Pair, int]:
    """((x, y) to train, (x, y) to test, vocabulary size).

    x holds rows of `block` character ids, y the same shifted by one.
    """
    name, train, test, vocabulary = text(data, block)
    if name != "tinyshakespeare":
        warnings.warn(f"using {name}", stacklevel=2)
    return train, test, vocabulary


def text(data: Path | str | None = None, block: int = 64) -> tuple[str, Pair, Pair, int]:
    """Tinyshakespeare where it is found, else synthetic sentences; the name says which.

    The first 90% are for training, the rest for testing.
    """
    searched = folders(data)
    places = [
        under / "tinyshakespeare.txt" for folder in searched for under in (folder / "text", folder)
    ]
    found = next((p for p in places if p.is_file()), None)
    if found is not None:
        name, characters = "tinyshakespeare", found.read_text(encoding="utf-8")
    else:
        name, characters = (
            f"synthetic text (tinyshakespeare.txt not found in {', '.join(map(str, searched))})",
            _sentences(),
        )
    codes = np.frombuffer(characters.encode("utf-32-le"), dtype=np.uint32)
    alphabet, ids = np.unique(codes, return_inverse=True)
    cut = len(ids) * 9 // 10
    train, test = _rows(ids[:cut], block), _rows(ids[cut:], block)
    return name, train, test, len(alphabet)


def _rows(ids: np.ndarray, block: int) -> Pair:
    if not 1 <= block < len(ids):
        raise TaskError(
            f"block={block}, but the text has {len(ids)} characters to cut from; "
            f"use 1 to {len(ids) - 1}"
        )
    n = (len(ids) - 1) // block
    stream = torch.from_numpy(ids.astype(np.int64))
    return stream[: n * block].view(n, block).clone(), stream[1 : n * block + 1].view(
        n, block
    ).clone()


def _sentences(num_characters: int = 200_000) -> str:
    """English-looking lines with a grammar to learn, the same on every machine."""
    dice = random.Random(0)
    nouns = "king queen fool ghost soldier sister letter crown river winter garden morning".split()
    verbs = "sees follows forgets praises fears answers carries betrays".split()
    adjectives = "old bright silent gentle broken wicked golden weary".split()
    lines: list[str] = []
    length = 0
    while length < num_characters:
        subject, other = dice.sample(nouns, 2)
        line = f"The {dice.choice(adjectives)} {subject} {dice.choice(verbs)} the {other}"
        line += (
            dice.choice(
                [".", "!", f", and the {dice.choice(adjectives)} {other} {dice.choice(verbs)} him."]
            )
            + "\n"
        )
        lines.append(line)
        length += len(line)
    return "".join(lines)
