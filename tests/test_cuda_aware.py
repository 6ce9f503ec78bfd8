"""MPI gets memory of the GPU where that works, and the bits are those of the way through host memory."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import devices
import pytest
from conftest import DEVICES
from devices import got, handed
from test_mpi import SCHEMES, raises_together
from worlds import LAYOUT, Mpi, whole

from mpitopk import Dense, Layout, Runtime, TopK, cuda_aware
from mpitopk.device import open_device
from mpitopk.errors import ConfigError, DeviceError
from mpitopk.transport import CUDA_AWARE, Transport

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif("cuda" not in DEVICES, reason="MPITOPK_TEST_DEVICES does not name cuda"),
    pytest.mark.skipif(not devices.STANDIN, reason="an MPI that is not CUDA-aware would crash"),
    pytest.mark.filterwarnings("ignore::mpitopk.errors.CompressionWarning"),
]

INSTALL = "from cudasim import standin; standin.install()"


def made(comm: Any, scheme: Any = None, **options: Any) -> Runtime:
    return Runtime(comm, LAYOUT, scheme or TopK(0.1), device="cuda", **options)


def direct(runtime: Runtime) -> bool:
    return runtime._device.direct  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("limit", [None, 64])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("scheme", [*SCHEMES.values(), Dense()], ids=[*SCHEMES, "dense"])
def test_both_ways_give_the_same_bits(
    comm: Any, scheme: Any, sparse: bool, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call, or in rounds."""
    options = {"device": "cuda"} if limit is None else {"device": "cuda", "limit": comm.size + limit}
    worlds = []
    for asked in "01":
        monkeypatch.setenv(CUDA_AWARE, asked)
        worlds.append(Mpi(comm, LAYOUT, scheme, **options))
        assert direct(worlds[-1].runtime) == (asked == "1")
    for step in range(4):
        staged, there = (world.step(whole(comm.size, step), sparse) for world in worlds)
        for one, other in zip(staged, there, strict=True) if sparse else [(staged, there)]:
            assert one.tobytes() == other.tobytes()
    staged, there = (world.runtime.state_dict() for world in worlds)
    assert all(staged[key].tobytes() == there[key].tobytes() for key in staged)


