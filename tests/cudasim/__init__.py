"""CUDA C++ kernels on a processor: the .cu file compiled by g++ and really executed, without a GPU.

`Module(source, names).launch(name, grid, block, arguments)` runs a kernel on NumPy arrays. It is strict
where a GPU is silent: about barriers and warps that diverge, masks, launch limits, and the number and
width of arguments. Shared memory starts as 0xA5. Five lanes build the same source:

=====  ==============================================================================================
fast   optimised
check  undefined behaviour (UBSan), with threads interrupted at atomics
asan   what `check` has, and accesses out of bounds, those to shared memory included
tsan   races: within a warp, a block, or between blocks; a missing fence
count  optimised; `traffic` tells what each launch has loaded from global memory and stored there
=====  ==============================================================================================

Two need the sanitizer's library loaded first: `preload(lane)` gives the environment to start Python in.
A process uses one lane. Nothing here tells of speed, occupancy, or what NVRTC makes of the source.
"""

from __future__ import annotations

import ctypes as c
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).parent
LANES = ("fast", "check", "asan", "tsan", "count")
ORDERS = ("forward", "backward", "shuffled")

CHECKED = ["-O1", "-g", "-DCUDASIM_CHECKED", "-fno-omit-frame-pointer"]
FLAGS = {
    "fast": ["-O2"],
    "check": [*CHECKED, "-fsanitize=undefined", "-fno-sanitize-recover=undefined"],
    "asan": [*CHECKED, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "tsan": CHECKED,
    "count": ["-O2"],
}
INSTRUMENTED = {
    "tsan": ["-fsanitize=thread", "-Wno-tsan"],
    "count": ["-fsanitize=thread", "-Wno-tsan", "-U__SANITIZE_THREAD__", "-nodefaultlibs"],
}
"""For kernels, not for what runs them; `count` brings a library of its own, count.hpp."""

FOUND = 66
"""What a process that `preload` has prepared exits with where a sanitizer has found something."""

SUFFIXES = (".hpp", ".cuh")
LIBRARIES = {"asan": "libasan.so", "tsan": "libtsan.so"}

KERNEL = re.compile(
    r"__global__\s+void\s+(?:__launch_bounds__\s*\(\s*(?P<threads>\w+)[^)]*\)\s*)?(?P<name>\w+)\s*\("
)
DYNAMIC = re.compile(r"extern\s+__shared__\s+(?P<type>[\w:\s]+?)\s+(?P<name>\w+)\s*\[\s*\]\s*;")


SECTOR = 32
"""Bytes that move together between a GPU's memory and its caches."""


class Traffic(NamedTuple):
    """Bytes of the memory its arguments point to that a launch has loaded and stored; an atomic does both.

    However often a launch loads a byte, it counts once, and so it does when stored. This is what moves
    between a GPU's memory and its L2, at least; no more does if what several blocks use stays in there,
    as tables of some KiB will. A second pass over all the data would not: `by_blocks` counts that.
    """

    kernel: str
    loaded: int
    stored: int
    sectors: int
    """Loaded and stored, with the rest of the sectors that these bytes lie in."""

    by_blocks: int
    """Loaded and stored, where a byte counts once for each block that uses it."""


traffic: list[Traffic] = []
"""Of the launches in the lane `count`, in the order in which they ran."""


class LaunchError(RuntimeError):
    """A launch that a GPU would refuse, or that would hang there or be undefined."""


def translate(source: str, names: Sequence[str], path: str = "kernels.cu") -> str:
    """Return the source with dynamic shared memory as a pointer, and the named kernels registered.

    Names are those that NVRTC takes: of a kernel, or of an instance of a template, `scan<float>`.
    """
    bounds = {m["name"]: m["threads"] or "1024" for m in KERNEL.finditer(source)}
    lines = []
    for number, name in enumerate(names):
        kernel = name.split("<")[0].strip()
        if kernel not in bounds:
            raise LaunchError(f"there is no kernel {kernel!r}")
        lines.append(f"CUDASIM_KERNEL({number}, {bounds[kernel]}, {name})")

    def pointer(match: re.Match[str]) -> str:
        kind, name = match["type"], match["name"]
        return f"{kind}* {name} = static_cast<{kind}*>(cudasim::cudasim_dynamic_shared());"

    return "\n".join([f'#line 1 "{path}"', DYNAMIC.sub(pointer, source), *lines, "CUDASIM_TABLE", ""])


def preload(lane: str) -> dict[str, str]:
    """Return the environment in which Python can load what was built for a lane."""
    environment = dict(os.environ)
    if lane in LIBRARIES:
        found = subprocess.run(
            [_compiler(), f"-print-file-name={LIBRARIES[lane]}"], capture_output=True, text=True, check=True
        )
        environment["LD_PRELOAD"] = found.stdout.strip()
    environment["ASAN_OPTIONS"] = f"detect_leaks=0:exitcode={FOUND}"
    environment["UBSAN_OPTIONS"] = f"halt_on_error=1:exitcode={FOUND}"
    environment["TSAN_OPTIONS"] = f"{environment['UBSAN_OPTIONS']}:suppressions={HERE / 'tsan.supp'}"
    return environment


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _command(lane: str) -> list[str]:
    plain = ["-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing"]
    return [_compiler(), *plain, "-Wall", "-Wno-unknown-pragmas", *FLAGS[lane]]


def _built(command: list[str], text: str, include: Sequence[str | Path] = ()) -> Path:
    """Return the library that a command makes of a source text, built once per content."""
    folders = [HERE, *map(Path, include)]
    paths = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES]
    headers = "".join(path.read_text() for path in paths)
    digest = hashlib.sha256("\0".join([*command, text, headers]).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("CUDASIM_CACHE", Path(tempfile.gettempdir()) / f"cudasim-{os.getuid()}"))
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, made = Path(scratch) / "source.cpp", Path(scratch) / "made.so"
            source.write_text(text)
            done = subprocess.run([*command, str(source), "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                raise LaunchError(f"the kernels do not compile:\n{done.stderr}")
            made.replace(library)
    return library


@cache
def _scheduler(lane: str) -> c.CDLL:
    command = [*_command(lane), f"-DCUDASIM_{lane.upper()}_LANE", f"-I{HERE}"]
    library = c.CDLL(str(_built(command, (HERE / "scheduler.cpp").read_text())), mode=c.RTLD_GLOBAL)
    library.cudasim_find.restype = c.c_void_p
    library.cudasim_find.argtypes = [c.c_void_p, c.c_char_p]
    library.cudasim_kinds.restype, library.cudasim_kinds.argtypes = c.c_char_p, [c.c_void_p]
    library.cudasim_sizes.restype = c.POINTER(c.c_uint)
    library.cudasim_sizes.argtypes = [c.c_void_p]
    three = c.c_uint * 3
    library.cudasim_launch.argtypes = [
        c.c_void_p, three, three, c.c_size_t, c.POINTER(c.c_void_p), c.c_char_p, c.c_size_t
    ]  # fmt: skip
    if lane == "count":
        library.cudasim_count.argtypes = [c.POINTER(c.c_size_t), c.c_uint]
        library.cudasim_counted.restype = c.POINTER(c.c_ulonglong)
    return library


class Module:
    """The kernels of a source text.

    Parameters
    ----------
    source : str
        CUDA C++.
    names : sequence of str
        The kernels that will be launched, instances of templates as `name<arguments>`.
    lane : {"fast", "check", "asan", "tsan", "count"}
    defines : sequence of str
        Macros to define.
    path : str
        The file's name in messages.
    include : sequence of path
        Folders of headers.
    """

    def __init__(
        self,
        source: str,
        names: Sequence[str],
        lane: str = "fast",
        *,
        defines: Sequence[str] = (),
        path: str = "kernels.cu",
        include: Sequence[str | Path] = (),
    ) -> None:
        self._lane, self._scheduler = lane, _scheduler(lane)
        command = [*_command(lane), *INSTRUMENTED.get(lane, ()), "-include", "cuda.hpp"]
        command += [f"-I{folder}" for folder in (HERE, HERE / "include", *include)]
        command += [f"-D{macro}" for macro in defines]
        self._library = c.CDLL(str(_built(command, translate(source, names, path), include)))
        self._library.cudasim_table.restype = c.c_void_p

    def configure(self, *, workers: int = 0, order: str = "forward", seed: int = 1, yields: int = 0) -> None:
        """Set how blocks and threads are scheduled, from the next launch of any module on.

        Parameters
        ----------
        workers : int
            Blocks that run at a time; by default as many as there are processors.
        order : {"forward", "backward", "shuffled"}
            Which of the threads that can go on does.
        seed : int
            Of the shuffled order.
        yields : int
            After how many of 1000 atomics another thread goes on, in the checked lanes.
        """
        self._scheduler.cudasim_configure(workers, ORDERS.index(order), seed, yields)

    def signature(self, name: str) -> list[tuple[str, int]]:
        """Return kind and bytes of each parameter: R pointer to const, P pointer, f, i, or s (other)."""
        kernel = self._find(name)
        kinds = self._scheduler.cudasim_kinds(kernel).decode()
        sizes = self._scheduler.cudasim_sizes(kernel)[: len(kinds)]
        return list(zip(kinds, sizes, strict=True))

    def launch(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        arguments: Sequence[np.ndarray | np.generic | None],
        shared: int = 0,
    ) -> None:
        """Run a kernel to its end.

        Parameters
        ----------
        name : str
            One of the module's names.
        grid, block : int or up to three of them
        arguments : sequence
            Arrays for pointers, None for null, NumPy scalars of the very type for everything else.
        shared : int
            Bytes of dynamic shared memory.

        Raises
        ------
        LaunchError
            If the arguments do not fit, or the kernel does what it must not.
        """
        words = self._words(name, arguments)
        pointers = (c.c_void_p * max(1, len(words)))(*[c.addressof(word) for word in words])
        message = c.create_string_buffer(1024)
        sizes = [_three(grid), _three(block)]
        if self._lane == "count":
            ranges = _ranges([x for x in arguments if isinstance(x, np.ndarray) and x.size])
            self._scheduler.cudasim_count((c.c_size_t * len(ranges))(*ranges), len(ranges) // 2)
        if self._scheduler.cudasim_launch(self._find(name), *sizes, shared, pointers, message, len(message)):
            raise LaunchError(f"{name}: {message.value.decode()}")
        if self._lane == "count":
            traffic.append(Traffic(name, *self._scheduler.cudasim_counted()[:4]))

    def _find(self, name: str) -> int:
        kernel: int | None = self._scheduler.cudasim_find(self._library.cudasim_table(), name.encode())
        if kernel is None:
            raise LaunchError(f"there is no kernel {name!r} in the module")
        return kernel

    def _words(
        self, name: str, arguments: Sequence[np.ndarray | np.generic | None]
    ) -> list[c.Array[c.c_char]]:
        signature = self.signature(name)
        if len(arguments) != len(signature):
            raise LaunchError(f"{name}: {len(arguments)} arguments for {len(signature)} parameters")
        words = []
        for number, (argument, (kind, size)) in enumerate(zip(arguments, signature, strict=True)):
            pointer = argument is None or isinstance(argument, np.ndarray)
            given = f"{name}: argument {number} is {'an array' if pointer else argument.dtype}"
            if pointer != (kind in "RP"):
                raise LaunchError(f"{given}, the parameter {'a pointer' if kind in 'RP' else 'a value'}")
            if pointer:
                address = 0 if argument is None else argument.ctypes.data
                words.append(c.create_string_buffer(address.to_bytes(8, "little"), 16))
                continue
            floating = argument.dtype.kind == "f"
            if kind in "fi" and (floating != (kind == "f") or argument.itemsize != size):
                expected = "floating" if kind == "f" else "an integer"
                raise LaunchError(f"{given}, the parameter {expected} of {size} bytes")
            words.append(c.create_string_buffer(argument.tobytes(), max(16, size)))
        return words


def _three(size: int | Sequence[int]) -> c.Array[c.c_uint]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (c.c_uint * 3)(*(*sizes, 1, 1)[:3])


def _ranges(arrays: Sequence[np.ndarray]) -> list[int]:
    """Return where memory that the arrays cover begins and ends, in turns; it begins with a sector."""
    ranges: list[int] = []
    for address, size in sorted((x.ctypes.data, x.nbytes) for x in arrays):
        begin, end = address - address % SECTOR, address + size
        if ranges and begin <= ranges[-1]:
            ranges[-1] = max(ranges[-1], end)
        else:
            ranges += [begin, end]
    return ranges
