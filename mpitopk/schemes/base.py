"""The contract of a compression scheme.

A scheme holds its options and nothing else: a frozen dataclass. What a rank carries from step to
step is a `State` that the scheme makes once. A step is a generator: it yields collectives
(`mpitopk.collectives`) and is sent their results, so that the same scheme runs under MPI and in the
simulator, and neither communicates, measures nor logs.

The rule that makes a step a transaction: nothing of the state may change before the last collective
has returned. If the step is abandoned, the generator is closed at its yield.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from mpitopk.collectives import Collective
from mpitopk.device.hashing import splitmix64
from mpitopk.errors import ConfigError, nearest

if TYPE_CHECKING:
    from mpitopk.device.base import Device
    from mpitopk.layout import Layout
    from mpitopk.typing import Array

Density: TypeAlias = float | Callable[[int], float]
"""Part of the entries that a step sends, in (0, 1]; or a function from the step to it."""


class Sparse(NamedTuple):
    """The entries of a mean that some rank sent; all others are zero.

    Both arrays are ascending by index and valid until the next step.
    """

    indices: Array
    values: Array


Steps: TypeAlias = Generator[Collective, Any, "Array | Sparse"]


@dataclass
class Rank:
    """What a scheme knows of the rank it runs on."""

    id: int
    size: int
    layout: Layout
    device: Device
    step: int = 0
    sent: int = 0
    """Entries that this rank sent in the last step."""
    held: int = 0
    """Entries of the last mean that some rank sent."""

    def key(self, seed: int) -> int:
        """Return 64 bits for this step of this rank; see `check_seed`."""
        return splitmix64(splitmix64(seed << 32 | self.step) + self.id)


class State(ABC):
    """What one rank carries from step to step, and its scratch memory."""

    @property
    @abstractmethod
    def saved(self) -> dict[str, Array]:
        """The arrays that belong into a checkpoint, each as long as the layout; sums are preserved."""

    @property
    def shared(self) -> dict[str, Array]:
        """Small arrays that belong into a checkpoint and are the same on every rank."""
        return {}


class Whole(State):
    """What a scheme needs whose mean holds all entries."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.mean = rank.device.empty(rank.layout.size, rank.layout.accumulator)

    @property
    def saved(self) -> dict[str, Array]:
        return {}

    @cached_property
    def indices(self) -> Array:
        """All of them; only a sparse mean wants to know."""
        return self._rank.device.from_host(np.arange(self._rank.layout.size, dtype=np.uint32))

    def result(self, *, sparse: bool) -> Array | Sparse:
        """Count what was sent and is held, and return the mean."""
        self._rank.sent = self._rank.held = self._rank.layout.size
        return Sparse(self.indices, self.mean) if sparse else self.mean


class About(NamedTuple):
    """What to know of a scheme before using it: sizes for n entries of which k are sent."""

    paper: str
    sends: str
    collectives: str
    memory: str
    """Numbers that each rank keeps, scratch of the same size included."""


class Scheme(ABC):
    """How gradients are compressed and combined."""

    about: ClassVar[About]
    has_momentum: ClassVar[bool] = False
    """Whether it applies momentum itself, so that the optimiser must not."""
    shortens: ClassVar[bool] = False
    """Whether it sends fewer bits of every entry, rather than fewer entries."""

    def __new__(cls, *_: Any, **options: Any) -> Scheme:
        """Refuse unknown options by name, before the dataclass does so less helpfully."""
        check_options(cls, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Take NumPy's numbers for Python's, so that equal options are shown alike."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())

    @abstractmethod
    def init(self, rank: Rank) -> State:
        """Allocate the state of a rank."""

    @abstractmethod
    def step(self, rank: Rank, state: Any, gradient: Array, sparse: bool) -> Steps:
        """Take part in one step; return the mean, or with `sparse` its non-zero entries.

        The mean is valid until the next step. Neither it nor the gradient is kept.
        """

    @abstractmethod
    def stand_in(self, state: Any) -> Collective | None:
        """Return what a rank that has failed takes part with in the first collective of a step.

        It has the size of the real one and is made without memory or work, since there may be none
        to be had. None where sizes are exchanged first: there the failure is announced instead.
        """

    def describe(self) -> str:
        """Return the name and options, equal on two ranks if and only if they agree."""
        shown = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if callable(value):
                shown.append(f"{field.name}=<function, from {value(0)!r}>")
            else:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def check_options(scheme: type[Scheme], options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an option that the scheme does not have, or for a switch that is no bool.

    The text "false" would pass for True.
    """
    known = {field.name: field.default for field in fields(scheme)}  # type: ignore[arg-type]
    for option, value in options.items():
        if option not in known:
            raise ConfigError(f"{scheme.__name__} has no option {option!r}: {nearest(option, known)}")
        if isinstance(known[option], bool) and not isinstance(value, bool):
            raise ConfigError(f"{option} is {value!r}: give True or False")


def check_seed(seed: object) -> None:
    """Raise `ConfigError` for a seed that cannot be combined with a step."""
    if not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise ConfigError(f"seed is {seed!r}: give a whole number from 0 below 2**32")