@pytest.mark.parametrize(
    ("asked", "says", "crash", "wrong", "outcome"),
    [
        ("auto", True, "", "", True),
        ("auto", False, "", "", "by the table, the MPI library is not CUDA-aware"),
        ("auto", None, "", "", "is not CUDA-aware"),
        ("auto", True, "it crashed", "", "on rank 0: it crashed"),
        ("auto", True, "", "wrong bytes", "on rank {last}: wrong bytes"),
        ("1", False, "it crashed", "", True),
        ("1", True, "", "wrong bytes", DeviceError),
        ("0", True, "", "", "MPITOPK_CUDA_AWARE is 0"),
    ],
)
def test_what_is_said_tried_and_asked_for(
    comm: Any,
    asked: str,
    says: bool | None,
    crash: str,
    wrong: str,
    outcome: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One rank on which it fails is enough, and only rank 0 reports."""
    last = comm.size - 1
    monkeypatch.setenv(CUDA_AWARE, asked)
    monkeypatch.setattr(cuda_aware, "hint", lambda: (says, "the table"))
    monkeypatch.setattr(cuda_aware, "trial", lambda _: crash)
    monkeypatch.setattr(cuda_aware, "probe", lambda *_: wrong if comm.rank == last else "")
    varying = TopK(lambda _: 0.1)  # so that nothing is timed
    if outcome is DeviceError:
        match = f"{CUDA_AWARE} is 1, but on rank {last}: wrong bytes: let it be auto"
        raises_together(comm, DeviceError, match, lambda: made(comm, varying))
        return
    with caplog.at_level(logging.INFO, "mpitopk"):
        runtime = made(comm, varying)
    assert direct(runtime) == (outcome is True)
    assert len(caplog.messages) == (comm.rank == 0)
    if comm.rank == 0:
        (said,) = caplog.messages
        assert said.count("GPU 0") == comm.size
        assert "in memory of the GPU" in said if outcome is True else outcome.format(last=last) in said


@pytest.mark.parametrize("scheme", [TopK(0.1), Dense()], ids=["topk", "dense"])
@pytest.mark.parametrize("slow", [True, False])
def test_the_quicker_way_is_taken(
    comm: Any, scheme: Any, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quicker on the slowest rank, whichever that is."""
    from mpitopk.device.gpu_memory import GpuMemoryDevice

    settle = GpuMemoryDevice.settle

    def hampered(device: Any) -> None:
        if device.direct == slow and comm.rank == comm.size - 1:
            time.sleep(0.003)
        settle(device)

    monkeypatch.setenv(CUDA_AWARE, "auto")
    monkeypatch.setattr(cuda_aware, "hint", lambda: (True, "the table"))
    monkeypatch.setattr(cuda_aware, "trial", lambda _: "")
    monkeypatch.setattr(GpuMemoryDevice, "settle", hampered)
    assert direct(made(comm, scheme)) != slow


def test_work_is_done_before_mpi_reads(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpitopk.device.gpu_memory import GpuMemoryDevice

    monkeypatch.setenv(CUDA_AWARE, "1")
    monkeypatch.setattr(GpuMemoryDevice, "settle", lambda _: None)
    refusal = "on rank 0: TypeError: message: expecting buffer"  # by the array; mpi4py hides why
    raises_together(comm, DeviceError, refusal, lambda: made(comm))


def test_buffers_for_mpi_stay_and_are_not_the_users(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of pools and of other allocators cannot always be shared; addresses that change confuse MPI."""
    from mpitopk.device.cuda import cupy

    monkeypatch.setenv(CUDA_AWARE, "1")
    pool = cupy.cuda.MemoryPool()
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(pool.malloc)
    try:
        runtime = made(comm)
        addresses, kept = set(), []
        for step in range(10):
            kept = [cupy.empty(1000 * (step + 1), "uint8")]
            runtime.allreduce(handed("cuda", whole(comm.size, step)[comm.rank]))
            buffers = runtime._transport._room, runtime._device._sent  # type: ignore[attr-defined]
            assert all(type(buffer.data.mem) is cupy.cuda.Memory for buffer in buffers)
            addresses.add(tuple(buffer.data.ptr for buffer in buffers))
        assert len(addresses) == 1
        assert kept
    finally:
        cupy.cuda.set_allocator(before)


def test_a_library_that_moves_wrong_bytes_is_found_out(comm: Any) -> None:
    """Whichever call it is; the others pass."""
    for call, match in {
        "_allgather": "gathered wrong bytes",
        "_allgatherv": "gathered wrong bytes",
        "_allreduce": "added up wrongly",
    }.items():
        if comm.size == 1 and call != "_allgather":
            continue  # nothing to add, and sizes are equal
        transport = Transport(comm)
        real = transport._comm
        transport._comm = Forgetful(real, call[1:].capitalize())  # type: ignore[assignment]
        assert match in cuda_aware.probe(transport, open_device("cuda", 1))  # type: ignore[arg-type]
        transport._comm = real
        transport.free()


class Forgetful:
    """A communicator that leaves what one of its calls receives as it was."""

    def __init__(self, comm: Any, call: str) -> None:
        self._comm, self._call = comm, call

    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: None) if name == self._call else getattr(self._comm, name)


def test_a_trial_runs_apart_from_the_job(comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher too; whatever happens in it becomes a reason."""
    if comm.rank == 0:
        tests = Path(__file__).parent
        for name, text, reason in (
            ("works", f"import sys; sys.path.insert(0, {str(tests)!r})\n{INSTALL}", ""),
            ("crashes", "import os; os.abort()", "ended with -6: "),
            ("refuses", "raise ImportError('no driver')", "ended with 1: "),
        ):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "cupy.py").write_text(text)
            monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
            said = cuda_aware.trial(0)
            assert reason in said if reason else said == ""


def test_what_the_environment_may_not_say(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA_AWARE, "yes")
    raises_together(comm, DeviceError, f"{CUDA_AWARE} is 'yes'", lambda: made(comm))
    if comm.size > 1:
        monkeypatch.setenv(CUDA_AWARE, "1" if comm.rank == 0 else "0")
        raises_together(comm, ConfigError, f"rank 1 has {CUDA_AWARE} 0, rank 0 has 1", lambda: made(comm))


def test_ranks_choose_the_same_kind_of_memory(comm: Any) -> None:
    if comm.size > 1:
        device = "cuda" if comm.rank == 0 else "numpy"
        match = "rank 1 has memory of the host, rank 0 has of a GPU"
        raises_together(comm, ConfigError, match, lambda: Runtime(comm, LAYOUT, Dense(), device=device))


def test_a_gpu_too_small_for_the_state_of_its_ranks_is_said_before_training(comm: Any) -> None:
    """By all ranks, though only the last comes too late for memory."""
    from mpitopk.device.cuda import cupy

    pool, last = cupy.get_default_memory_pool(), comm.size - 1
    if comm.rank == last:
        pool.set_limit(size=pool.used_bytes() + 100_000)
    try:
        match = rf"rank {last}: GPU 0 has no memory for 400000 bytes more .*let fewer ranks share the GPU"
        large = Layout({"w": 100_000})
        raises_together(comm, DeviceError, match, lambda: Runtime(comm, large, TopK(0.1), device="cuda"))
    finally:
        pool.set_limit(size=0)
    Mpi(comm, large, TopK(0.1), device="cuda").step(whole(comm.size, 0, large))


def test_a_step_that_fails_leaves_the_state(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA_AWARE, "1")
    runtime = made(comm)
    before = runtime.state_dict()
    bad = whole(comm.size, 0)[comm.rank]
    if comm.rank == comm.size - 1:
        bad[3] = float("inf")
    with pytest.raises(Exception, match=f"rank {comm.size - 1}: the gradient has NaN or Inf"):
        runtime.allreduce(handed("cuda", bad))
    after = runtime.state_dict()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    assert got(runtime.allreduce(handed("cuda", whole(comm.size, 0)[comm.rank]))).any()
