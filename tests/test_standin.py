"""The stand-in for CuPy: it behaves as CuPy does, and finds planted faults of the host's code."""

from __future__ import annotations

import contextlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import cudasim
import numpy as np
import pytest
from cudasim import LaunchError, standin
from cudasim.standin import CUDARuntimeError, OutOfMemoryError, StreamRace

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)

SOURCE = """
template <class T>
__global__ void __launch_bounds__(128) scaled(const T* x, T* out, T by, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * by;
}

extern "C" __global__ void counted(const float* x, unsigned* total, float bound, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    if (x != nullptr && x[i] >= bound) atomicAdd(total, 1u);
}

extern "C" {
__global__ void first(unsigned* out) { if (threadIdx.x == 0) out[0] = 1; }
}

struct Pair { int a; float b; };
extern "C" __global__ void paired(Pair pair, float* out) { out[0] = pair.a + pair.b; }

__global__ void mangled(unsigned* out) { out[0] = 1; }
"""
OPTIONS = ("--std=c++17",)
N = 1000

GUARDED = """
import sys
from cudasim import standin

source, size, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with standin.installed("asan") as cupy:
    module = cupy.RawModule(code=source, name_expressions=("scaled<double>",))
    x, out = cupy.zeros(size), cupy.zeros(size)
    module.get_function("scaled<double>")((8,), (128,), (x, out, 2.0, n))
    out.get()
"""

SURFACE = """
import sys
import cupy

def found(name):
    value = cupy
    for part in name.split("."):
        value = getattr(value, part)

if cupy.__version__.split(".")[0] not in ("14", "15"):
    sys.exit("other")
for name in sys.argv[1:]:
    try:
        found(name)
    except AttributeError:
        print(name)
"""


@pytest.fixture(params=standin.POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cupy(policy: str) -> Iterator[ModuleType]:
    with standin.installed(policy=policy) as module:
        yield module


@pytest.fixture
def lazy() -> Iterator[ModuleType]:
    with standin.installed() as module:
        yield module


def kernel(cupy: Any, name: str) -> Any:
    expressions = ["scaled<float>", "scaled<double>"]
    return cupy.RawModule(code=SOURCE, options=OPTIONS, name_expressions=expressions).get_function(name)


def values(n: int = N) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(n).astype(np.float32)


def pinned(cupy: Any, n: int, dtype: Any = np.float32) -> np.ndarray:
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(n * np.dtype(dtype).itemsize), dtype, n)


class Pipeline:
    """Scale on one stream and copy to pinned memory on another, right unless a fault is planted."""

    def __init__(self, cupy: Any, fault: str = "") -> None:
        self.cupy, self.fault = cupy, fault
        self.compute, self.copies = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self.scaled = kernel(cupy, "scaled<float>")
        with self.compute:
            self.out = cupy.empty(N, np.float32)
        self.host = pinned(cupy, N)

    def start(self, x: Any, ready: Any) -> Any:
        if self.fault != "input":
            self.compute.wait_event(ready)
        with self.compute:
            if self.fault == "temporary":
                with self.copies:
                    temporary = self.cupy.empty(N, np.float32)
                self.scaled((8,), (128,), (x, temporary, np.float32(1), N))
                del temporary
            self.scaled((8,), (128,), tuple(self.arguments(x)))
            computed = self.compute.record()
        if self.fault != "copy":
            self.copies.wait_event(computed)
        self.out.get(self.copies, out=self.host, blocking=False)
        done = self.cupy.cuda.Event(disable_timing=True)
        done.record(self.compute if self.fault == "event" else self.copies)
        return done

    def arguments(self, x: Any) -> list[Any]:
        right = [x, self.out, np.float32(3), N]
        wrong = {
            "width": (3, np.int32(N)),
            "float": (2, 3.0),
            "host": (0, values()),
            "pointer": (3, self.out),
        }
        if self.fault == "missing":
            right.pop()
        if self.fault in wrong:
            place, value = wrong[self.fault]
            right[place] = value
        return right


