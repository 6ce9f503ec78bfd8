"""Benchmarks: each measures us and the alternatives in the same run and gives the ratios."""

from mpitopk.bench import exchange, select, step
from mpitopk.bench.timing import Table

BENCHMARKS = {"select": select, "exchange": exchange, "step": step}

__all__ = ["BENCHMARKS", "Table"]
