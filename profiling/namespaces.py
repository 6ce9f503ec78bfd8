"""Network namespaces named after the process that they belong to, so that none is ever left for good."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from mpitopk.errors import MpiTopkError

FOLDER = Path("/run/netns")
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2 (Fedora: iproute-tc)",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}


class LabError(MpiTopkError, RuntimeError):
    """The emulated cluster cannot be made or used."""


def call(*command: str) -> str:
    """Return what a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"`{shlex.join(command)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


def require() -> None:
    """Raise unless this machine and user can have namespaces."""
    if sys.platform != "linux":
        raise LabError(f"network namespaces need Linux, and this is {sys.platform}")
    if os.geteuid():
        raise LabError("only root may make network namespaces: use sudo, or root in a privileged container")
    for tool, package in PACKAGES.items():
        if not shutil.which(tool):
            raise LabError(f"{tool} is missing: install the package {package}")


def new_prefix() -> str:
    """Return how the names of one lab of this process begin."""
    return f"netlab-{os.getpid()}-{secrets.token_hex(3)}-"


def existing(prefix: str) -> list[str]:
    """Return the names that begin so."""
    return sorted(path.name for path in FOLDER.glob(f"{prefix}*")) if FOLDER.exists() else []


def add(name: str) -> None:
    """Make one."""
    try:
        call("ip", "netns", "add", name)
    except LabError as error:
        raise LabError(f"no network namespaces here; a container must be privileged: {error}") from None


def remove(name: str) -> None:
    """End what runs there, and remove it, with its network interfaces."""
    with contextlib.suppress(LabError):  # another lab that has just started may be removing it, too
        for _ in range(500):
            if not (pids := call("ip", "netns", "pids", name).split()):
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.01)
    with contextlib.suppress(LabError):
        call("ip", "netns", "delete", name)
    if (FOLDER / name).exists():
        raise LabError(f"the namespace {name} cannot be removed: try `ip netns delete {name}`")


def remove_dead() -> None:
    """Remove those of labs whose process is dead."""
    for name in existing("netlab-"):
        owner = re.fullmatch(r"netlab-(\d+)-[0-9a-f]{6}-\w+", name)
        if owner and not Path("/proc", owner[1]).exists():
            remove(name)
