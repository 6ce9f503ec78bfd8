"""`python -m mpitopk info`, `schemes` and `bench select|exchange|quantize|step`."""

from __future__ import annotations

import argparse
import json

from mpitopk import info, schemes
from mpitopk.bench import BENCHMARKS, Table


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m mpitopk", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what is installed here and whether it will do")
    commands.add_parser("schemes", help="the compression schemes and their options")
    bench = commands.add_parser("bench", help="our operations and the alternatives, interleaved in one run")
    which = bench.add_subparsers(dest="benchmark", required=True)
    for name, module in BENCHMARKS.items():
        options = which.add_parser(
            name, help=(module.__doc__ or "").splitlines()[0], description=module.__doc__
        )
        options.add_argument("--json", action="store_true", help="print JSON instead of a table")
        options.add_argument("--repeats", type=int, default=15, help="timed calls of each (default: 15)")
        module.add_options(options)
    return top


def main() -> None:
    """Run the command line."""
    options = parser().parse_args()
    if options.command == "info":
        info.show()
        return
    if options.command == "schemes":
        rows = list(schemes.table())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip())
        return
    tables: list[Table] = BENCHMARKS[options.benchmark].run(options)
    if options.json:
        print(json.dumps([table.as_dict() for table in tables], indent=2)) if tables else None
    else:
        print("\n\n".join(map(str, tables)), end="\n" if tables else "")


if __name__ == "__main__":
    main()
