"""Sequences of items: read from a file of "USER ITEM" lines, and split so that each user's last items are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from softsieve.errors import InputError, shown
from softsieve.tasks.files import read_lines

FEWEST = 3  # items of a user that is asked: one to start from, one for validation, one for test


class Sequences(NamedTuple):
    """What users took, in order of time."""

    users: list[Tensor]  # item numbers
    items: list[str]  # the name of each number


class Questions(NamedTuple):
    """What a user took next, given what came before."""

    histories: list[Tensor]
    answers: Tensor  # (users,)


class Split(NamedTuple):
    """The last item of each user is a test question, the one before it a validation question."""

    train: list[Tensor]
    validation: Questions
    test: Questions
    items: int  # how many there are


def read_sequences(path: Path) -> Sequences:
    """Read a file with a line ``USER ITEM`` for each item a user took: a user's lines together, in order of time.

    Users and items are any words; the file may be a .gz or .xz.

    Raises:
        InputError: naming the line, when it is not two words, or when a user comes back after another one.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "taken.txt")
        ...     _ = path.write_text("ann soap\\nann comb\\nbob soap\\n")
        ...     read_sequences(path)
        Sequences(users=[tensor([0, 1]), tensor([0])], items=['soap', 'comb'])
    """
    users: dict[str, list[int]] = {}
    numbers: dict[str, int] = {}
    current = None
    for place, line in read_lines(path):
        words = line.split()
        if len(words) != 2:
            raise InputError(f"{place}: expected USER ITEM, two words, found {shown(line)}")
        user, item = words
        if user != current and user in users:
            raise InputError(f"{place}: expected the lines of a user together, found {shown(user)} again")
        current = user
        users.setdefault(user, []).append(numbers.setdefault(item, len(numbers)))
    if not users:
        raise InputError(f"{path}: expected lines USER ITEM, found none")
    return Sequences([torch.tensor(items) for items in users.values()], list(numbers))


def leave_last_out(sequences: Sequences, place: object = "data") -> Split:
    """Keep each user's last item for test and the one before for validation; train on what comes before both.

    Users with fewer than three items are trained on and not asked.

    Raises:
        InputError: naming ``place``, when no user can be asked, or none has two items to train on.

    Example:
        >>> split = leave_last_out(Sequences([torch.tensor([0, 1, 2, 3])], list("abcd")))
        >>> split.train, split.validation.answers, split.test
        ([tensor([0, 1])], tensor([2]), Questions(histories=[tensor([0, 1, 2])], answers=tensor([3])))
    """
    asked = [items for items in sequences.users if len(items) >= FEWEST]
    train = [items[:-2] if len(items) >= FEWEST else items for items in sequences.users]
    train = [items for items in train if len(items) > 1]
    for what, users in {f"{FEWEST} items to be asked for the last": asked, "2 items to train on": train}.items():
        if not users:
            raise InputError(f"{place}: expected users with {what}, found none")
    validation, test = (
        Questions([items[:end] for items in asked], torch.stack([items[end] for items in asked])) for end in (-2, -1)
    )
    return Split(train, validation, test, len(sequences.items))


def pad(sequences: Sequence[Tensor], most: int) -> tuple[Tensor, Tensor]:
    """The last ``most`` items of each, filled up with item 0 behind them, and their numbers.

    A model that does not look ahead never sees what is behind, so no number stands for nothing.

    Example:
        >>> pad([torch.tensor([5, 6, 7]), torch.tensor([8])], 2)
        (tensor([[6, 7],
                [8, 0]]), tensor([2, 1]))
    """
    recent = [items[-most:] for items in sequences]
    return torch.nn.utils.rnn.pad_sequence(recent, batch_first=True), torch.tensor([len(items) for items in recent])
