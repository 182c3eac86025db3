"""An n-gram table of bytes: interpolated Kneser–Ney, the mark that a trained model has to pass.

Kneser and Ney 1995; Chen and Goodman 1999 (Computer Speech & Language 13), sections 2.7 and 3: the highest order counts
how often an n-gram occurs; each lower order counts how many different bytes it was seen to follow. Each count is
discounted, and what the discounts free goes to the next shorter context. Below order 1 stands the uniform
distribution. Plain: one discount an order. Modified: one each for counts of one, two, and three or more, which
predicts better.
"""

from __future__ import annotations

import numpy as np

__all__ = ["KneserNey"]

SYMBOLS = 256
MAX_ORDER = 8  # an n-gram is packed into 64 bits


def packed(text: np.ndarray, order: int) -> np.ndarray:
    """Each n-gram of text (n,) uint8 as one number, its last byte lowest: (n − order + 1,) uint64."""
    keys = np.zeros(max(0, len(text) - order + 1), np.uint64)
    for place in range(order):
        keys = (keys << np.uint64(8)) | text[place : place + len(keys)].astype(np.uint64)
    return keys


class Level:
    """One order: its n-grams in ascending order, and by context what is counted and what is freed."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray, modified: bool) -> None:
        self.grams = grams
        kinds = np.minimum(counts, 3)
        discounts = self.discounts(counts, modified)
        self.kept = counts - discounts[kinds]  # (grams,)
        contexts, first = np.unique(grams >> np.uint64(8), return_index=True)
        self.contexts = contexts
        self.total = np.add.reduceat(counts.astype(np.float64), first)
        self.freed = np.add.reduceat(discounts[kinds], first) / self.total

    @staticmethod
    def discounts(counts: np.ndarray, modified: bool) -> np.ndarray:
        """What to take from a count of 0, 1, 2, and 3 or more: (4,). Chen and Goodman's estimates, never below 0."""
        once, twice, thrice, four = (max(1, int((counts == c).sum())) for c in (1, 2, 3, 4))
        share = once / (once + 2 * twice)
        if not modified:
            return np.array([0.0, share, share, share])
        taken = (1 - 2 * share * twice / once, 2 - 3 * share * thrice / twice, 3 - 4 * share * four / thrice)
        return np.array([0.0, *(min(max(d, 0.0), c) for c, d in enumerate(taken, start=1))])

    def refine(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probabilities of the last bytes of ``grams`` (n,), where ``lower`` (n,) are those of a byte less."""
        at, seen = found(self.contexts, grams >> np.uint64(8))
        where, counted = found(self.grams, grams)
        own = np.where(counted, self.kept[where], 0.0) / self.total[at]
        return np.where(seen, own + self.freed[at] * lower, lower)


def found(table: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each key stands in an ascending table, and whether it does."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return at, table[at] == keys


class KneserNey:
    """Tables of all orders up to ``max_order`` ≤ 8 from ``text`` (n,) uint8.

    ``modified`` chooses three discounts an order instead of one. Order n looks at n − 1 bytes before the one that it
    predicts. Raises ValueError for an order outside 1 … 8.
    """

    def __init__(self, text: np.ndarray, max_order: int = MAX_ORDER, *, modified: bool = True) -> None:
        if not 1 <= max_order <= MAX_ORDER:
            raise ValueError(f"the order must be 1 to {MAX_ORDER}, not {max_order}")
        self.top: list[Level] = []  # by order − 1: counts of occurrences
        self.below: list[Level] = []  # by order − 1: counts of different bytes before
        for order in range(1, max_order + 1):
            grams, counts = np.unique(packed(text, order), return_counts=True)
            self.top.append(Level(grams, counts, modified))
            if order > 1:
                shorter = grams & np.uint64(256 ** (order - 1) - 1)
                grams, counts = np.unique(shorter, return_counts=True)
                self.below.append(Level(grams, counts, modified))

    def probabilities(self, grams: np.ndarray, order: int) -> np.ndarray:
        """Of the last byte of each packed n-gram (n,) of this order, given the bytes before it: (n,) float64."""
        p = np.full(len(grams), 1 / SYMBOLS)
        for n in range(1, order + 1):
            level = self.top[n - 1] if n == order else self.below[n - 1]
            p = level.refine(grams & np.uint64(2 ** (8 * n) - 1), p)
        return p

    def nats_per_byte(self, text: np.ndarray, order: int) -> float:
        """Mean cross-entropy of text[1:]; near the beginning, where bytes are missing, of the order they allow."""
        early = [self.probabilities(packed(text[:n], n), n) for n in range(2, order)]
        later = self.probabilities(packed(text, order), order)[1 if order == 1 else 0 :]
        return float(-np.log(np.concatenate([*early, later])).mean())
