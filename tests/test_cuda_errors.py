"""What goes wrong around a GPU has a name, and leaves the state as it was."""

from __future__ import annotations

import sys
from typing import Any

import devices
import numpy as np
import pytest
from conftest import DEVICES
from devices import handed
from worlds import LAYOUT, whole

import mpitopk
from mpitopk import Dense, Layout, RandomK, Simulation, TopK
from mpitopk.device import open_device
from mpitopk.errors import DeviceError, GradientError

pytestmark = [
    pytest.mark.skipif("cuda" not in DEVICES, reason="MPITOPK_TEST_DEVICES does not name cuda"),
    pytest.mark.skipif(not devices.STANDIN, reason="only the stand-in can be put out of order"),
]


def raising(error: Exception) -> Any:
    def function(*_: Any, **__: Any) -> Any:
        raise error

    return function


@pytest.fixture
def cuda() -> Any:
    from mpitopk.device import cuda

    return cuda


def test_no_gpu(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = cuda.cupy.cuda.runtime.CUDARuntimeError(100)
    monkeypatch.setattr(cuda.cupy.cuda.runtime, "getDeviceCount", raising(error))
    with pytest.raises(DeviceError, match=r"no GPU can be used here.*cudaErrorNoDevice.*take device='host'"):
        open_device("cuda", 1)


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found without importing it."""
    why_no_gpu: Any = devices.WHY_NO_GPU
    why_no_gpu.cache_clear()
    monkeypatch.setattr("mpitopk.device.find_spec", lambda _: None)
    assert "CuPy is not installed" in why_no_gpu()
    why_no_gpu.cache_clear()


def test_auto_is_a_gpu_for_a_program_with_cupy(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where CuPy is merely installed, nor where no kernel runs."""
    host = open_device("auto", 1).name
    assert host in ("host", "numpy")
    monkeypatch.setitem(sys.modules, "cupy", cuda.cupy)
    assert open_device("auto", 1).name == "cuda"
    monkeypatch.setattr(cuda.cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    assert open_device("auto", 1).name == host


def test_an_old_cupy(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.cupy, "__version__", "13.6.0")
    with pytest.raises(DeviceError, match=r"CuPy 13\.6\.0 is too old: install 14\.1"):
        open_device("cuda", 1)


def test_kernels_that_do_not_compile_or_compute(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "launch", raising(RuntimeError("libnvrtc.so is missing")))
        with pytest.raises(DeviceError, match=r"RuntimeError: libnvrtc.so is missing"):
            open_device("cuda", 1)
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "launch", raising(PermissionError(13, "Permission denied", "/home/.cupy")))
        with pytest.raises(DeviceError, match=r"'/home/.cupy'.*set CUPY_CACHE_DIR to a folder"):
            open_device("cuda", 1)
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "launch", lambda *_, **__: None)
        with pytest.raises(DeviceError, match="wrong result"):
            open_device("cuda", 1)


@pytest.mark.parametrize("scheme", [TopK(0.1), RandomK(0.1), Dense()])
def test_arrays_of_the_other_kind(scheme: Any) -> None:
    """NumPy's for a runtime on a GPU, and CuPy's for one on the host."""
    gradient = whole(1, 0)[0]
    with pytest.raises(GradientError, match=r"rank 0: .*ndarray that cannot be viewed as an array on a GPU"):
        Simulation(1, LAYOUT, scheme, device="cuda").allreduce([gradient])
    there = handed("cuda", gradient)
    there.get()
    with pytest.raises(GradientError, match=r"rank 0: the gradient is on a GPU .*the runtime on the host"):
        Simulation(1, LAYOUT, scheme, device="numpy").allreduce([there])


def test_the_mean_of_the_last_step_is_no_gradient() -> None:
    simulation = Simulation(1, LAYOUT, TopK(0.1), device="cuda")
    mean = simulation.allreduce([handed("cuda", whole(1, 0)[0])])
    with pytest.raises(GradientError, match="memory of its own"):
        simulation.allreduce([mean])


def test_memory_of_another_gpu(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, gradient = Simulation(1, LAYOUT, TopK(0.1), device="cuda"), handed("cuda", whole(1, 0)[0])
    before = simulation.state_dicts()[0]

    class Second(cuda.cupy.cuda.Device):  # type: ignore[misc]
        def __init__(self, number: int = 1) -> None:
            super().__init__(number)

    with monkeypatch.context() as patch:
        patch.setattr(cuda.cupy.cuda, "Device", Second)
        with pytest.raises(
            GradientError, match="rank 0: expected a gradient with memory of GPU 1, got GPU 0"
        ):
            simulation.allreduce([gradient])
    assert all(before[key].tobytes() == kept.tobytes() for key, kept in simulation.state_dicts()[0].items())
    simulation.allreduce([gradient])


def test_float64() -> None:
    for layout, scheme in (
        (Layout({"w": 9}, dtype="float64"), TopK(0.1)),
        (LAYOUT, TopK(0.1, values="float64")),
    ):
        with pytest.raises(DeviceError, match="float"):
            simulation = Simulation(1, layout, scheme, device="cuda")
            simulation.allreduce([handed("cuda", whole(1, 0, layout)[0])])


def test_memory_that_is_short_from_the_start_or_in_a_step(cuda: Any) -> None:
    pool = cuda.cupy.get_default_memory_pool()
    layout = Layout({"w": 100_000})
    gradients = [handed("cuda", whole(1, step, layout)[0]) for step in range(3)]
    try:
        pool.set_limit(size=pool.used_bytes() + 100_000)
        with pytest.raises(DeviceError, match=r"no memory for 400000 bytes more.*fewer ranks share"):
            Simulation(1, layout, TopK(0.01), device="cuda")
        pool.set_limit(size=0)
        simulation = Simulation(1, layout, TopK(lambda step: 0.01 * (1 + 9 * (step % 2))), device="cuda")
        simulation.allreduce(gradients[:1])
        before = simulation.state_dicts()[0]
        pool.set_limit(size=pool.used_bytes() + 1000)
        with pytest.raises(mpitopk.MpiTopkError, match=r"rank 0: .*no memory for"):
            simulation.allreduce(gradients[1:2])
        after = simulation.state_dicts()[0]
        assert all(np.array_equal(before[key], after[key]) for key in before)
    finally:
        pool.set_limit(size=0)
    simulation.allreduce(gradients[1:2])


def test_ranks_of_a_node_take_gpus_by_turns(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    class Device:
        def __init__(self, number: int | None = None) -> None:
            self.id = current[0] if number is None else number

        def use(self) -> None:
            current[0] = self.id

    monkeypatch.setattr(cuda.cupy.cuda, "Device", Device)
    monkeypatch.setattr(cuda.cupy.cuda.runtime, "getDeviceCount", lambda: 4)
    for local_rank, taken in (0, 0), (1, 1), (6, 2):
        current[0] = 0
        assert cuda.use_device_of(local_rank) == taken
    current[0] = 3
    assert cuda.use_device_of(1) == 3, "the program has chosen"
