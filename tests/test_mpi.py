"""Real ranks: the bodies of the simulated tests again, and what only MPI can show."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import bodies
import numpy as np
import pytest
from worlds import LAYOUT, Array, Mpi, whole

import mpitopk
from mpitopk import Dense, GTopK, Layout, RandomK, Runtime, TopK
from mpitopk.errors import (
    ClosedError,
    CompressionWarning,
    ConfigError,
    DeviceError,
    GradientError,
    LayoutError,
    ReplicaError,
    StateError,
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning"),
]
SCHEMES = {
    "topk": TopK(0.1),
    "float16": TopK(0.1, values="float16", dense_below=20),
    "schedule": TopK(lambda step: 0.1 / (step + 1)),
    "gtopk": GTopK(0.1, dense_below=20),
    "randomk": RandomK(0.1),
}


def raises_together(comm: Any, error: type[Exception], match: str, call: Any) -> None:
    """The call raises the same error, with the same text, on all ranks."""
    with pytest.raises(error, match=match) as raised:
        call()
    assert len(set(comm.allgather(str(raised.value)))) == 1


@pytest.mark.parametrize("options", bodies.TOPK.values(), ids=bodies.TOPK)
def test_topk_follows_the_oracle(comm: Any, options: dict[str, Any], device: str) -> None:
    bodies.follows_the_oracle(Mpi(comm, LAYOUT, TopK(**options), device=device), options)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_conservation(comm: Any, scheme: Any, device: str) -> None:
    bodies.conserves(Mpi(comm, LAYOUT, scheme, device=device))


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), Dense()], ids=[*SCHEMES, "dense"])
def test_a_sparse_mean_is_the_dense_one(comm: Any, scheme: Any, device: str) -> None:
    bodies.sparse_is_dense(*[Mpi(comm, LAYOUT, scheme, device=device) for _ in range(2)])


@pytest.mark.parametrize("what", bodies.broken_gradients(1, 0))
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_failed_step_leaves_no_trace(comm: Any, scheme: Any, what: str, device: str) -> None:
    broken = bodies.broken_gradients(comm.size, comm.size - 1)[what]
    bodies.fails_without_trace(Mpi(comm, LAYOUT, scheme, device=device), *broken)


@pytest.mark.parametrize("what", bodies.broken_gradients(1, 0))
def test_dense_fails_together(comm: Any, what: str) -> None:
    gradients, error, match = bodies.broken_gradients(comm.size, comm.size - 1)[what]
    runtime = Runtime(comm, LAYOUT, Dense())
    raises_together(comm, error, match, lambda: runtime.allreduce(gradients[comm.rank]))
    runtime.allreduce(whole(comm.size, 0)[comm.rank])
    runtime.check_replicas()


def test_failures_are_seen_in_an_empty_layout(comm: Any) -> None:
    for scheme in (Dense(), TopK(0.1)):
        runtime = Runtime(comm, Layout({"none": 0}), scheme)
        wrong = np.zeros(1 if comm.rank == comm.size - 1 else 0, np.float32)
        raises_together(comm, GradientError, "0 entries, got 1", lambda w=wrong, r=runtime: r.allreduce(w))
        assert runtime.allreduce(np.zeros(0, np.float32)).size == 0


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), Dense()], ids=[*SCHEMES, "dense"])
def test_skip_and_zero(comm: Any, scheme: Any) -> None:
    gradient = whole(comm.size, 0)[comm.rank]
    if comm.rank == comm.size - 1:
        gradient[3] = np.inf
    skipping = Runtime(comm, LAYOUT, scheme, nonfinite="skip")
    assert not skipping.allreduce(gradient).any()
    assert (skipping.metrics.skipped, skipping.step) == (1, 0)
    zeroing = Runtime(comm, LAYOUT, scheme, nonfinite="zero")
    zeroing.allreduce(gradient)
    assert gradient[3] == (0 if comm.rank == comm.size - 1 else whole(comm.size, 0)[comm.rank][3])
    zeroing.check_replicas()


@pytest.mark.parametrize("scheme", [TopK(0.5), Dense(), RandomK(0.5)], ids=["topk", "dense", "randomk"])
def test_large_exchanges_go_in_rounds(comm: Any, scheme: Any) -> None:
    """With a limit of a few bytes a call the result is the same."""
    layout = Layout({"w": 1000})
    whole_, parts = Runtime(comm, layout, scheme), Runtime(comm, layout, scheme, limit=8 * comm.size + 3)
    for step in range(2):
        gradient = whole(comm.size, step, layout)[comm.rank]
        assert bodies.same(whole_.allreduce(gradient), parts.allreduce(gradient))


def test_subcommunicators(comm: Any) -> None:
    part = comm.Split(comm.rank % 2, -comm.rank)
    world = Mpi(part, LAYOUT, TopK(0.05))
    bodies.follows_the_oracle(world, {"density": 0.05})
    world.runtime.close()
    part.Free()


def test_what_runtimes_must_agree_on(comm: Any) -> None:
    last = comm.rank == comm.size - 1
    first = comm.size == 1
    other = Layout({"w": (12, 10), "c": 7})

    def make(layout: Any = LAYOUT, scheme: Any = None, **options: Any) -> Any:
        return lambda: Runtime(comm, layout, scheme or TopK(0.1), **options)

    if not first:
        raises_together(comm, ConfigError, "layout of rank", make(other if last else LAYOUT))
        raises_together(comm, ConfigError, "TopK.*density=0.2", make(scheme=TopK(0.2 if last else 0.1)))
        raises_together(comm, ConfigError, "nonfinite skip", make(nonfinite="skip" if last else "raise"))
    who = comm.size - 1
    raises_together(comm, ConfigError, f"rank {who}: threads", make(threads=0 if last else 1))
    raises_together(comm, ConfigError, f"rank {who}: device", make(device="hst" if last else "auto"))
    raises_together(comm, ConfigError, f"rank {who}: nonfinite", make(nonfinite="rise" if last else "raise"))
    raises_together(comm, ConfigError, f"rank {who}: limit", make(limit=0 if last else 1 << 20))
    raises_together(comm, LayoutError, f"rank {who}: the layout", make(layout={} if last else LAYOUT))
    raises_together(comm, ConfigError, f"rank {who}: the scheme", make(scheme="topk" if last else None))
    with pytest.raises(ConfigError, match="comm is"):
        Runtime(None, LAYOUT, TopK(0.1))  # type: ignore[arg-type]


def test_missing_kernels_are_named(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitopk.device.WHY_NOT_COMPILED", "no compiler")
    raises_together(
        comm, DeviceError, "kernels are missing", lambda: Runtime(comm, LAYOUT, Dense(), device="host")
    )


def test_use_after_close(comm: Any) -> None:
    runtime = Runtime(comm, LAYOUT, TopK(0.1))
    runtime.close()
    runtime.close()
    calls: list[Any] = [
        lambda: runtime.allreduce(whole(1, 0)[0]),
        lambda: runtime.gradient,
        lambda: runtime.broadcast(np.zeros(3)),
        runtime.check_replicas,
        runtime.state_dict,
        runtime.__enter__,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="make a new one"):
            call()


def test_broadcast_and_check_replicas(comm: Any) -> None:
    runtime = Runtime(comm, LAYOUT, TopK(0.1), limit=64 * comm.size)
    parameters = np.full(LAYOUT.size, comm.rank, np.float32)
    runtime.broadcast(parameters, root=comm.size - 1)
    assert (parameters == comm.size - 1).all()
    named = {"a": np.full((3, 4), comm.rank, np.float64), "b": np.array(comm.rank)}
    runtime.broadcast(named)
    runtime.check_replicas(named)
    runtime.check_replicas(parameters)
    if comm.size > 1:
        if comm.rank == comm.size - 1:
            parameters[125] = -0.0 if parameters[125] == 0 else np.nextafter(parameters[125], 9)
        match = f"'b' differs on rank {comm.size - 1} from rank 0"
        raises_together(comm, ReplicaError, match, lambda: runtime.check_replicas(parameters))
        wrong: Array = np.zeros(4 if comm.rank == 0 else 5)
        raises_together(comm, GradientError, "name, shape or dtype", lambda: runtime.broadcast(wrong))
    fixed = np.zeros(3)
    fixed.flags.writeable = comm.rank > 0
    raises_together(comm, GradientError, "rank 0: .*cannot be written", lambda: runtime.broadcast(fixed))
    raises_together(comm, GradientError, "root is 99", lambda: runtime.broadcast(np.zeros(3), root=99))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_resume_continues_to_the_bit(comm: Any, scheme: Any, tmp_path: Path) -> None:
    one, other = Mpi(comm, LAYOUT, scheme), Mpi(comm, LAYOUT, scheme)
    for step in range(3):
        one.step(whole(comm.size, step))
    np.savez(tmp_path / f"{comm.rank}.npz", **one.runtime.state_dict())  # type: ignore[arg-type]
    other.runtime.load_state_dict(dict(np.load(tmp_path / f"{comm.rank}.npz")))
    assert other.steps() == 3
    for step in range(3, 6):
        gradients = whole(comm.size, step)
        assert bodies.same(one.step(gradients), other.step(gradients))
    assert all(map(bodies.same, one.residuals(), other.residuals()))


def test_resume_on_another_number_of_ranks_keeps_the_sum(comm: Any) -> None:
    for saved in (1, 2, 2 * comm.size + 1):
        simulation = mpitopk.Simulation(saved, LAYOUT, TopK(0.1))
        for step in range(3):
            simulation.allreduce(whole(saved, step))
        states = simulation.state_dicts()
        assert {mpitopk.saved_size(state) for state in states} == {saved}
        world = Mpi(comm, LAYOUT, TopK(0.1))
        world.runtime.load_state_dict(*states[comm.rank :: comm.size])
        assert world.steps() == 3
        total = sum(np.concatenate([v.reshape(-1) for k, v in s.items() if "/" in k]) for s in states)
        np.testing.assert_array_equal(np.sum(world.residuals(), axis=0), total)
        bodies.conserves(world, steps=1)


def test_bad_states_are_refused_and_nothing_changes(comm: Any) -> None:
    world = Mpi(comm, LAYOUT, TopK(0.1))
    world.step(whole(comm.size, 0))
    before, good = world.residuals(), world.runtime.state_dict()
    last = comm.rank == comm.size - 1
    bad = {
        "no state of mpitopk": {k: v for k, v in good.items() if k != "mpitopk"},
        "no readable entry": good | {"mpitopk": np.array("{")},
        "format 9": good | {"mpitopk": np.array(str(good["mpitopk"]).replace('"format": 1', '"format": 9'))},
        "lacks 'residual/b'": {k: v for k, v in good.items() if k != "residual/b"},
        r"float64 \(7,\), expected float32": good | {"residual/b": np.zeros(7)},
        "has NaN or Inf": good | {"residual/b": np.full(7, np.nan, np.float32)},
        "another layout": mpitopk.Simulation(1, Layout({"w": 3}), TopK(0.1)).state_dicts()[0],
        "scheme RandomK": mpitopk.Simulation(1, LAYOUT, RandomK(0.1)).state_dicts()[0],
    }
    for match, state in bad.items():
        mine = state if last else good
        call = lambda state=mine: world.runtime.load_state_dict(state)  # noqa: E731
        raises_together(comm, StateError, f"rank {comm.size - 1}: .*{match}", call)
    raises_together(comm, StateError, "no rank was given", world.runtime.load_state_dict)
    raises_together(comm, StateError, "once", lambda: world.runtime.load_state_dict(good, good))
    assert all(map(bodies.same, before, world.residuals()))
    assert world.steps() == 1


def test_metrics_count_what_the_others_sent(comm: Any) -> None:
    runtime = Runtime(comm, LAYOUT, TopK(0.1))
    for step in range(3):
        runtime.allreduce(whole(comm.size, step)[comm.rank])
    metrics = runtime.metrics
    k = round(0.1 * LAYOUT.size)
    message = 40 + (4 * k + 7) // 8 * 8 + (4 * k + 7) // 8 * 8
    assert metrics.bytes == 3 * (comm.size - 1) * message
    assert metrics.dense_bytes == 3 * (2 * 4 * LAYOUT.size * (comm.size - 1) // comm.size)
    assert metrics.steps == 3
    assert metrics.density == k / LAYOUT.size <= metrics.union
    seconds = metrics.seconds
    assert {"select", "pack", "exchange", "wait", "transfer", "merge"} <= set(seconds)
    assert seconds["wait"] + seconds["transfer"] <= seconds["exchange"]


@pytest.mark.filterwarnings("default::mpitopk.errors.CompressionWarning")
def test_one_warning_where_it_cannot_pay(comm: Any, recwarn: pytest.WarningsRecorder) -> None:
    runtime = Runtime(comm, LAYOUT, TopK(0.9))
    for step in range(3):
        runtime.allreduce(whole(comm.size, step)[comm.rank])
    warned = [w for w in recwarn.list if w.category is CompressionWarning]
    assert len(warned) == (1 if comm.rank == 0 and comm.size > 1 else 0)


@pytest.mark.parametrize("scheme", [TopK(0.1), Dense()], ids=["topk", "dense"])
def test_timeline(comm: Any, scheme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file for all ranks; a slow rank shows as waiting of the others, not as a slow transfer."""
    path = comm.bcast(str(tmp_path / "run.json"))
    monkeypatch.setenv("MPITOPK_TIMELINE", path)
    with Runtime(comm, LAYOUT, scheme) as runtime:
        for step in range(3):
            with runtime.range("forward"):
                time.sleep(0.05 if comm.rank == 0 else 0)
            runtime.allreduce(whole(comm.size, step)[comm.rank])
        received = comm.gather(runtime.metrics.bytes)
    comm.Barrier()
    if comm.rank > 0:
        return
    records = json.loads(Path(path).read_text())["traceEvents"]
    counts = [e for e in records if e["ph"] == "C" and e["name"] == "bytes"]
    for rank in range(comm.size):
        mine = {e["step"]: e["args"]["received"] for e in counts if e["pid"] == rank}
        assert sorted(mine) == [0, 1, 2]
        assert sum(mine.values()) == received[rank]
    events = [e for e in records if e["ph"] == "X"]
    assert {event["pid"] for event in events} == set(range(comm.size))
    assert {"forward", "exchange", "wait", "transfer", "merge"} <= {event["name"] for event in events}
    for rank in range(comm.size):
        for step in range(3):
            mine = {e["name"]: e for e in events if (e["pid"], e["args"]["step"]) == (rank, step)}
            assert mine["wait"]["dur"] + mine["transfer"]["dur"] <= mine["exchange"]["dur"] + 1e-3
            assert min(e["ts"] for e in mine.values()) >= 0
            if rank > 0:
                assert mine["wait"]["dur"] > 20_000, "the others wait for rank 0, which sleeps 50 ms"
            else:
                assert mine["wait"]["dur"] < 20_000


