"""Corners that only real ranks have: arguments that differ, memory that is short, clocks, files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import bodies
import numpy as np
import pytest
from devices import got, handed
from test_mpi import raises_together
from worlds import LAYOUT, Mpi, whole

from mpitopk import (
    DGC,
    QSGD,
    AdaComp,
    Dense,
    Grassmann,
    GTopK,
    Layout,
    RandomK,
    Runtime,
    ScaleCom,
    TopK,
)
from mpitopk.errors import ConfigError, DeviceError, ExchangeError, GradientError, ReplicaError
from mpitopk.transport import Transport
from mpitopk.wire import Message, Status, message_bytes

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning"),
]


@pytest.mark.parametrize("scheme", [TopK(0.1), RandomK(0.1), Dense()], ids=["topk", "randomk", "dense"])
def test_the_mean_of_a_skipped_step_is_the_same_everywhere(comm: Any, scheme: Any, device: str) -> None:
    runtime = Runtime(comm, LAYOUT, scheme, nonfinite="skip", device=device)
    runtime.allreduce(handed(device, whole(comm.size, 0)[comm.rank]))
    gradient = whole(comm.size, 1)[comm.rank]
    if comm.rank == comm.size - 1:
        gradient[0] = np.nan
    gradient = handed(device, gradient)
    assert not got(runtime.allreduce(gradient)).any()
    runtime.check_replicas()
    assert runtime.allreduce(gradient, sparse=True).values.size == 0
    runtime.check_replicas()


@pytest.mark.parametrize("size", [1, 100, 5000, 300_000])
@pytest.mark.parametrize("scheme", [TopK(0.5), RandomK(0.5), Dense()], ids=["topk", "randomk", "dense"])
def test_replicas_are_the_same_bits_for_any_floats(comm: Any, scheme: Any, size: int) -> None:
    """Also where the MPI library adds up: it takes other algorithms for other sizes."""
    runtime = Runtime(comm, Layout({"w": size}), scheme)
    rng = np.random.default_rng(comm.rank)
    for _ in range(2):
        runtime.allreduce(rng.standard_cauchy(size).astype(np.float32))
        runtime.check_replicas()
    runtime.close()


def test_there_is_no_mean_before_a_step_or_after_a_failure(comm: Any) -> None:
    runtime = Runtime(comm, LAYOUT, TopK(0.1))
    raises_together(comm, GradientError, "take a step", runtime.check_replicas)
    runtime.allreduce(whole(comm.size, 0)[comm.rank])
    runtime.check_replicas()
    wrong = None if comm.rank == 0 else whole(comm.size, 0)[comm.rank]
    raises_together(comm, GradientError, "rank 0: ", lambda: runtime.allreduce(wrong))
    raises_together(comm, GradientError, "take a step", runtime.check_replicas)


@pytest.mark.parametrize("scheme", [TopK(0.1), RandomK(0.1), Dense()], ids=["topk", "randomk", "dense"])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_last_mean_is_no_gradient(comm: Any, scheme: Any, sparse: bool) -> None:
    """A step would overwrite it while reading it."""
    layout = Layout({"w": 10}) if sparse else LAYOUT
    runtime = Runtime(comm, layout, scheme)
    mean = runtime.allreduce(whole(comm.size, 0, layout)[comm.rank], sparse)
    last = mean.values if sparse else mean
    if last.size == layout.size:
        raises_together(comm, GradientError, "memory of its own", lambda: runtime.allreduce(last))
    runtime.allreduce(whole(comm.size, 1, layout)[comm.rank])


def test_broadcast_copies_every_array_whatever_its_name(comm: Any) -> None:
    runtime = Runtime(comm, LAYOUT, TopK(0.1))
    arrays = {
        "parameters": np.full(LAYOUT.size, comm.rank, np.float32),
        "other": np.full(3, comm.rank, np.int64),
        "empty": np.zeros((0, 3)),
    }
    runtime.broadcast(arrays, root=comm.size - 1)
    assert (arrays["parameters"] == comm.size - 1).all()
    assert (arrays["other"] == comm.size - 1).all()
    if comm.size > 1:
        arrays["other"][0] += comm.rank
        raises_together(comm, ReplicaError, "'other' differs", lambda: runtime.check_replicas(arrays))


def test_roots_that_differ_and_arrays_of_objects(comm: Any) -> None:
    runtime = Runtime(comm, LAYOUT, TopK(0.1))
    mine = np.full(3, comm.rank)
    if comm.size > 1:
        root = 1 if comm.rank == 1 else 0
        match = "rank 1 has root 1, rank 0 has 0"
        raises_together(comm, GradientError, match, lambda: runtime.broadcast(mine, root=root))
        assert (mine == comm.rank).all()
    raises_together(comm, GradientError, "root is 0.5", lambda: runtime.broadcast(mine, root=0.5))  # type: ignore[arg-type]
    objects = np.array([None])
    raises_together(comm, GradientError, "holds Python objects", lambda: runtime.broadcast(objects))


def test_one_rank_without_memory_fails_all(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Mpi(comm, LAYOUT, TopK(0.1))
    before, mine = world.residuals(), whole(comm.size, 0)[comm.rank]

    def short(*_: Any) -> Any:
        raise MemoryError("there is none")

    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(world.runtime._device, "exchange_memory", short)
        match = f"rank {comm.size - 1} has no memory for .* bytes of messages"
        raises_together(comm, ExchangeError, match, lambda: world.runtime.allreduce(mine))
    assert all(map(bodies.same, before, world.residuals()))
    world.step(whole(comm.size, 0))
    assert world.steps() == 1


@pytest.mark.parametrize(
    "scheme",
    [
        *(Dense(), TopK(0.1), TopK(lambda _: 0.1), RandomK(0.1), RandomK(lambda _: 0.1)),
        *(DGC(0.1), ScaleCom(0.1), ScaleCom(lambda _: 0.1), AdaComp(9), Grassmann()),
        *(GTopK(0.1), GTopK(lambda _: 0.1)),
    ],
    ids=lambda scheme: scheme.describe(),
)
def test_work_that_keeps_failing_on_one_rank_fails_all(
    comm: Any, scheme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has no memory for any work, whatever the gradient."""
    layout = Layout({"w": 50, "b": 7}, dtype="float16")
    runtime, mine = Runtime(comm, layout, scheme), whole(comm.size, 0, layout, np.float16)[comm.rank]
    before = runtime.state_dict()

    def short(*_: Any, **__: Any) -> Any:
        raise MemoryError("there is none")

    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            working = "accumulate", "accumulate_select", "select_bins", "encode_lines", "empty", "zeros"
            for operation in working:
                patch.setattr(runtime._participant.rank.device, operation, short)
        match = f"rank {comm.size - 1}: MemoryError: there is none"
        for _ in range(2):
            raises_together(comm, ExchangeError, match, lambda: runtime.allreduce(mine))
    after = runtime.state_dict()
    assert all(map(bodies.same, before.values(), after.values()))
    runtime.allreduce(mine)
    runtime.check_replicas()


