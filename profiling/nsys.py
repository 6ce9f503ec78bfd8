"""Profile an MPI job with Nsight Systems: python profiling/nsys.py -- mpirun -n 4 python train.py

Prints the command that makes one report of each rank (rank0.nsys-rep, ...), or carries it out (--run). With
--ranks 0,3 only those are profiled, since 64 reports are slow to write and to read: each rank then starts
this file, which becomes the profiler or the program alone. Behind another launcher do that yourself:

    srun -n 64 python profiling/nsys.py --ranks 0,1,63 -- python train.py

The program begins at the first word after the launcher that is no option and can be executed; put another --
before it where that guess would be wrong.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class UsageError(Exception):
    """The command line cannot be carried out."""


@dataclass(frozen=True)
class Launcher:
    """What a kind of launcher tells the ranks that it starts, and which of its options take values."""

    rank: str
    size: str
    takes: Mapping[str, int]


HYDRA = "-n -np -ppn -f -hosts -host -bind-to -map-by -launcher -iface -wdir -genvlist -envlist"
PRTE = "-n -np -c -N -x -H -host -hostfile --host --hostfile --map-by --bind-to --rank-by --wdir"
SLURM = "-n -N -c -p -A -t -w -x -J -o -e -i -q -C -G --mpi --ntasks --nodes --partition --account --time"
SLURM += " --cpus-per-task --job-name --gres --gpus --ntasks-per-node --cpu-bind --output --error --qos"
LAUNCHERS = {
    "openmpi": Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        dict.fromkeys(PRTE.split(), 1) | {"--mca": 2, "-mca": 2, "--prtemca": 2},
    ),
    "mpich": Launcher("PMI_RANK", "PMI_SIZE", dict.fromkeys(HYDRA.split(), 1) | {"-genv": 2, "-env": 2}),
    "srun": Launcher("SLURM_PROCID", "SLURM_NTASKS", dict.fromkeys(SLURM.split(), 1)),
}
"""In the order in which ranks look for their number: mpirun within a Slurm job sees both."""
NAMES = {"srun": "srun", "orterun": "openmpi", "prterun": "openmpi", "mpiexec.hydra": "mpich"}
COMMON = ("mpirun", "mpiexec")
"""The names that more than one MPI has."""


def kind_of(launcher: str) -> str:
    """Return of which kind a launcher is; for `mpirun` and `mpiexec`, as it says itself."""
    name = Path(launcher).name
    if name in NAMES:
        return NAMES[name]
    try:
        said = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise UsageError(
            f"{launcher} cannot be started ({error.strerror}): give --mpi openmpi, mpich or srun"
        ) from None
    for text, kind in {"Open MPI": "openmpi", "HYDRA": "mpich", "Intel(R) MPI": "mpich"}.items():
        if text in said:
            return kind
    raise UsageError(f"{launcher} --version names neither Open MPI nor MPICH: give --mpi openmpi or mpich")


def implementation(kind: str) -> str | None:
    """Return what to tell nsys of the MPI library; None if that is not known here."""
    if kind != "srun":
        return kind
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI as M"
    ask = [sys.executable, "-c", f"{code}; print(M.Get_library_version())"]
    said = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
    return None if not said else "openmpi" if "Open MPI" in said else "mpich"


def profile(kind: str, output: str, mpi: str | None) -> list[str]:
    """Return the command that profiles one rank."""
    return [
        *("nsys", "profile", "--trace=nvtx,mpi,cuda"),
        *([f"--mpi-impl={mpi}"] if mpi else []),
        *("--sample=none", "--cpuctxsw=none", "--force-overwrite=true"),
        *("-o", f"{output}%q{{{LAUNCHERS[kind].rank}}}"),
    ]


def split(command: list[str], kind: str) -> tuple[list[str], list[str]]:
    """Return the launcher with its options, and the program with its arguments."""
    if "--" in command:
        at = command.index("--")
        return command[:at], command[at + 1 :]
    if ":" in command and kind != "srun":
        raise UsageError("several programs in one job (:) cannot be profiled: give mpirun one")
    at = 1
    while at < len(command):
        word = command[at]
        if word.startswith("-"):
            at += 1 + LAUNCHERS[kind].takes.get(word, 0)
        elif shutil.which(word):
            return command[:at], command[at:]
        else:
            at += 1
    raise UsageError(f"no program found in {shlex.join(command)!r}: put -- before it")


def parse_ranks(text: str) -> set[int]:
    """Return the numbers in `0,3`."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of ranks, such as 0,1,63")
    return {int(part) for part in text.split(",")}


