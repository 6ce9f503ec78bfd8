"""The command line of train_mlp.py."""

from __future__ import annotations

import argparse
import ast
import itertools
from dataclasses import fields
from typing import Any

from datasets import DATASETS

import mpitopk


def optimizer_momentum(scheme: mpitopk.Scheme) -> float:
    """Return the usual one; none where the scheme has its own."""
    return 0.0 if scheme.has_momentum else 0.9


def parse(description: str | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawTextHelpFormatter,
        epilog="Options of the scheme are given by name as well, such as --scheme dgc --momentum 0.8;\n"
        "python -m mpitopk schemes lists them.",
    )
    parser.add_argument("--data", choices=DATASETS, default="mnist")
    parser.add_argument("--data-folder", metavar="DIR", help="IDX files of MNIST")
    parser.add_argument("--scheme", default="topk", help=f"one of {', '.join(mpitopk.SCHEMES)}")
    parser.add_argument("--density", type=float, help="part of the entries to send (default: 0.01)")
    parser.add_argument("--device", choices=("auto", "host", "numpy", "cuda", "cupy"), default="auto")
    parser.add_argument("--steps", type=int, default=400, help="steps in total (default: 400)")
    parser.add_argument("--batch", type=int, default=256, help="inputs a step, of all ranks (default: 256)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden units (default: 256)")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument(
        "--optimizer-momentum", type=float, metavar="M", help="default: 0.9; 0 where the scheme has momentum"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and batches")
    parser.add_argument("--save", metavar="PREFIX", help="write PREFIX-RANK.npz at the end")
    parser.add_argument("--resume", metavar="PREFIX", help="go on from what --save wrote")
    parser.add_argument("--stop", type=int, metavar="STEP", help="stop early, to be resumed")
    parser.add_argument("--progress", action="store_true", help="show a bar")
    options, others = parser.parse_known_args()
    given = {} if options.density is None else {"density": options.density}
    try:
        given |= scheme_options(others)
        scheme = mpitopk.SCHEMES.get(options.scheme, mpitopk.TopK)
        has_density = any(option.name == "density" for option in fields(scheme))  # type: ignore[arg-type]
        if has_density and "chunk" not in given:
            given = {"density": 0.01, **given}
        options.scheme = mpitopk.make_scheme(options.scheme, **given)
        if options.optimizer_momentum and options.scheme.has_momentum:
            raise ValueError("the scheme has momentum already: leave --optimizer-momentum out")
        if options.optimizer_momentum is None:
            options.optimizer_momentum = optimizer_momentum(options.scheme)
    except (mpitopk.MpiTopkError, ValueError) as error:
        parser.error(str(error))
    return options


def scheme_options(texts: list[str]) -> dict[str, Any]:
    """Return what is left of the command line, `--name value` by pairs, as options of a scheme."""
    given: dict[str, Any] = {}
    for name, text in itertools.zip_longest(texts[::2], texts[1::2]):
        if not name.startswith("--") or text is None:
            raise ValueError(f"{name} is no option with a value")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        given[name[2:].replace("-", "_")] = value
    return given