def through(cupy: Any, fault: str = "") -> bool:
    """Run a pipeline and return whether its result is right."""
    producer = cupy.cuda.Stream(non_blocking=True)
    with producer:
        x = cupy.asarray(values())
        ready = producer.record()
    pipeline = Pipeline(cupy, fault)
    for _ in range(2):
        done = pipeline.start(x, ready)
        if fault != "host_wait":
            done.synchronize()
        right = np.array_equal(pipeline.host, values() * np.float32(3))
        pipeline.compute.wait_event(pipeline.copies.record())
        if not right:
            return False
    cupy.cuda.Device().synchronize()
    standin.check_late()
    return True


def forget_late() -> None:
    """Drop what is reported of memory that a pipeline ended early has let go."""
    with contextlib.suppress(StreamRace):
        standin.check_late()


def test_pipeline_is_right(cupy: ModuleType) -> None:
    assert through(cupy)
    assert standin.launches == ["scaled<float>"] * 2
    assert standin.allocations == 2
    standin.reset_counts()
    assert (standin.launches, standin.allocations) == ([], 0)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("width", LaunchError, "argument 3 is int32, the parameter an integer of 8 bytes"),
        ("float", LaunchError, "argument 2 is float64, the parameter floating of 4 bytes"),
        ("missing", LaunchError, "3 arguments for 4 parameters"),
        ("pointer", LaunchError, "argument 3 is a pointer, the parameter an integer of 8 bytes"),
        ("host", TypeError, "numpy.ndarray of shape"),
        (
            "input",
            StreamRace,
            "scaled<float> on stream .* is not ordered after a copy to the device on stream",
        ),
        ("copy", StreamRace, "a copy to the host on stream .* is not ordered after scaled<float> on stream"),
        ("temporary", StreamRace, "was freed while scaled<float> on stream .* may still use it"),
    ],
)
def test_planted_faults_are_found(cupy: ModuleType, fault: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        through(cupy, fault)
    forget_late()


@pytest.mark.parametrize("fault", ["event", "host_wait"])
def test_what_the_host_reads_too_early_is_unset(lazy: ModuleType, fault: str) -> None:
    """Nobody can watch the host read pinned memory: only work that runs late shows the fault."""
    assert not through(lazy, fault)
    forget_late()


@pytest.mark.parametrize("waits", [True, False])
def test_an_earlier_copy_does_not_pass_for_the_next(lazy: Any, waits: bool) -> None:
    array, host = lazy.zeros(N, np.uint8), pinned(lazy, N, np.uint8)
    for _ in range(2):
        array.get(out=host, blocking=False)
        if waits:
            lazy.cuda.Device().synchronize()
        assert (host == (0 if waits else 0xA5)).all()
    lazy.cuda.Device().synchronize()
    assert not host.any()


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_overwritten_before_it_is_copied(lazy: Any, waits: bool) -> None:
    host = pinned(lazy, N)
    host[:] = values()
    array = lazy.empty(N, np.float32)
    array.set(host)
    if waits:
        lazy.cuda.get_current_stream().synchronize()
    host[:] = 0
    assert np.array_equal(array.get(), values() if waits else host)


def test_pageable_memory_is_staged(cupy: Any) -> None:
    host = values()
    array = cupy.asarray(host)
    host[:] = 0
    assert np.array_equal(array.get(), values())
    array.set(host)
    host[:] = 1
    assert not array.get().any()


def test_random_work_begins_at_random() -> None:
    """Some seed finds what is overwritten too early, and some not."""
    seen = set()
    for seed in range(20):
        with standin.installed(policy="random", seed=seed) as cupy:
            host = pinned(cupy, 1)
            host[:] = 1
            array: Any = cupy.empty(1, np.float32)
            array.set(host)
            host[:] = 2
            seen.add(float(array.get()[0]))
    assert seen == {1, 2}


@pytest.mark.parametrize("waits", [True, False])
def test_the_array_interface_needs_a_host_that_has_waited(cupy: Any, waits: bool) -> None:
    array = cupy.zeros(8, np.float32)
    if waits:
        cupy.cuda.get_current_stream().synchronize()
        interface = array[2:].__cuda_array_interface__
        assert interface["data"] == (array.data.ptr + 8, False)
        assert (interface["shape"], interface["typestr"], interface["version"]) == ((6,), "<f4", 3)
        assert cupy.empty(0).__cuda_array_interface__["data"] == (0, False)
    else:
        with pytest.raises(StreamRace, match="before memset on the null stream was synchronized"):
            _ = array.__cuda_array_interface__


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_freed_while_it_is_copied(cupy: Any, waits: bool) -> None:
    array, host = cupy.zeros(N, np.float32), pinned(cupy, N)
    array.get(out=host, blocking=False)
    if waits:
        cupy.cuda.Device().synchronize()
    del host
    if waits:
        standin.check_late()
    else:
        with pytest.raises(StreamRace, match=r"pinned memory .* was freed while a copy to the host"):
            standin.check_late()


def test_memory_is_freed_in_the_order_of_its_stream(cupy: Any) -> None:
    other = cupy.cuda.Stream(non_blocking=True)
    array = cupy.zeros(8)
    other.wait_event(cupy.cuda.get_current_stream().record())
    with other:
        array.fill(1)
    cupy.cuda.get_current_stream().wait_event(other.record())
    del array
    standin.check_late()


def test_parts_of_an_allocation_are_apart(cupy: Any) -> None:
    one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    array = cupy.empty(8, np.float32)
    with one:
        array[:4] = 1
    with two:
        array[4:] = 2
        with pytest.raises(StreamRace, match=r"fill on stream .* is not ordered after fill on stream"):
            array[3:5] = 3
    cupy.cuda.Device().synchronize()
    assert array.get().tolist() == [1] * 4 + [2] * 4


def test_reads_need_no_order(cupy: Any) -> None:
    x, scaled = cupy.asarray(values()), kernel(cupy, "scaled<float>")
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.get_current_stream().synchronize()
    outs = []
    for stream in streams:
        with stream:
            outs.append(cupy.empty(N, np.float32))
            scaled((8,), (128,), (x, outs[-1], np.float32(2), N))
    with pytest.raises(StreamRace):
        x.fill(0)
    for stream, out in zip(streams, outs, strict=True):
        assert np.array_equal(out.get(stream), 2 * values())


def test_blocking_streams_and_the_null_stream_wait_for_each_other(cupy: Any) -> None:
    array, stream = cupy.empty(4, np.float32), cupy.cuda.Stream()
    array.fill(1)
    with stream:
        array[:2] = 2
    array[1:3] = 3
    del stream
    array[0:1] = 4
    assert array.get().tolist() == [4, 3, 3, 1]


def test_work_of_a_stream_that_is_gone_is_done(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = cupy.zeros(4, np.float32)
    ptr = stream.ptr
    del stream
    with pytest.raises(CUDARuntimeError, match="cudaErrorInvalidResourceHandle"):
        cupy.cuda.runtime.memsetAsync(array.data.ptr, 0, 4, ptr)
    cupy.cuda.Stream()
    cupy.cuda.Device().synchronize()
    assert array.get().tolist() == [0] * 4


def test_long_chains_of_waits(lazy: Any) -> None:
    one, two = (lazy.cuda.Stream(non_blocking=True) for _ in range(2))
    array = lazy.empty(1, np.float32)
    for value in range(3000):
        with one:
            array.fill(value)
        two.wait_event(one.record())
        one.wait_event(two.record())
    assert array.get(one).tolist() == [2999]


def test_polling_ends(cupy: Any, policy: str) -> None:
    array, host = cupy.zeros(4, np.float32), pinned(cupy, 4)
    array.get(out=host, blocking=False)
    event = cupy.cuda.get_current_stream().record()
    assert policy != "lazy" or not event.done
    for _ in range(4):
        event.done  # noqa: B018 (asking lets work go on)
    assert event.done
    assert cupy.cuda.get_current_stream().done
    assert not host.any()
    _ = array.__cuda_array_interface__


def test_elapsed_time(lazy: Any) -> None:
    start, stop = lazy.cuda.Event(), lazy.cuda.Event()
    with pytest.raises(CUDARuntimeError, match="cudaErrorInvalidResourceHandle"):
        lazy.cuda.get_elapsed_time(start, stop)
    start.record()
    stop.record()
    with pytest.raises(CUDARuntimeError, match="cudaErrorNotReady"):
        lazy.cuda.get_elapsed_time(start, stop)
    stop.synchronize()
    assert 0 <= lazy.cuda.get_elapsed_time(start, stop) < 1e4


def test_current_streams(lazy: Any) -> None:
    one, two = lazy.cuda.Stream(), lazy.cuda.Stream(non_blocking=True)
    current = lazy.cuda.get_current_stream
    assert current() == lazy.cuda.Stream.null == lazy.cuda.Stream(null=True)
    assert one.use() is one
    with two as entered:
        assert entered is two is current()
    assert current() == lazy.cuda.Stream.null


def test_threads_have_streams_of_their_own(cupy: Any) -> None:
    def work(value: int) -> list[float]:
        assert cupy.cuda.get_current_stream() == cupy.cuda.Stream.null
        with cupy.cuda.Stream(non_blocking=True):
            array = cupy.empty(4, np.float32)
            for _ in range(50):
                array.fill(value)
            return array.get().tolist()

    with cupy.cuda.Stream(), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [[value] * 4 for value in range(8)]


def test_views_and_assignments(cupy: Any) -> None:
    array, mirror = cupy.zeros((4, 6), np.int32), np.zeros((4, 6), np.int32)
    for a in (array, mirror):
        a[1:3] = 7
        a[2, 1:5:2] = np.int32(9)
        a[0] = a[2]
        a[3].fill(2)
        a.reshape(-1)[:6].view(np.uint8)[::4] = 255
    array[1:2] = cupy.asarray(np.arange(6, dtype=np.float64))
    mirror[1:2] = np.arange(6)
    assert np.array_equal(array.get(), mirror)
    assert np.array_equal(array[1:, ::2].get(), mirror[1:, ::2])
    assert array[1, 2].shape == ()
    assert array.reshape((2, 12)).shape == array.reshape(2, 12).shape == (2, 12)
    for name in ("shape", "dtype", "size", "nbytes", "itemsize", "ndim", "strides"):
        assert getattr(array[1:, ::2], name) == getattr(mirror[1:, ::2], name)
    assert (len(array), array.flags.c_contiguous, array[:, 1:].flags.c_contiguous) == (4, True, False)
    assert array[1:].data.ptr == array.data.ptr + 24 == int(array.data + 24)
    assert array.data.ptr % 256 == 0
    with pytest.raises(IndexError):
        array[4]
    with pytest.raises(ValueError, match="broadcast"):
        array[0] = cupy.empty(5, np.int32)


def test_new_memory_is_unset(cupy: Any) -> None:
    assert (cupy.empty(5, np.uint8).get() == 0xA5).all()
    assert (pinned(cupy, 5, np.uint8) == 0xA5).all()


def test_set_and_get(cupy: Any) -> None:
    array, host = cupy.empty(N, np.float32), pinned(cupy, 2 * N)[N:]
    array.set(values())
    assert array.get(out=host) is host
    assert np.array_equal(host, values())
    assert np.array_equal(cupy.asnumpy(array, out=np.empty(N, np.float32)), values())
    assert cupy.asarray(array) is array
    assert cupy.empty(0).get().shape == (0,)
    for wrong, error in (([1], TypeError), (np.zeros(N), TypeError), (np.zeros(3, np.float32), ValueError)):
        with pytest.raises(error):
            array.set(wrong)
    for wrong, error in ((np.zeros(N), TypeError), (np.zeros(3, np.float32), ValueError)):
        with pytest.raises(error):
            array.get(out=wrong)


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        np.exp,
        iter,
        bool,
        float,
        lambda a: a < 1,
        lambda a: a + np.ones(3),
        lambda a: np.ones(3) * a,
        lambda a: a.__iadd__(np.ones(3)),
        lambda a: a[a > 0],
        lambda a: np.copyto(np.ones(3), a),
        lambda a: a[np.array([1])],
        lambda a: a.fill(np.ones(3)),
        lambda a: a.__setitem__(slice(0, 3), np.ones(3)),
    ],
)
def test_arrays_do_not_become_numpy_by_themselves(lazy: Any, use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        use(lazy.zeros(3))


def test_nothing_else_is_offered(lazy: Any) -> None:
    assert (lazy.__version__, lazy.standin) == ("14.2.0", True)
    for thing, name in (
        (lazy, "abs"),
        (lazy, "ElementwiseKernel"),
        (lazy.cuda, "Graph"),
        (lazy.cuda.runtime, "malloc"),
        (lazy.zeros(3), "__dlpack__"),
        (lazy.zeros(3), "cumsum"),
        (lazy.zeros(3).flags, "writeable"),
    ):
        with pytest.raises(AttributeError):
            getattr(thing, name)
    with pytest.raises(ImportError):
        import cupy.linalg  # noqa: F401


# What arrays compute.


def softmax(xp: Any, x: Any, y: Any) -> dict[str, Any]:
    """Return what these operations give with NumPy and with CuPy."""
    found = {}
    hidden = xp.maximum(x @ y + x[0, 0], 0)
    hidden -= hidden.max(axis=1, keepdims=True)
    found["log"] = hidden - xp.log(xp.exp(hidden).sum(axis=1, keepdims=True))
    found["masked"] = (2 - hidden) * (hidden > -1) / 3
    rows = xp.arange(len(x)), hidden.argmax(axis=1)
    hidden[rows] *= 0.5
    hidden[rows[0][:2], rows[1][:2]] = 7
    found["picked"] = hidden[rows]
    out = xp.zeros_like(y)
    xp.matmul(x.T, hidden, out=out)
    found["out"] = out
    found["sum"] = found["log"].sum(axis=0, out=out[0])
    found["part"] = (rows[1] == 1).mean()
    found["bits"] = (x.view("uint32") & 0x7FFFFFFF) + 1
    x += np.float32(2) * x
    return {**found, "x": x}


def test_arrays_compute_what_numpy_does(cupy: Any) -> None:
    x, y = values(24).reshape(6, 4), values(16).reshape(4, 4)
    found = softmax(cupy, cupy.asarray(x), cupy.asarray(y))
    for name, right in softmax(np, x, y).items():
        assert (found[name].dtype, found[name].shape) == (right.dtype, right.shape), name
        assert np.array_equal(found[name].get(), right), name
    assert float(found["part"]) == float(found["part"].get())
    assert int(found["bits"].max()) == np.abs(values(24)).max().view(np.uint32) + 1


def test_order_statistics(cupy: Any) -> None:
    x = cupy.asarray(values())
    assert float(cupy.partition(x, 700)[700]) == np.sort(values())[700]
    assert np.array_equal(cupy.flatnonzero(x > 1).get(), np.flatnonzero(values() > 1))
    with pytest.raises(ValueError):
        cupy.partition(x, N)


def test_arithmetic_is_done_in_order(cupy: Any) -> None:
    one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with one:
        x = cupy.asarray(values())
        y = x * 2
    with two:
        with pytest.raises(StreamRace, match=r"add on stream .* is not ordered after multiply on stream"):
            y + 1
        two.wait_event(one.record())
        z = y + 1
    with one, pytest.raises(StreamRace, match=r"subtract on stream .* is not ordered after add on stream"):
        y -= x
    assert np.array_equal(z.get(two), values() * 2 + 1)
    del x, y, z
    forget_late()


def test_arithmetic_that_is_refused(lazy: Any) -> None:
    x, whole = lazy.zeros((3, 4), np.float32), lazy.zeros(4, np.int32)
    with pytest.raises(TypeError, match=r"Unsupported type <class 'numpy\.ndarray'>"):
        lazy.maximum(x, np.zeros(4))
    with pytest.raises(TypeError, match="Unsupported type"):
        lazy.exp(1.0)
    with pytest.raises(TypeError):
        whole += 0.5
    with pytest.raises(TypeError):
        x.sum(axis=0, out=np.zeros(4, np.float32))
    with pytest.raises(ValueError):
        x.sum(axis=1, out=x[0])
    with pytest.raises(ValueError):
        x + whole[:3]
    x[whole + 3, whole] = 1
    with pytest.raises(IndexError):
        lazy.cuda.Device().synchronize()


def test_a_script_gets_the_stand_in(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, cupy, beside\nprint(cupy.standin, sys.argv[1], beside.x.get()[1])")
    (tmp_path / "beside.py").write_text("import cupy\nx = cupy.arange(3)")
    run = Path(__file__).parent / "cudasim" / "run.py"
    command = [sys.executable, str(run), str(script), "--option"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True", "--option", "1"], done.stderr


def test_installed_for_a_while() -> None:
    before = sys.modules.get("cupy")
    with standin.installed():
        import cupy.cuda.compiler
        import cupy.cuda.memory
        import cupy.cuda.runtime

        assert cupy.standin
        assert issubclass(cupy.cuda.compiler.CompileException, Exception)
        assert cupy.cuda.memory.OutOfMemoryError is OutOfMemoryError
        assert cupy.cuda.runtime.CUDARuntimeError is CUDARuntimeError
        with pytest.raises(RuntimeError, match="installed already"):
            standin.install()
    assert sys.modules.get("cupy") is before
    with pytest.raises(RuntimeError, match="not installed"):
        standin.zeros(3)


def test_errors_found_late_end_the_context() -> None:
    def forgetful() -> None:
        with standin.installed() as cupy:
            with cupy.cuda.Stream(non_blocking=True):
                array: Any = cupy.empty(3)
            array.fill(1)
            del array

    with pytest.raises(StreamRace, match="freed"):
        forgetful()


# Kernels.


def test_arguments(cupy: Any) -> None:
    total, counted = cupy.zeros(1, np.uint32), kernel(cupy, "counted")
    x = cupy.asarray(values())
    counted((1,), (64,), (x, total, np.float32(0), np.int32(N)))
    counted((0,), (64, 1), (x.data, total.data.ptr, np.array([0], np.float32), np.int32(N)), shared_mem=64)
    counted((1,), (64,), (None, total, np.float32(0), np.int32(N)))
    assert total.get().tolist() == [2 * (values() >= 0).sum()]
    pair, out = np.array((2, 0.5), [("a", np.int32), ("b", np.float32)]), cupy.empty(1, np.float32)
    kernel(cupy, "paired")((1,), (1,), (pair, out))
    assert out.get().tolist() == [2.5]
    doubles = cupy.zeros(4)
    kernel(cupy, "scaled<double>")((1,), (4,), (cupy.asarray(np.arange(4.0)), doubles, 2.5, 4))
    assert doubles.get().tolist() == [0, 2.5, 5, 7.5]
    for grid, arguments, error in (
        ([1], (x, total, np.float32(0), np.int32(N)), TypeError),
        ((1,), (x, 12345, np.float32(0), np.int32(N)), LaunchError),
        ((1,), (x, np.float32(1), np.float32(0), np.int32(N)), LaunchError),
        ((1,), (x, total, np.float32(0), np.float32(N)), LaunchError),
        ((1,), (x, total, "0", np.int32(N)), TypeError),
    ):
        with pytest.raises(error):
            counted(grid, (64,), arguments)


def test_in_place(cupy: Any) -> None:
    x = cupy.asarray(values())
    kernel(cupy, "scaled<float>")((8,), (128,), (x, x, np.float32(2), N))
    assert np.array_equal(x.get(), 2 * values())
    x[1:] = x[:-1]
    assert np.array_equal(x.get()[1:], 2 * values()[:-1])


def test_work_holds_bytes_not_arrays(lazy: Any) -> None:
    out = lazy.empty(N, np.float32)
    kernel(lazy, "scaled<float>")((8,), (128,), (lazy.asarray(values()), out, np.float32(2), N))
    assert lazy.get_default_memory_pool().used_bytes() == 4096
    assert np.array_equal(out.get(), 2 * values())


def test_refused_launches_show_when_they_run(lazy: Any) -> None:
    kernel(lazy, "scaled<float>")((1,), (256,), (None, None, np.float32(2), 0))
    with pytest.raises(LaunchError, match="scaled<float>"):
        lazy.cuda.Device().synchronize()


@pytest.mark.parametrize("name", ["scaled<int>", "mangled", "nothing"])
def test_names_that_a_module_lacks(lazy: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match="named symbol not found"):
        kernel(lazy, name)


def test_includes(lazy: Any, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "deep.cuh").write_text("#pragma once\nconstexpr unsigned DEEP = 40;\n")
    (inner / "near.cuh").write_text('#include "deep.cuh"\n#include <cuda_fp16.h>\n')
    code = """#include "near.cuh"
    #include "deep.cuh"
    extern "C" __global__ void put(unsigned* out) { out[0] = DEEP + MORE + (__LINE__ == 3); }
    """
    options = (*OPTIONS, f"-I{tmp_path}", f"-I{inner}", "-DMORE=1")
    out = lazy.empty(1, np.uint32)
    lazy.RawModule(code=code, options=options).get_function("put")((1,), (1,), (out,))
    assert out.get().tolist() == [42]
    for wrong in (options[:1], (*options, "-unknown")):
        with pytest.raises(lazy.cuda.compiler.CompileException):
            lazy.RawModule(code=code, options=wrong).get_function("put")


@pytest.mark.parametrize("n", [N, N + 1])
def test_address_sanitizer_guards_arrays(n: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, SOURCE, str(N), str(n)],
        cwd=Path(__file__).parent,
        env=cudasim.preload("asan"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (0 if n == N else cudasim.FOUND), done.stderr
    assert n == N or "rawmodule.cu:5" in done.stderr


# The runtime, devices and memory.


def test_copies_between_addresses(cupy: Any) -> None:
    runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
    array = cupy.ndarray((N,), np.float32, cupy.cuda.MemoryPointer(cupy.cuda.Memory(4 * N), 0))
    host, back, pageable = values(), pinned(cupy, N), np.zeros(N, np.float32)
    runtime.memcpyAsync(array.data.ptr, host.ctypes.data, 4 * N, runtime.memcpyHostToDevice, stream.ptr)
    host[:] = 0
    runtime.memsetAsync(array.data.ptr + 4, 0, 4, stream.ptr)
    runtime.memcpyAsync(array.data.ptr, array.data.ptr + 4, 4, runtime.memcpyDeviceToDevice, stream.ptr)
    runtime.memcpyAsync(back.ctypes.data, array.data.ptr, 4 * N, runtime.memcpyDeviceToHost, stream.ptr)
    runtime.memcpyAsync(pageable.ctypes.data, array.data.ptr, 4 * N, runtime.memcpyDeviceToHost, stream.ptr)
    with pytest.raises(StreamRace, match="a copy to the device on the null stream is not ordered after"):
        runtime.memcpyAsync(array.data.ptr, host.ctypes.data, 4, runtime.memcpyHostToDevice, 0)
    stream.synchronize()
    assert np.array_equal(back, pageable)
    assert np.array_equal(back, np.concatenate([[0, 0], values()[2:]]))
    for size, kind, to in ((4 * N + 1, 1, stream.ptr), (4, 2, stream.ptr), (4, 9, stream.ptr), (4, 1, 77)):
        with pytest.raises(CUDARuntimeError):
            runtime.memcpyAsync(array.data.ptr, host.ctypes.data, size, kind, to)


def test_out_of_memory(lazy: Any) -> None:
    pool = lazy.get_default_memory_pool()
    pool.set_limit(size=4096)
    array = lazy.empty(700, np.float32)
    assert pool.used_bytes() == 3072
    with pytest.raises(OutOfMemoryError, match="limit set to: 4,096 bytes"):
        lazy.empty(700, np.float32)
    del array
    assert pool.used_bytes() == 0
    array = lazy.empty(700, np.float32)
    free, total = lazy.cuda.Device().mem_info
    assert total - free == array.nbytes == 2800
    with pytest.raises(CUDARuntimeError, match="cudaErrorMemoryAllocation"):
        lazy.cuda.Memory(total)


def test_allocators(lazy: Any) -> None:
    sizes = []

    def allocator(size: int) -> Any:
        sizes.append(size)
        return lazy.cuda.MemoryPointer(lazy.cuda.Memory(size), 0)

    default = lazy.cuda.get_allocator()
    lazy.cuda.set_allocator(lazy.cuda.MemoryPool(allocator).malloc)
    assert lazy.zeros(3, np.uint8).get().tolist() == [0] * 3
    lazy.cuda.set_allocator(default)
    assert lazy.empty(5).data.mem.size == 40
    assert (sizes, standin.allocations) == ([3], 2)


def test_no_device() -> None:
    with standin.installed(devices=0) as cupy:
        cuda: Any = cupy.cuda
        assert cuda.runtime.runtimeGetVersion() == 13020
        for use in (cuda.runtime.getDeviceCount, cuda.Stream, cuda.Event, cuda.Device, lambda: cupy.empty(1)):
            with pytest.raises(CUDARuntimeError, match="cudaErrorNoDevice: ") as caught:
                use()
            assert caught.value.status == 100


def test_two_devices(policy: str) -> None:
    with standin.installed(policy=policy, devices=2) as cupy:
        cuda: Any = cupy.cuda
        assert cuda.runtime.getDeviceCount() == 2
        with cuda.Device(1) as device:
            array: Any = cupy.zeros(4, np.float32)
            stream = cuda.Stream()
            assert array.device == device == cuda.Device()
            assert array.device.id == cuda.runtime.getDevice() == 1
        assert cuda.runtime.getDevice() == 0
        with pytest.raises(RuntimeError, match="does not match with the current device"):
            stream.use()
        with pytest.raises(CUDARuntimeError, match="cudaErrorIllegalAddress"):
            array.fill(1)
        with pytest.raises(CUDARuntimeError, match="cudaErrorInvalidDevice"):
            cuda.Device(2).use()
        assert cuda.Device(0).attributes["MultiProcessorCount"] == 4
        assert cuda.Device(0).compute_capability == "90"


def test_cupy_has_what_the_stand_in_offers() -> None:
    names = []
    for module, offered in standin.MODULES.items():
        for name, value in offered.items():
            path = ".".join([*module.split(".")[1:], name])
            names.append(path)
            if isinstance(value, type) and not issubclass(value, Exception):
                names += [f"{path}.{member}" for member in dir(value) if not member.startswith("_")]
    for mine in ("standin", "cuda.Memory.block"):
        names.remove(mine)
    done = subprocess.run(
        [sys.executable, "-c", SURFACE, *names], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        pytest.skip("needs cupy-cuda13x, or another CuPy 14 or 15, to compare with")
    assert done.stdout.split() == []
