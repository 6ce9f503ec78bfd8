"""Benchmarks: each measures us and the alternatives in the same run and gives the ratios."""

from mpitopk.bench import exchange, quantize, select, step
from mpitopk.bench.timing import Table

BENCHMARKS = {"select": select, "exchange": exchange, "quantize": quantize, "step": step}

__all__ = ["BENCHMARKS", "Table"]
