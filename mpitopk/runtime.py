"""A scheme driven over MPI: what a training loop calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpitopk import replicas, state
from mpitopk.agreement import require_equal, together, verdict
from mpitopk.device import open_device
from mpitopk.errors import ClosedError, ConfigError, LayoutError
from mpitopk.exchange import Exchange
from mpitopk.layout import Layout, layouts_differ
from mpitopk.metrics import Metrics
from mpitopk.participant import Participant
from mpitopk.schemes.base import Rank, Scheme, Sparse
from mpitopk.trace import Range, Trace, share_timeline
from mpitopk.transport import CUDA_AWARE, LIMIT, Transport

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitopk.typing import Array


class Runtime:
    """Gradient exchange for one layout, with one scheme, over one communicator.

    Every method that communicates must be called on all ranks of the communicator. Arguments that
    only one rank gets wrong raise the same error on all of them.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Duplicated, so that nothing else that it is used for can interfere.
    layout : Layout
        The gradient's segments.
    scheme : Scheme
        Such as `TopK(density=0.01)` or `Dense()`.
    device : {"auto", "host", "numpy", "cuda", "cupy"}
        Where the gradient lives: in host memory, for compiled kernels or plain NumPy, or on a GPU, for our
        kernels or (a reference) selection by `cupy.partition`. "auto": see `device.open_device`.
    threads : int, optional
        Threads of a rank; by default its share of the processors that the node's ranks may use.
    nonfinite : {"raise", "skip", "zero"}
        What to do about NaN and Inf: raise `NonFiniteError`, or skip the step (its mean is zero), on
        all ranks; or set such entries of the gradient to zero, in place.
    limit : int
        Bytes that one MPI call may move in total; larger exchanges go in rounds.

    Attributes
    ----------
    layout, scheme
        As given.

    Raises
    ------
    ConfigError, LayoutError
        On all ranks, if an argument is out of range or differs between ranks.
    DeviceError
        On all ranks, if a device cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> from mpitopk import Layout, Runtime, TopK
    >>> layout = Layout({"weight": (10, 10), "bias": 10})
    >>> with Runtime(MPI.COMM_SELF, layout, TopK(density=0.1)) as runtime:
    ...     gradient = runtime.gradient
    ...     layout.views(gradient)["bias"][:] = 1
    ...     mean = runtime.allreduce(gradient)
    >>> int(np.count_nonzero(mean))
    10
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        layout: Layout,
        scheme: Scheme,
        *,
        device: str = "auto",
        threads: int | None = None,
        nonfinite: str = "raise",
        limit: int = LIMIT,
    ) -> None:
        self.layout, self.scheme = layout, scheme
        self._closed = False
        self._gradient: Array | None = None
        self._timeline = os.environ.get("MPITOPK_TIMELINE")
        self._transport = transport = Transport(comm, limit)
        self._trace = Trace(timeline=bool(self._timeline))
        self._metrics = Metrics()

        def prepare() -> Participant:
            with transport.one_first():
                workers = transport.processors if threads is None else threads
                on = open_device(device, workers, transport.local_rank)
            if not isinstance(layout, Layout):
                raise LayoutError(f"the layout is {layout!r}: give a Layout")
            if not isinstance(limit, int) or not transport.size <= limit < 1 << 31:
                raise ConfigError(f"limit is {limit!r}: give at least a byte for each rank, and below 2**31")
            return Participant(Rank(transport.rank, transport.size, layout, on), scheme, nonfinite)

        try:
            self._participant = self._agree(prepare, limit)
            self._device = self._participant.rank.device
            self._serve()
        except Exception:
            transport.free()
            raise
        self._exchange = Exchange(self._participant, transport, self._trace, self._metrics)
        self._trace.instrument(self._device)
        self._trace.offset = transport.clock_offset(self._trace.now)

    def _serve(self) -> None:
        """Let the transport carry what the device has."""
        if self._device.on_host:
            self._transport.serve(self._device)
        else:
            from mpitopk import cuda_aware

            request = self.scheme.stand_in(self._participant.state)
            cuda_aware.choose(self._transport, self._device, request)  # type: ignore[arg-type]

    def _agree(self, prepare: Callable[[], Participant], limit: int) -> Participant:
        """Return this rank's participant, once all ranks have one and all are configured alike."""

        def configuration(made: Participant) -> tuple[int, dict[str, Any]]:
            options = {"nonfinite": made.nonfinite, "limit": limit, "MPITOPK_TIMELINE": self._timeline}
            options["memory"] = "of the host" if made.rank.device.on_host else "of a GPU"
            options[CUDA_AWARE] = os.environ.get(CUDA_AWARE)
            return made.rank.layout.digest, {"scheme": made.scheme.describe(), **options}

        gather = self._transport.gather_objects
        agreed = together(gather, self._transport.rank, prepare, configuration)
        require_equal("the runtimes differ", [options for _, options in agreed.every])
        if len({digest for digest, _ in agreed.every}) > 1:
            raise layouts_differ(gather(agreed.mine.rank.layout))
        return agreed.mine

    @property
    def gradient(self) -> Array:
        """A flat gradient buffer of zeros, made at the first use; any other array will do as well."""
        self._open()
        if self._gradient is None:
            self._gradient = self._device.zeros(self.layout.size, self.layout.storage)
        return self._gradient

    @property
    def metrics(self) -> Metrics:
        """What the steps so far have cost."""
        self._metrics.fallbacks = self._device.fallbacks
        self._metrics.seconds = dict(self._trace.seconds)
        return self._metrics

    @property
    def step(self) -> int:
        """How many steps have been taken, those before a resume included."""
        return self._participant.rank.step

    def range(self, name: str) -> Range:
        """Return a range for the user's own code: `with runtime.range("forward"): ...`."""
        return self._trace.range(name)

    def allreduce(self, gradient: object, sparse: bool = False) -> Any:
        """Average the gradients of all ranks, as the scheme does it.

        Parameters
        ----------
        gradient : array
            Flat, contiguous, of the layout's size and dtype: NumPy, or anything in host memory that
            speaks DLPack or the buffer protocol. It is only read (but see `nonfinite`).
        sparse : bool
            Return only the entries that some rank sent.

        Returns
        -------
        array or Sparse
            The mean, in float32 (float64 for float64), with the same bits on every rank; valid
            until the next call.

        Raises
        ------
        GradientError, NonFiniteError, ExchangeError
            On all ranks. Residual and step are then as before the call.
        """
        self._open()
        me = self._participant
        self._trace.step = me.rank.step
        request = me.begin(gradient, sparse)
        while True:
            result = self._exchange(request)
            if result is None:
                return self._end_together(sparse)
            request = me.resume(result)
            if request is None:
                self._metrics.count(me.rank)
                self._metrics.warn_if_dear(self.scheme, me.rank)
                self._trace.end(me, self._metrics)
                return me.result

    def _end_together(self, sparse: bool) -> Array | Sparse:
        """End a step that some rank cannot go on with, in the same way on all ranks."""
        me = self._participant
        reports = self._transport.gather_objects(me.report())
        me.abandon()
        if error := verdict(reports, me.nonfinite):
            raise error from me.failure
        self._metrics.skipped += 1
        return me.skipped(sparse)

    def broadcast(self, parameters: Any, root: int = 0) -> None:
        """Overwrite arrays, on all ranks, with the root's.

        Parameters
        ----------
        parameters : array, or mapping or sequence of arrays
            Writable, contiguous; of the same sizes and dtypes on all ranks.
        root : int
            The rank to copy from.

        Raises
        ------
        GradientError
            On all ranks, if an array cannot be written or differs in size or dtype.
        """
        self._open()
        replicas.broadcast(self._transport, parameters, self._device, root)

    def check_replicas(self, parameters: Any = None) -> None:
        """Raise unless all ranks hold the same bits.

        Parameters
        ----------
        parameters : array, or mapping or sequence of arrays, optional
            What to compare; a flat array of the layout's size is compared segment by segment. By
            default the mean of the last step.

        Raises
        ------
        ReplicaError
            On all ranks, naming the first segment that differs and the ranks that differ from rank 0.
        """
        self._open()
        if parameters is None:
            parameters = self._participant.result
        replicas.compare(self._transport, parameters, self.layout, self._device)

    def state_dict(self) -> dict[str, Array]:
        """Return this rank's state as plain NumPy arrays: `numpy.savez(path, **state)` stores it."""
        self._open()
        return state.save(self._participant)

    def load_state_dict(self, *states: Mapping[str, Array]) -> None:
        """Continue from saved states (collective).

        With as many ranks as when they were saved, give each rank its own: the run continues to the
        bit. Otherwise give each state to one rank: rank p of P might take the states p, p + P, ...,
        or none. Residuals are added, so that their sum over the ranks is preserved.

        Raises
        ------
        StateError
            On all ranks, if a state is corrupt, foreign, missing or given twice. Nothing changes then.
        """
        self._open()
        gather, rank = self._transport.gather_objects, self._transport.rank
        read = together(gather, rank, lambda: state.read(self._participant, states), lambda about: about)
        state.apply(self._participant, states, state.agree(read.every))

    def close(self) -> None:
        """Write the timeline, if one was asked for, and free the communicator (collective)."""
        if self._closed:
            return
        self._closed, transport = True, self._transport
        try:
            if self._timeline:
                share_timeline(self._timeline, self._trace, transport.gather_objects, transport.rank)
        finally:
            transport.free()

    def __enter__(self) -> Runtime:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception only locally, since other ranks may not come."""
        if kind is None:
            self.close()
        self._closed = True

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the runtime is closed: make a new one")
