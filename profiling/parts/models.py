"""Networks of the study and of its authors' later work, as layouts: what top-k SGD has to select from."""

from __future__ import annotations

from collections.abc import Iterator

from mpitopk import Layout

Shapes = Iterator[tuple[str, "tuple[int, ...]"]]


def _norm(name: str, channels: int) -> Shapes:
    yield f"{name}.weight", (channels,)
    yield f"{name}.bias", (channels,)


def vgg16() -> Layout:
    """VGG-16 with batch normalisation for ten classes of 32 x 32 pixels: 14,728,266 entries, 54 segments."""

    def shapes() -> Shapes:
        before = 3
        widths = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
        for at, width in enumerate(widths):
            yield f"conv{at}.weight", (width, before, 3, 3)
            yield f"conv{at}.bias", (width,)
            yield from _norm(f"norm{at}", width)
            before = width
        yield "linear.weight", (10, 512)
        yield "linear.bias", (10,)

    return Layout(dict(shapes()))


def resnet18() -> Layout:
    """ResNet-18 for ten classes of 32 x 32 pixels: 11,173,962 entries in 62 segments."""

    def shapes() -> Shapes:
        yield "conv.weight", (64, 3, 3, 3)
        yield from _norm("norm", 64)
        before = 64
        for at, width in enumerate((64, 64, 128, 128, 256, 256, 512, 512)):
            yield f"block{at}.conv0.weight", (width, before, 3, 3)
            yield from _norm(f"block{at}.norm0", width)
            yield f"block{at}.conv1.weight", (width, width, 3, 3)
            yield from _norm(f"block{at}.norm1", width)
            if width != before:
                yield f"block{at}.shortcut.weight", (width, before, 1, 1)
                yield from _norm(f"block{at}.shortcut.norm", width)
            before = width
        yield "linear.weight", (10, 512)
        yield "linear.bias", (10,)

    return Layout(dict(shapes()))


def lstm() -> Layout:
    """Three layers of LSTM, 650 wide, on 28,869 words (input and output share theirs): 28,949,319 entries."""

    def shapes() -> Shapes:
        yield "words.weight", (28869, 650)
        for at in range(3):
            for of in ("input", "hidden"):
                yield f"lstm{at}.{of}.weight", (4 * 650, 650)
                yield f"lstm{at}.{of}.bias", (4 * 650,)
        yield "words.bias", (28869,)

    return Layout(dict(shapes()))


MODELS = {"vgg16": vgg16, "resnet18": resnet18, "lstm": lstm}
TITLES = {"vgg16": "VGG-16", "resnet18": "ResNet-18", "lstm": "LSTM"}


def layout_of(name: str) -> Layout:
    """Return the layout of a model by name, or one segment of so many entries."""
    return MODELS[name]() if name in MODELS else Layout({"all": int(name)})


def title_of(name: str) -> str:
    """Return what a task is called in tables: a model, a number of entries, or data that is trained on."""
    return TITLES.get(name) or (
        f"{int(name):,} entries" if name.isdecimal() else f"the example's MLP, {name}"
    )
