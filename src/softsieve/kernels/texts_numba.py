"""Hashed features of texts in numba: what `softsieve.tasks.encode.text_ids` gives, for many texts at once.

Texts come as code points in lower case, one after the other; text ``r`` is ``points[starts[r] : starts[r + 1]]``.
What a code point is for is in ``kinds``: 0 divides words, 1 is part of a word, 2 is a word of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from softsieve.kernels.base_numba import jit, jit_stage

START, MASK = np.uint32(0xFFFFFFFF), np.uint32(0xFF)
LONGEST = 5  # characters of the longest pieces of a word


def _crc_table() -> Any:
    """What a CRC-32 goes on with, by its lowest byte."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> np.uint32(1)) ^ np.uint32(0xEDB88320), values >> np.uint32(1))
    return values.astype(np.uint32)


TABLE = _crc_table()


@jit_stage
def _add_byte(crc: Any, byte: Any) -> Any:
    return np.uint32(TABLE[(crc ^ np.uint32(byte)) & MASK] ^ (crc >> np.uint32(8)))


@jit_stage
def _add_point(crc: Any, point: Any) -> Any:
    """The CRC after the UTF-8 bytes of a code point; half a character goes as if it were a whole one."""
    if point < 0x80:
        return _add_byte(crc, point)
    if point < 0x800:
        crc = _add_byte(crc, 0xC0 | point >> 6)
    else:
        if point < 0x10000:
            crc = _add_byte(crc, 0xE0 | point >> 12)
        else:
            crc = _add_byte(crc, 0xF0 | point >> 18)
            crc = _add_byte(crc, 0x80 | point >> 12 & 0x3F)
        crc = _add_byte(crc, 0x80 | point >> 6 & 0x3F)
    return _add_byte(crc, 0x80 | point & 0x3F)


@jit_stage
def _bucket(crc: Any, buckets: Any) -> Any:
    return np.int64(crc ^ START) % (buckets - 1) + 1


@jit_stage
def _find_words(points: Any, low: Any, high: Any, kinds: Any, most: Any, begins: Any, ends: Any) -> Any:
    """How many words there are, at most ``most``; where they begin and end, as far as there is room."""
    words, at = 0, low
    while at < high and words < most:
        kind = kinds[points[at]]
        end = at + 1
        if kind == 1:
            while end < high and kinds[points[end]] == 1:
                end += 1
        if kind != 0:
            if words < begins.size:
                begins[words], ends[words] = at, end
            words += 1
        at = end
    return words


@jit
def count_ids(points: Any, starts: Any, kinds: Any, max_words: int, most: int, counts: Any) -> None:
    """Count the features of every text, at most ``most``."""
    begins, ends = np.empty(most, np.int64), np.empty(most, np.int64)
    for row in range(counts.size):
        words = _find_words(points, starts[row], starts[row + 1], kinds, max_words, begins, ends)
        count = 2 * words + 1
        if count < most:
            for word in range(words):
                length = ends[word] - begins[word] + 2  # with a sign before and one after it
                for n in range(3, LONGEST + 1):
                    count += max(0, length - n + 1)
        counts[row] = min(count, most)


@jit
def fill_ids(
    points: Any, starts: Any, kinds: Any, max_words: int, most: int, buckets: int, counts: Any, ids: Any
) -> None:
    """Write the features of every text into its row of ``ids``: words, pairs of words, pieces of words."""
    begins, ends = np.empty(most, np.int64), np.empty(most, np.int64)
    for row in range(counts.size):
        words = _find_words(points, starts[row], starts[row + 1], kinds, max_words, begins, ends)
        count, out = min(counts[row], ids.shape[1]), ids[row]
        for word in range(min(words, count)):
            crc = START
            for at in range(begins[word], ends[word]):
                crc = _add_point(crc, points[at])
            out[word] = _bucket(crc, buckets)
        for pair in range(min(words + 1, count - words)):
            crc = _add_byte(START, 0x3C)  # <
            if pair:
                crc = START
                for at in range(begins[pair - 1], ends[pair - 1]):
                    crc = _add_point(crc, points[at])
            crc = _add_byte(crc, 0x20)
            if pair < words:
                for at in range(begins[pair], ends[pair]):
                    crc = _add_point(crc, points[at])
            else:
                crc = _add_byte(crc, 0x3E)  # >
            out[words + pair] = _bucket(crc, buckets)
        place, word = 2 * words + 1, 0
        while place < count and word < words:
            place = _fill_pieces(points, begins[word], ends[word], buckets, place, count, out)
            word += 1


@jit_stage
def _fill_pieces(points: Any, begin: Any, end: Any, buckets: Any, place: Any, count: Any, out: Any) -> Any:
    """Write the pieces of a word between < and >, the shortest first, from a place on; return the place after them."""
    length = end - begin + 2
    for first in range(length - 2):  # a piece of five characters goes on where one of three ended
        crc, to = _add_byte(START, 0x23), place  # #
        for n in range(1, min(LONGEST, length - first) + 1):
            at = begin + first + n - 2
            if at < begin:
                crc = _add_byte(crc, 0x3C)
            elif at >= end:
                crc = _add_byte(crc, 0x3E)
            else:
                crc = _add_point(crc, points[at])
            if n >= 3:
                if to + first < count:
                    out[to + first] = _bucket(crc, buckets)
                to += length - n + 1
    for n in range(3, LONGEST + 1):
        place += max(0, length - n + 1)
    return place