def test_different_timelines_are_refused(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.size > 1:
        if comm.rank == 0:
            monkeypatch.setenv("MPITOPK_TIMELINE", "somewhere.json")
        raises_together(comm, ConfigError, "MPITOPK_TIMELINE", lambda: Runtime(comm, LAYOUT, Dense()))


def test_an_exception_leaves_the_context_without_waiting(comm: Any) -> None:
    if comm.rank == 0:
        with pytest.raises(ZeroDivisionError), Runtime(comm.Split(0), LAYOUT, Dense()) as runtime:
            raise ZeroDivisionError
        with pytest.raises(ClosedError):
            runtime.allreduce(whole(1, 0)[0])
    else:
        comm.Split(1).Free()


@pytest.mark.ranks64
def test_many_ranks(comm: Any) -> None:
    """The small set for 64 ranks; the other tests run on fewer."""
    for name in ("whole buffer", "small ones dense"):
        bodies.follows_the_oracle(Mpi(comm, LAYOUT, TopK(**bodies.TOPK[name])), bodies.TOPK[name], steps=2)
    bodies.conserves(Mpi(comm, LAYOUT, RandomK(0.1)), steps=2)
    for what in ("nan", "size"):
        broken = bodies.broken_gradients(comm.size, comm.size - 1)[what]
        bodies.fails_without_trace(Mpi(comm, LAYOUT, TopK(0.1)), *broken)