def whole(options: argparse.Namespace) -> list[str]:
    """Return the command that starts and profiles the job."""
    kind = options.mpi or kind_of(options.command[0])
    launch, program = split(options.command, kind)
    if options.ranks is None:
        return [*launch, *profile(kind, options.output, implementation(kind)), *program]
    ranks = ",".join(map(str, sorted(options.ranks)))
    wrapper = [sys.executable, str(Path(__file__).resolve()), "--mpi", kind, "--ranks", ranks]
    return [*launch, *wrapper, "--output", options.output, "--", *program]


def of_this_rank(options: argparse.Namespace) -> list[str]:
    """Return the command of the rank that has started this file."""
    known = [kind for kind in LAUNCHERS if LAUNCHERS[kind].rank in os.environ]
    kind = options.mpi or (known[0] if known else None)
    if kind is None or LAUNCHERS[kind].rank not in os.environ:
        names = LAUNCHERS[kind].rank if kind else ", ".join(launcher.rank for launcher in LAUNCHERS.values())
        raise UsageError(
            f"no launcher in {shlex.join(options.command)!r}, and no rank in the environment ({names}): "
            "begin with mpirun, mpiexec or srun, or let one of them start this"
        )
    rank, size = (int(os.environ.get(name, 1 << 31)) for name in (LAUNCHERS[kind].rank, LAUNCHERS[kind].size))
    beyond = sorted(other for other in options.ranks or () if other >= size)
    if beyond:
        raise UsageError(f"--ranks has {beyond[0]}, but there are {size} ranks")
    if options.ranks is not None and rank not in options.ranks:
        return list(options.command)
    require_nsys()
    return [*profile(kind, options.output, implementation(kind)), *options.command]


def require_nsys() -> None:
    """Raise `UsageError` unless nsys can be started."""
    if shutil.which("nsys") is None:
        raise UsageError(
            f"nsys is not in the PATH of {os.uname().nodename}: load its module, or install Nsight Systems "
            "(developer.nvidia.com/nsight-systems) and add its folder to PATH"
        )


def execute(command: list[str], output: str) -> None:
    """Become a program."""
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from None


def main() -> None:
    """Print or carry out the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=parse_ranks, metavar="0,3", help="profile these only (default: all)")
    parser.add_argument("--mpi", choices=LAUNCHERS, help="kind of launcher (default: found out)")
    parser.add_argument("--output", default="rank", metavar="PREFIX", help="of the reports (default: rank)")
    parser.add_argument("--run", action="store_true", help="carry the command out")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command", help="what starts the job")
    options = parser.parse_args()
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command:
        parser.error("no command: put it behind --, such as -- mpirun -n 4 python train.py")
    try:
        name = Path(options.command[0]).name
        if name not in NAMES and name not in COMMON:
            execute(of_this_rank(options), options.output)
        command = whole(options)
        if options.run:
            require_nsys()
            execute(command, options.output)
        folder = Path(options.output).parent
        print(f"mkdir -p {shlex.quote(str(folder))} && " * (folder != Path()) + shlex.join(command))
        reports = shlex.quote(options.output)
        print(
            f"# afterwards: for f in {reports}*.nsys-rep; do nsys export --type sqlite $f; done\n"
            f"#             python profiling/report.py {reports}*.sqlite --html report.html",
            file=sys.stderr,
        )
        if not shutil.which("nsys"):
            print("# nsys is not in the PATH here: it has to be where the command is run", file=sys.stderr)
    except UsageError as error:
        sys.exit(f"nsys.py: {error}")


if __name__ == "__main__":
    main()
