"""Where gradients live and work is done: the same operations on every device."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path

from mpitopk.device.base import Device
from mpitopk.device.reference import ReferenceDevice
from mpitopk.errors import ConfigError, DeviceError, nearest

try:
    from mpitopk.device.host import HostDevice
except ImportError as error:
    WHY_NOT_COMPILED = str(error)
    if (Path(__file__).parents[2] / "meson.build").exists():
        WHY_NOT_COMPILED = "imported from its sources: start Python in another folder, after pip install"
else:
    WHY_NOT_COMPILED = ""

NAMES = ("auto", "host", "numpy", "cuda", "cupy")


@cache
def why_no_gpu() -> str:
    """Return why no GPU can be used here, or nothing if a kernel has run on one."""
    if find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'mpitopk[cuda13]'"
    try:
        from mpitopk.device import cuda
    except Exception as error:  # whatever a CuPy that does not fit its surroundings raises
        return f"CuPy cannot be imported: {error}"
    return cuda.usable()


def open_device(name: str, threads: int, local_rank: int = 0) -> Device:
    """Return a device by name; `local_rank`: of this rank among those of its node.

    "auto" is a GPU for a program that has imported CuPy, if a kernel runs on one, since its gradients will
    be there; that CuPy is installed says nothing of them. Otherwise it is the better device of the host.

    Raises
    ------
    ConfigError
        If there is no device of that name, or the threads are not a number from 1.
    DeviceError
        If "host" is asked for where the kernels were not compiled, or a GPU where none is usable.
    """
    if name not in NAMES:
        raise ConfigError(f"device is {name!r}: {nearest(str(name), NAMES)}")
    if not isinstance(threads, Integral) or threads < 1:
        raise ConfigError(f"threads is {threads!r}: give a whole number from 1")
    if name == "auto":
        on_gpu = "cupy" in sys.modules and not why_no_gpu()
        name = "cuda" if on_gpu else "numpy" if WHY_NOT_COMPILED else "host"
    if name in ("cuda", "cupy"):
        why_not = why_no_gpu()
        if why_not:
            raise DeviceError(f"no GPU can be used here ({why_not}): take device='host'")
        from mpitopk.device import cuda

        cuda.use_device_of(local_rank)
        if name == "cuda":
            return cuda.CudaDevice()
        from mpitopk.device.partition import PartitionDevice

        return PartitionDevice()
    if name == "numpy":
        return ReferenceDevice()
    if WHY_NOT_COMPILED:
        raise DeviceError(
            f"the compiled kernels are missing ({WHY_NOT_COMPILED}): install a C++ compiler and "
            'build again, or take device="numpy"'
        )
    return HostDevice(threads)
