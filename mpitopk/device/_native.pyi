"""The compiled host kernels (native/*.cpp). Shapes and meanings: see `mpitopk.device.base`."""

from mpitopk.typing import Array, Bytes

def isas() -> list[str]:
    """Return what this processor can run, best last: `["scalar", "avx2"]`."""

class Engine:
    """Threads, scratch buffers and the thresholds of the last step; one for each runtime.

    Every method releases the GIL and raises `TypeError` for a dtype it does not take and
    `ValueError` for lengths that do not fit each other. Not safe for concurrent calls.
    """

    def __init__(self, threads: int, isa: str) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def fallbacks(self) -> int:
        """Groups whose window missed, since the engine was made."""

    @property
    def candidates(self) -> int:
        """Entries that the last selection looked at a second time."""

    def finite(self, x: Array) -> bool: ...
    def zero_nonfinite(self, x: Array) -> int: ...
    def accumulate(
        self, gradient: Array, residual: Array | None, out: Array, scale: float = 1, keep: float = 1
    ) -> bool: ...
    def norm(self, x: Array) -> float: ...
    def accumulate_norm(self, gradient: Array, residual: Array, out: Array) -> float: ...
    def accumulate_select(
        self,
        gradient: Array,
        residual: Array,
        out: Array,
        pieces: Array,
        counts: Array,
        indices: Array,
        values: Array,
    ) -> bool: ...
    def select(self, x: Array, pieces: Array, counts: Array, indices: Array, values: Array) -> bool: ...
    def move_above(
        self, x: Array, pieces: Array, threshold: float, least: int, indices: Array, values: Array
    ) -> int: ...
    def search_above(
        self,
        x: Array,
        pieces: Array,
        threshold: float,
        least: int,
        rounds: int,
        indices: Array,
        values: Array,
    ) -> int: ...
    def chunk_maxima(self, x: Array, pieces: Array, counts: Array, chunk: int, indices: Array) -> None: ...
    def sample(self, x: Array, pieces: Array, key: int, out: Array) -> None: ...
    def random_indices(self, pieces: Array, counts: Array, key: int, out: Array) -> None: ...
    def take(self, x: Array, indices: Array, values: Array, clear: bool) -> None: ...
    def pack(
        self,
        x: Array,
        dense: Array,
        indices: Array,
        values: Array,
        out_indices: Array,
        out_values: Array,
    ) -> None: ...
    def merge(
        self,
        buffer: Bytes,
        starts: list[int],
        counts: list[int],
        itemsize: int,
        dense: Array,
        divisor: int,
        out: Array,
    ) -> int:
        """Merge the messages that begin at `starts` (their indices follow the 40-byte header).

        Returns the number of entries held by some message, or -1 - p if the indices of rank p are
        not ascending or out of range.
        """

    def merge_sparse(
        self,
        buffer: Bytes,
        starts: list[int],
        counts: list[int],
        itemsize: int,
        dense: Array,
        divisor: int,
        size: int,
        out_indices: Array,
        out_values: Array,
    ) -> int:
        """As `merge`, to arrays with room for `sum(counts) + dense entries`, or `size` if less."""

    def select_bins(
        self,
        gradient: Array,
        residual: Array,
        out: Array,
        rows: Array,
        size: int,
        factor: float,
        marks: Array,
        counts: Array,
        scales: Array,
    ) -> int:
        """Return how many entries are chosen, or -1 if something is too large."""

    def pack_bins(
        self, x: Array, rows: Array, size: int, marks: Array, counts: Array, scales: Array, words: Array
    ) -> None: ...
    def merge_bins(
        self,
        buffer: Bytes,
        starts: list[int],
        counts: list[int],
        rows: Array,
        size: int,
        divisor: int,
        out: Array,
    ) -> int:
        """Merge the messages that begin at `starts`, of `counts` words of code after the 40-byte header.

        Returns the number of entries held by some message, or -1 - p if the code of rank p is wrong.
        """

    def combine(
        self,
        indices: Array,
        values: Array,
        their_indices: Array,
        their_values: Array,
        pieces: Array,
        counts: Array,
        out_indices: Array,
        out_values: Array,
        dropped_indices: Array,
        dropped_values: Array,
    ) -> int:
        """Return 1, 0 if a sum is too large, or -1 if their indices cannot be right."""

    def put_back(self, x: Array, indices: Array, values: Array, winners: Array, among: bool) -> None: ...
    def quantize(
        self,
        gradient: Array,
        levels: Array,
        bucket: int,
        largest: bool,
        key: int,
        codes: Array,
        scales: Array,
    ) -> bool: ...
    def merge_codes(
        self,
        buffer: Bytes,
        starts: list[int],
        counts: list[int],
        levels: Array | None,
        bits: int,
        bucket: int,
        divisor: int,
        out: Array,
    ) -> None: ...
    def to_elias(self, codes: Array, bits: int, size: int, bucket: int, out: Array) -> int: ...
    def from_elias(self, words: Array, bits: int, size: int, bucket: int, codes: Array) -> bool: ...
    def count_ratios(self, gradient: Array, bucket: int, largest: bool) -> Array: ...
    def encode_lines(
        self,
        gradient: Array,
        residual: Array,
        out: Array,
        vectors: Array,
        representatives: Array,
        hinge_bits: int,
        words: Array,
    ) -> bool: ...
    def merge_lines(
        self,
        buffer: Bytes,
        starts: list[int],
        counts: list[int],
        vectors: Array,
        representatives: Array,
        hinge_bits: int,
        divisor: int,
        out: Array,
    ) -> None: ...
    def divide(self, x: Array, divisor: int) -> bool: ...

# What the benchmarks compare with.

def read_floor(engine: Engine, x: Array) -> float:
    """Read x once (float32), with the engine's threads; return the largest magnitude."""

def add_floor(engine: Engine, gradient: Array, residual: Array) -> None:
    """Add gradient to residual (float32), in place, with the engine's threads."""

def nth_element_topk(x: Array, indices: Array, values: Array) -> None:
    """Select by std::nth_element on a copy of the keys (float32), one thread."""

def radix_topk(x: Array, indices: Array, values: Array) -> None:
    """Select by radix, two bits a pass over all entries (float32), one thread."""
