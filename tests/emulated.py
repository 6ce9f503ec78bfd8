"""Whether this machine can have an emulated cluster, found without the code under test."""

from __future__ import annotations

import os
import subprocess

import namespaces
import pytest
from namespaces import LabError

PROBE = """
ip netns add $0 && ip -n $0 link add name bridge0 type bridge && ip -n $0 link add name port type veth &&
tc -n $0 qdisc add dev port root tbf rate 1gbit burst 128k limit 1m &&
ip netns exec $0 unshare --uts sh -c 'hostname probe && mount -t tmpfs tmpfs /dev/shm'
failed=$?; ip netns delete $0 2>/dev/null; exit $failed
"""


def skip_without_namespaces() -> None:
    """Skip the test, and say why, where network namespaces cannot be made."""
    try:
        namespaces.require()
    except LabError as error:
        pytest.skip(str(error))
    command = ["sh", "-c", PROBE, f"probe-{os.getpid()}"]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.strip()}")