@pytest.mark.parametrize("limit", [None, 0, 61])
def test_messages_of_unequal_sizes(comm: Any, limit: int | None) -> None:
    """In one call or in rounds of a few bytes."""
    transport = Transport(comm, *([comm.size + limit] if limit is not None else []))
    for shift in range(3):
        counts = [(3 * (rank + shift)) % 7 for rank in range(comm.size)]
        count = counts[comm.rank]
        message = Message.blank(np.empty(message_bytes(count, 1, 4), np.uint8), count, 1, "float32")
        message.indices[:], message.values[:] = range(count), comm.rank
        message.sign(Status.FINE, 0, comm.rank)
        sizes = transport.sizes(message.buffer.size)
        assert sizes == [message_bytes(c, 1, 4) for c in counts]
        messages = transport.allgatherv(message, sizes)
        assert messages.counts == counts
        assert messages.latest == comm.size - 1
        for rank, (indices, values) in enumerate(messages.parts(np.array([[0, 1]]))):
            assert indices.tolist() == list(range(counts[rank]))
            assert values.tolist() == [rank] * (counts[rank] + 1)
    transport.free()


def test_the_first_rank_of_a_node_opens_the_device_before_the_others(
    comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it compiles is there for them; if it fails, they are not left waiting."""
    written = Path(comm.bcast(str(tmp_path / "kernels")))

    def opened(*_: Any) -> Any:
        if comm.rank > 0:
            assert written.exists()
        time.sleep(0.05)
        written.touch()
        raise DeviceError("it has done its part")

    monkeypatch.setattr("mpitopk.runtime.open_device", opened)
    raises_together(
        comm, DeviceError, "rank 0: it has done its part", lambda: Runtime(comm, LAYOUT, TopK(0.1))
    )


def test_clocks_of_several_nodes_are_aligned(comm: Any) -> None:
    transport = Transport(comm)
    transport._node.Free()
    transport._node = comm.Split(comm.rank)  # as on as many nodes
    ahead = 10**9 * comm.rank
    offset = transport.clock_offset(lambda: time.monotonic_ns() + ahead)
    assert abs(offset + ahead) < 10**8, "ns; the ranks share processors"
    assert comm.rank > 0 or offset == 0
    transport.free()
    one_node = Transport(comm)
    assert one_node.clock_offset(time.monotonic_ns) == 0
    one_node.free()


def test_a_timeline_that_cannot_be_written_is_said_on_all_ranks(
    comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPITOPK_TIMELINE", comm.bcast(str(tmp_path / "no" / "run.json")))
    runtime = Runtime(comm, LAYOUT, Dense())
    runtime.allreduce(whole(comm.size, 0)[comm.rank])
    raises_together(comm, ConfigError, "MPITOPK_TIMELINE is .*cannot be written", runtime.close)
    runtime.close()


def test_steps_that_differ_are_noticed_everywhere(comm: Any) -> None:
    """A rank that has taken another number of steps, as after loading a state of its own."""
    world = Mpi(comm, LAYOUT, TopK(0.1))
    if comm.size > 1:
        if comm.rank == 0:
            world.runtime._participant.rank.step = 5
        call = lambda: world.step(whole(comm.size, 0))  # noqa: E731
        raises_together(comm, ExchangeError, "rank 1 has step 0, expected 5", call)


def test_schedules_that_differ_fail_together(comm: Any) -> None:
    """Both look alike at step 0, and no rank waits for another when they part."""
    mine = 0.5 if comm.rank == 0 else 0.25
    topk = Runtime(comm, LAYOUT, TopK(lambda step: mine if step else 0.1))
    randomk = Runtime(comm, LAYOUT, RandomK(lambda step: mine if step else 0.1))
    for runtime in (topk, randomk):
        runtime.allreduce(whole(comm.size, 0)[comm.rank])
    topk.allreduce(whole(comm.size, 1)[comm.rank])
    topk.check_replicas()
    if comm.size > 1:
        call = lambda: randomk.allreduce(whole(comm.size, 1)[comm.rank])  # noqa: E731
        raises_together(comm, ConfigError, "give all the same density", call)


SCHEMES = {"topk": TopK(0.1), "rounded": TopK(0.1, values=QSGD()), "gtopk": GTopK(0.1), "dense": Dense()}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_wrong_gradient_in_the_very_first_step(comm: Any, scheme: Any, device: str) -> None:
    """Nothing of what was tried at the start is still under way."""
    runtime = Runtime(comm, LAYOUT, scheme, device=device)
    wrong = comm.size - 1
    gradient = None if comm.rank == wrong else handed(device, whole(comm.size, 0)[comm.rank])
    raises_together(comm, GradientError, f"rank {wrong}: .*NoneType", lambda: runtime.allreduce(gradient))
    runtime.allreduce(handed(device, whole(comm.size, 0)[comm.rank]))
    runtime.check_replicas()
