"""What the schemes share that send k entries: options, plan, error feedback and scratch memory."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpitopk.errors import ConfigError
from mpitopk.plan import Plan, make_plan
from mpitopk.schemes.base import Density, Rank, Scheme, Sparse, State
from mpitopk.wire import Message, Messages, message_bytes

if TYPE_CHECKING:
    from mpitopk.schemes.rounding import Rounding
    from mpitopk.typing import Array


class Planned(Scheme):
    """A scheme whose steps follow a plan of which entries to send, and keep the others."""

    @property
    def fixed(self) -> bool:
        """Whether the sizes of all exchanges are known to every rank from the start."""
        return True

    @property
    def keeps(self) -> bool:
        """Whether what is not sent is kept as the residual."""
        return True

    def most(self, plan: Plan) -> int:
        """Return how many entries a step sends with an index, at most."""
        return plan.total

    def values_type(self, rank: Rank) -> str:
        """Return the type in which values travel."""
        return rank.layout.accumulator

    def init(self, rank: Rank) -> Memory:
        memory = self.new_memory(rank)
        if self.fixed:
            memory.prepare(self, rank)
        return memory

    def new_memory(self, rank: Rank) -> Memory:
        """Return what a rank keeps, before there is a plan."""
        return Memory(rank, feedback=self.keeps)

    def setting(self, step: int) -> float | None:  # noqa: ARG002, for those that override it
        """Return what the plan of a step depends on: while it stays as it is, so does the plan."""
        return None

    @abstractmethod
    def plan(self, rank: Rank) -> Plan:
        """Return what the rank's next step sends."""


@dataclass(frozen=True)
class Sparsifier(Planned):
    """Options of every scheme that sends `density` of the entries.

    Parameters
    ----------
    density : float or callable
        Part of the entries to send, in (0, 1], or a function of the step that returns it.
    per_segment : bool
        Whether the density holds for each segment, rather than for the whole buffer.
    dense_below : int
        Segments with fewer entries than this are sent whole.
    """

    density: Density
    per_segment: bool = False
    dense_below: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not callable(self.density):
            self.density_at(0)
        if not isinstance(self.dense_below, int) or self.dense_below < 0:
            raise ConfigError(f"dense_below is {self.dense_below!r}: give a whole number from 0")

    @property
    def fixed(self) -> bool:
        return not callable(self.density)

    def setting(self, step: int) -> float:
        return self.density_at(step)

    def density_at(self, step: int) -> float:
        """Return the density of a step."""
        return self._checked(self.density(step) if callable(self.density) else self.density)

    def _checked(self, density: object) -> float:
        if not isinstance(density, int | float | np.number) or not 0 < density <= 1:
            raise ConfigError(f"density is {density!r}: give a number above 0 and up to 1")
        return float(density)

    def plan(self, rank: Rank) -> Plan:
        return make_plan(
            rank.layout,
            self.density_at(rank.step),
            per_segment=self.per_segment,
            dense_below=self.dense_below,
        )


class Memory(State):
    """Error feedback and scratch of a sparsifier.

    Two buffers of the layout's length take turns: one holds the residual, the other receives
    residual + gradient, from which entries are selected. On commit the second becomes the residual
    and the first is free to receive the mean. A step that is abandoned has written to scratch only.
    """

    def __init__(self, rank: Rank, *, feedback: bool = True) -> None:
        layout, device = rank.layout, rank.device
        self._device = device
        self._accumulator = layout.accumulator
        self._feedback = feedback
        self.residual = device.zeros(layout.size if feedback else 0, self._accumulator)
        self.spare = device.empty(layout.size, self._accumulator)
        self.rounding: Rounding | None = None
        self._setting: float | None = None
        self._room: dict[str, Array] = {}

    @property
    def saved(self) -> dict[str, Array]:
        return {"residual": self.residual} if self._feedback else {}

    def commit(self) -> None:
        """Keep what was accumulated and not sent."""
        if self._feedback:
            self.residual, self.spare = self.spare, self.residual

    def prepare(self, scheme: Planned, rank: Rank) -> None:
        """Set `plan` and make room for it; nothing happens while the scheme's setting stays as it is."""
        setting = scheme.setting(rank.step)
        if self._room and setting == self._setting:
            return
        self.plan = scheme.plan(rank)
        most = scheme.most(self.plan)
        indices = self.grown("indices", 4 * most)
        values = self.grown("values", most * np.dtype(self._accumulator).itemsize)
        self.room = indices.view("uint32"), values.view(self._accumulator)
        self.hold(most, scheme, rank)
        self._setting = setting

    def hold(self, count: int, scheme: Planned, rank: Rank) -> None:
        """Let `indices`, `values` and the message be those of `count` entries, at the front of `room`."""
        self.indices, self.values = (x[:count] for x in self.room)
        self.message = self.blank("send", scheme, rank)

    def finish(self, rank: Rank, messages: Messages, divisor: int, *, sparse: bool) -> Array | Sparse:
        """Merge messages, count what they hold, commit, and return the mean."""
        device, layout, dense = rank.device, rank.layout, self.plan.dense
        merged: Array | Sparse
        if sparse:
            merged = Sparse(*device.merge_sparse(messages, dense, divisor, layout.size, layout.accumulator))
            rank.held = merged.indices.size
            self.commit()
            return merged
        mean = self.residual if self._feedback else self.spare
        rank.held = device.merge(messages, dense, divisor, mean)
        self.commit()
        return mean

    def blank(self, name: str, scheme: Planned, rank: Rank) -> Message:
        """Return a message for what is held, in the room of that name."""
        count, dense, values = self.indices.size, self.plan.dense_total, scheme.values_type(rank)
        room = self.grown(name, message_bytes(count, dense, np.dtype(values).itemsize))
        return Message.blank(room, count, dense, values, rank.layout.digest)

    def grown(self, name: str, nbytes: int) -> Array:
        """Return the memory of that name, which is made larger where it is too small."""
        if name not in self._room or self._room[name].size < nbytes:
            self._room[name] = self._device.empty(nbytes, "uint8")
        return self._room[name][:nbytes]
