"""The schemes in float64, straight from their definitions and without a line of the package.

With gradients that are whole numbers below 2**10 all sums are exact in float32 too, so that results are
compared for equality.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def count(density: float, size: int) -> int:
    return min(size, max(1, math.floor(density * size + 0.5)))


def largest(a: Array, k: int) -> list[int]:
    """Positions of the k first by (magnitude descending, position ascending)."""
    first: list[int] = np.lexsort((np.arange(len(a)), -np.abs(a)))[:k].tolist()
    return sorted(first)


def mixed(z: int) -> int:
    """Splitmix64, by its authors' constants."""
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def kth_of_sample(a: Array, size: int, place: int, origin: tuple[int, int, int]) -> float:
    """The place-th largest magnitude of one entry of each of equal parts; origin: seed, step, rank."""
    seed, step, rank = origin
    key = mixed(mixed(seed * 2**32 + step) + rank)
    parts = [i + Fraction(mixed(key + i) // 2**33, 2**31) for i in range(size)]
    sample = [abs(a[math.floor(part * len(a) / size)]) for part in parts]
    return float(sorted(sample)[-place])


class TopK:
    """Error-feedback top-k of P ranks; segments: (start, stop)."""

    def __init__(
        self,
        ranks: int,
        segments: list[tuple[int, int]],
        *,
        density: Any,
        per_segment: bool = False,
        dense_below: int = 0,
        values: Any = "float32",
    ) -> None:
        self.segments = segments
        self.size = segments[-1][1]
        self.options = density, per_segment, dense_below
        self.rounding = None if isinstance(values, str) else values
        self.values = np.dtype(values if isinstance(values, str) else "float32")
        self.residuals = np.zeros((ranks, self.size))
        self.steps = 0

    def wanted(self, size: int) -> int:
        density = self.options[0]
        return count(density(self.steps) if callable(density) else density, size)

    def chosen(self, a: Array) -> tuple[list[int], list[int]]:
        """Return the positions of entries that are sent whatever they are, and of the largest others."""
        _, per_segment, dense_below = self.options
        whole = [i for s, e in self.segments if e - s < dense_below for i in range(s, e)]
        parts = [list(range(s, e)) for s, e in self.segments if e - s >= dense_below]
        if not per_segment:
            parts = [[i for part in parts for i in part]]
        winners = []
        for part in parts:
            if part and self.wanted(len(part)) == len(part):
                whole += part
            elif part:
                winners += [part[i] for i in self.winners(a[part], self.wanted(len(part)))]
        return sorted(whole), sorted(winners)

    def winners(self, a: Array, k: int) -> list[int]:
        return largest(a, k)

    def selected(self, a: Array) -> list[int]:
        whole, winners = self.chosen(a)
        return sorted(whole + winners)

    def stored(self, a: Array) -> Array:
        """Return what is kept: rounded as it is, where it would otherwise come to other levels."""
        return a.astype(np.float32).astype(np.float64) if self.rounding else a

    def sent(self, a: Array, whole: list[int], winners: list[int]) -> Array:
        """Return what travels of a rank's entries."""
        sent, at = np.zeros(self.size), winners + whole
        sent[at] = a[at].astype(self.values).astype(np.float64)
        if self.rounding:
            how = self.rounding
            options = {"bits": how.bits, "bucket": how.bucket, "norm": how.norm, "seed": how.seed}
            quantizer = Quantizer(1, [(0, len(at))], **options)
            quantizer.steps = self.steps
            sent[at] = self.stored(quantizer.one(self.rank, a[at]))
        return sent

    def step(self, gradients: Array) -> Array:
        """Return the mean; update the residuals."""
        total = np.zeros(self.size)
        for self.rank, gradient in enumerate(gradients):
            rank = self.rank
            a = self.stored(self.residuals[rank] + gradient)
            sent = self.sent(a, *self.chosen(a))
            total += sent
            self.residuals[rank] = self.stored(a - sent)
        self.steps += 1
        return total / len(gradients)


class GaussianK(TopK):
    """All from a magnitude on: at first that of the normal quantile, two-sided, for the root mean square."""

    def __init__(
        self, ranks: int, segments: list[tuple[int, int]], *, rounds: int = 8, **options: Any
    ) -> None:
        super().__init__(ranks, segments, **options)
        self.rounds = rounds

    def winners(self, a: Array, k: int) -> list[int]:
        if not a.any():
            return []
        tried: dict[float, int] = {}  # by magnitude: how many there are from there on
        threshold = NormalDist().inv_cdf(1 - k / len(a) / 2) * math.sqrt(np.mean(a**2))
        while len(tried) < self.rounds:
            passing = np.flatnonzero(np.abs(a) >= threshold)
            if 2 * k <= 3 * len(passing) <= 4 * k:
                return [int(i) for i in passing]
            tried[threshold] = len(passing)
            too_low = max((t for t, passed in tried.items() if passed > k), default=None)
            too_high = min((t for t, passed in tried.items() if passed < k), default=None)
            if too_low is None or too_high is None:
                threshold *= 0.5 if too_low is None else 1.5
            else:
                threshold = math.sqrt(too_low * too_high)
        return largest(a, k)


def binomial(m: int, p: Fraction, counts: range) -> Fraction:
    """Probability that the number of successes is one of the counts."""
    return sum((math.comb(m, j) * p**j * (1 - p) ** (m - j) for j in counts), Fraction(0))


class Filter(TopK):
    """A threshold from a sample, of which the k largest all pass but with a given probability."""

    def __init__(
        self,
        ranks: int,
        segments: list[tuple[int, int]],
        *,
        failure: float = 1e-3,
        sample: int = 100,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(ranks, segments, **options)
        self.failure, self.sample, self.seed = failure, sample, seed

    def winners(self, a: Array, k: int) -> list[int]:
        n = len(a)
        size = math.ceil(Fraction(self.sample * n, k))
        if 4 * self.sample > k:
            return largest(a, k)
        place, most = margins(n, k, size, self.failure)
        if place >= size:
            return largest(a, k)
        threshold = kth_of_sample(a, size, place, (self.seed, self.steps, self.rank))
        passing = np.flatnonzero(np.abs(a) >= threshold)
        return [int(i) for i in passing] if len(passing) <= most else largest(a, k)


@cache
def margins(n: int, k: int, size: int, failure: float) -> tuple[int, int]:
    """The place in the sample, and how many may pass, by exact fractions."""
    mean = Fraction(size * k, n)
    place = next(
        r
        for r in range(math.floor(mean) + 1, size + 2)
        if r > mean + 1 and binomial(size, mean / size, range(r, size + 1)) <= failure
    )
    first = math.ceil(Fraction(place * n, size))
    enough = (c for c in range(first, n) if binomial(size, Fraction(c, n), range(place)) <= failure)
    return place, next(enough, n)


class DGC(TopK):
    """Momentum before the exchange: the residuals are velocities."""

    def __init__(
        self,
        ranks: int,
        segments: list[tuple[int, int]],
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        masking: bool = True,
        clip: float | None = None,
        selector: str = "exact",
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(ranks, segments, **options)
        self.selector, self.seed = selector, seed
        self.momentum, self.nesterov, self.masking, self.clip = momentum, nesterov, masking, clip
        self.momenta = np.zeros((ranks, self.size))

    def winners(self, a: Array, k: int) -> list[int]:
        n, rate = len(a), Fraction(k, len(a))
        size = max(math.ceil(Fraction(n, 100)), math.ceil(2 / rate))
        place = math.ceil(size * rate)
        if self.selector == "exact" or size >= n or place >= size:
            return largest(a, k)
        threshold = kth_of_sample(a, size, place, (self.seed, self.steps, self.rank))
        for _ in range(10):
            passing = np.flatnonzero(np.abs(a) >= threshold)
            if 10 * len(passing) > 13 * k:
                break
            if 10 * len(passing) >= 8 * k:
                return [int(i) for i in passing]
            threshold *= 0.8
        return largest(a, k)

    def step(self, gradients: Array) -> Array:
        total = np.zeros(self.size)
        for self.rank, given in enumerate(gradients):
            p = self.rank
            g = given.astype(np.float64)
            if self.clip is not None and np.linalg.norm(g) > 0:
                g = g * min(1, self.clip / math.sqrt(len(gradients)) / np.linalg.norm(g))
            if self.nesterov:
                self.momenta[p] = self.momentum * (self.momenta[p] + g)
                v = self.residuals[p] + self.momenta[p] + g
            else:
                self.momenta[p] = self.momentum * self.momenta[p] + g
                v = self.residuals[p] + self.momenta[p]
            self.momenta[p], v = self.stored(self.momenta[p]), self.stored(v)
            whole, winners = self.chosen(v)
            sent = self.sent(v, whole, winners)
            total += sent
            self.residuals[p] = self.stored(v - sent)
            if self.masking:
                self.momenta[p, winners] = 0
        self.steps += 1
        return total / len(gradients)


class ScaleCom(TopK):
    """The indices are those of the rank whose turn it is; the residuals are the memory m."""

    def __init__(
        self,
        ranks: int,
        segments: list[tuple[int, int]],
        *,
        beta: float = 1,
        chunk: int | None = None,
        density: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(ranks, segments, density=density, **options)
        self.beta, self.chunk = beta, chunk

    def wanted(self, size: int) -> int:
        return math.ceil(size / self.chunk) if self.chunk else super().wanted(size)

    def winners(self, a: Array, k: int) -> list[int]:
        if self.chunk is None:
            return super().winners(a, k)
        return [i + largest(a[i : i + self.chunk], 1)[0] for i in range(0, len(a), self.chunk)]

    def step(self, gradients: Array) -> Array:
        candidates = self.residuals + gradients
        at = self.selected(candidates[self.steps % len(gradients)])
        sent = np.zeros_like(candidates)
        sent[:, at] = candidates[:, at]
        self.residuals = (1 - self.beta) * self.residuals + self.beta * (candidates - sent)
        self.steps += 1
        return sent.sum(axis=0) / len(gradients)


class LAGS(TopK):
    """Top-k of each segment; k from the times of the layers, in exact fractions."""

    def __init__(
        self,
        ranks: int,
        segments: list[tuple[int, int]],
        *,
        backward_seconds: dict[str, float],
        latency: float = 20e-6,
        bandwidth: float = 1.25e9,
        cap: int = 1000,
        select_seconds: float = 5e-10,
    ) -> None:
        super().__init__(ranks, segments, density=1)
        sizes = [stop - start for start, stop in segments]
        times = [Fraction(t) for t in backward_seconds.values()]
        alpha, beta = Fraction(latency), 1 / Fraction(bandwidth)
        self.counts = sizes.copy()
        for i, n in enumerate(sizes if ranks > 1 else []):
            first = max([j for j in range(i + 1) if times[j] > 0], default=0)
            behind = [j for j in range(first) if times[j] > 0]
            budget = times[behind[-1]] if behind else Fraction(0)
            last = next((j for j in range(first + 1, len(sizes)) if times[j] > 0), len(sizes))
            layer = sum(sizes[first:last])
            free = budget - Fraction(select_seconds) * layer - (ranks - 1) * alpha
            k = math.floor(free / ((ranks - 1) * 8 * beta))
            k = max(math.ceil(n / cap), math.floor(Fraction(min(k, layer), layer or 1) * n))
            self.counts[i] = k if k < Fraction(n, ranks) else n

    def chosen(self, a: Array) -> tuple[list[int], list[int]]:
        pairs = zip(self.segments, self.counts, strict=True)
        return [], [start + i for (start, stop), k in pairs for i in largest(a[start:stop], k)]


class AdaComp:
    """Bins of consecutive entries of a segment; `segments`: (start, stop)."""

    values = np.dtype("float32")

    def __init__(self, ranks: int, segments: list[tuple[int, int]], *, scale: float = 2, **size: int) -> None:
        self.segments, self.bin, self.scale = segments, size.get("bin", 500), scale
        self.residuals = np.zeros((ranks, segments[-1][1]))

    def sent(self, residual: Array, gradient: Array) -> Array:
        """Return what the entries that a rank sends are decoded to, and zeros."""
        g, ahead = residual + gradient, residual + self.scale * gradient
        decoded = np.zeros_like(g)
        for start, stop in self.segments:
            bins = [slice(at, min(at + self.bin, stop)) for at in range(start, stop, self.bin)]
            most = [np.abs(g[b]).max() for b in bins]
            for b, m in zip(bins, most, strict=True):
                if m > 0:
                    decoded[b] = np.where(np.abs(ahead[b]) >= m, np.sign(g[b]) * np.mean(most), 0)
        return decoded

    def step(self, gradients: Array) -> Array:
        total = np.zeros(self.residuals.shape[1])
        for rank, gradient in enumerate(gradients.astype(np.float64)):
            decoded = self.sent(self.residuals[rank], gradient)
            self.residuals[rank] += gradient - decoded
            total += decoded
        return total / len(gradients)


class GTopK(TopK):
    """Ranks from the largest power of two on hand theirs to the first; those merge as in a tree."""

    def __init__(
        self, ranks: int, segments: list[tuple[int, int]], *, conserving: bool = True, **options: Any
    ) -> None:
        super().__init__(ranks, segments, **options)
        self.conserving = conserving

    def step(self, gradients: Array) -> Array:
        ranks = len(gradients)
        candidates = self.residuals + gradients
        held: list[set[int]] = []
        vectors = np.zeros_like(candidates)
        for p, a in enumerate(candidates):
            whole, winners = self.chosen(a)
            vectors[p, whole + winners] = a[whole + winners]
            held.append(set(winners))
        left, sent = candidates - vectors, list(held)
        dropped: list[tuple[int, int, float]] = []

        def merge(p: int, q: int) -> None:
            vectors[p] += vectors[q]
            either = sorted(held[p] | held[q])
            magnitudes = np.zeros(self.size)  # of what neither holds: less than any other
            magnitudes[either] = 1 + np.abs(vectors[p, either])
            held[p] = set(self.chosen(magnitudes)[1])
            for j in set(either) - held[p]:
                dropped.append((p, j, vectors[p, j]))
                vectors[p, j] = 0

        inner = 1 << (ranks.bit_length() - 1)
        for q in range(inner, ranks):
            merge(q - inner, q)
        apart = 1
        while apart < inner:
            for p in range(0, inner, 2 * apart):
                merge(p, p + apart)
            apart *= 2
        for p, a in enumerate(candidates):
            back = sorted(sent[p] - held[0])
            left[p, back] = a[back]
        for p, j, value in dropped:
            if self.conserving and j in held[0]:
                left[p, j] += value
        self.residuals = left
        self.steps += 1
        mean: Array = vectors[0] / ranks
        return mean


MASK = (1 << 64) - 1


def mixed64(z: int) -> int:
    """Splitmix64."""
    z = z + 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def mixed32(v: Array) -> Array:
    """A hash of 32 bits, of numbers kept in 64."""
    v = (v ^ v >> 16) * 0x7FEB352D & 0xFFFFFFFF
    v = (v ^ v >> 15) * 0x846CA68B & 0xFFFFFFFF
    return v ^ v >> 16


class Quantizer:
    """Every entry becomes a level of its bucket's scale, at random: P ranks without memory.

    Scales and ratios, and the thresholds that random numbers are, are rounded to float32, as the definition
    wants it: else an entry might take another level.
    """

    values = np.dtype("float32")

    def __init__(
        self,
        ranks: int,
        segments: list[tuple[int, int]],
        *,
        bits: int = 4,
        bucket: int = 512,
        norm: str = "max",
        seed: int = 0,
    ) -> None:
        self.size, self.bits, self.bucket, self.norm, self.seed = segments[-1][1], bits, bucket, norm, seed
        self.residuals = np.zeros((ranks, 0))
        self.steps = 0

    def numbers(self, rank: int) -> Array:
        """The random numbers of this step."""
        key = mixed64(mixed64(self.seed << 32 | self.steps) + rank & MASK)
        low, high = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)
        return (mixed32(mixed32(np.arange(self.size, dtype=np.uint64) ^ low) ^ high) >> 8) / 2**24

    def levels(self) -> list[float]:
        top = 2 ** (self.bits - 1) - 1
        return [q / top for q in range(top + 1)]

    def rounded(self, part: Array, numbers: Array) -> Array:
        """A bucket as the others decode it."""
        scale = np.max(np.abs(part)) if self.norm == "max" else math.sqrt(math.fsum(part**2))
        scale = np.float32(scale)
        if scale == 0:
            return part
        ratios, table = (np.abs(part) / scale).astype(np.float32), np.array(self.levels(), np.float32)
        below = np.minimum(np.searchsorted(table, ratios, side="right"), table.size - 1) - 1
        cut = table[below] + numbers.astype(np.float32) * (table[below + 1] - table[below])
        level = np.where((ratios > cut) | (ratios == 1), table[below + 1], table[below])
        return np.copysign(level.astype(np.float64) * scale, part)

    def one(self, rank: int, g: Array) -> Array:
        """Return what a rank's entries become."""
        numbers, buckets = self.numbers(rank), range(0, self.size, self.bucket)
        parts = [slice(at, at + self.bucket) for at in buckets]
        return np.concatenate([self.rounded(g[part], numbers[part]) for part in parts] or [g])

    def step(self, gradients: Array) -> Array:
        total = np.zeros(self.size)
        for rank, gradient in enumerate(gradients):
            total += self.one(rank, gradient.astype(np.float64))
        self.steps += 1
        return total / len(gradients)


class Exponential(Quantizer):
    """With the powers of 1/2 as levels."""

    def levels(self) -> list[float]:
        top = 2 ** (self.bits - 1) - 1
        return [0, *(0.5**j for j in range(top - 1, -1, -1))]


class Grassmann:
    """Blocks of the whole buffer, rounded to multiples of vectors: a tree that random directions shape.

    Which vector is the nearest, and which whole number, may hang on the last bit: so far the definition is
    in float32, with the order of sums. The tree is made in whole numbers.
    """

    values = np.dtype("float32")

    def __init__(
        self,
        ranks: int,
        segments: list[tuple[int, int]],
        *,
        block: int = 8,
        bits: int = 8,
        hinge_bits: int = 8,
        seed: int = 0,
    ) -> None:
        self.block, self.most = block, np.float32(2 ** (hinge_bits - 1) - 1)
        self.branches, self.members = self.tree(block, bits, seed)
        self.residuals = np.zeros((ranks, segments[-1][1]), np.float32)

    @classmethod
    @cache
    def tree(cls, block: int, bits: int, seed: int) -> tuple[Array, list[Array]]:
        """The representatives of the branches, and the vectors in each, float32."""
        branches = 2 ** (bits // 2)
        members = 2**bits // branches
        directions = cls.drawn(block, max(2**bits, min(64 * 2**bits, 2**16)), seed)
        centres = cls.lloyd(directions, cls.whole(directions[:branches]))
        where = np.abs(directions @ centres.T).argmax(axis=1)
        vectors = []
        for branch in range(branches):
            mine = directions[where == branch]
            start = np.array([centres[branch]] * members)
            for i, direction in enumerate(mine[:members]):
                start[i] = cls.whole(direction[None])[0]
            moved = cls.lloyd(mine, start)
            at_home = np.abs(moved @ centres.T).argmax(axis=1) == branch
            vectors.append(cls.unit(np.where(at_home[:, None], moved, start)))
        return cls.unit(centres), vectors

    @staticmethod
    def drawn(block: int, count: int, seed: int) -> Array:
        """Each coordinate is a sum of seven numbers of 16 bits, from two words of a counter, hashed."""
        key = mixed(seed)
        coordinates = []
        for i in range(count * block):
            words = [mixed((key + 2 * i + half) % 2**64) for half in (0, 1)]
            parts = [word >> 16 * at & 0xFFFF for word in words for at in range(4)][:7]
            coordinates.append(2 * sum(parts) - 7 * 65535)
        return np.array(coordinates).reshape(count, block)

    @classmethod
    def lloyd(cls, directions: Array, vectors: Array) -> Array:
        """Eight times to the sum of the directions that are nearest, on the side of the vector."""
        for _ in range(8):
            products = directions @ vectors.T
            where = np.abs(products).argmax(axis=1)
            moved = vectors.copy()
            for k in range(len(vectors)):
                mine = where == k
                total = (np.sign(products[mine, k])[:, None] * directions[mine]).sum(axis=0)
                if total.any():
                    moved[k] = cls.whole(total[None])[0]
            vectors = moved
        return vectors

    @staticmethod
    def whole(vectors: Array) -> Array:
        """The largest coordinate is made 2**20, and then the length 2**16."""
        large = np.rint(vectors / np.abs(vectors).max(axis=1)[:, None] * 2**20)
        return np.rint(large / np.sqrt((large**2).sum(axis=1))[:, None] * 2**16).astype(int)

    @staticmethod
    def unit(vectors: Array) -> Array:
        return np.array([[np.float32(c / math.sqrt(sum(v * v))) for c in v] for v in vectors], np.float32)

    @staticmethod
    def best(row: Array, vectors: Array) -> tuple[int, np.float32]:
        sums = np.zeros(len(vectors), np.float32)
        for j, x in enumerate(row):
            sums = sums + x * vectors[:, j]
        first = int(np.argmax(np.abs(sums)))
        return first, sums[first]

    def decoded(self, a: Array) -> Array:
        blocks = -(-a.size // self.block)
        rows = np.zeros((blocks, self.block), np.float32)
        rows.reshape(-1)[: a.size] = a
        lines, products = np.zeros_like(rows), np.zeros(blocks, np.float32)
        for i, row in enumerate(rows):
            branch, _ = self.best(row, self.branches)
            member, products[i] = self.best(row, self.members[branch])
            lines[i] = self.members[branch][member]
        assert blocks <= 1024, "one scale"
        scale = np.abs(products).max(initial=0)
        steps = np.rint(products / scale * self.most) if scale > 0 else np.zeros_like(products)
        rows = (steps * (scale / self.most))[:, None] * lines
        return rows.reshape(-1)[: a.size]

    def step(self, gradients: Array) -> Array:
        total = np.zeros(self.residuals.shape[1])
        for rank, gradient in enumerate(gradients):
            a = self.residuals[rank] + gradient
            decoded = self.decoded(a)
            self.residuals[rank] = a - decoded
            total += decoded
        return total / len(gradients)
