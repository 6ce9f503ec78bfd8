"""Train a small network on several ranks: mpirun -n 4 python examples/train_mlp.py --density 0.01

Data parallelism as one writes it by hand: every rank computes the gradient of its share of each batch,
`runtime.allreduce` averages the gradients, and every rank makes the same update. With --device cuda the
arrays are CuPy's, on GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the processors
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from datasets import DATASETS, Data
from mpi4py import MPI
from options import parse

import mpitopk

Array: TypeAlias = Any
"""NumPy's or CuPy's."""

PHASES = ["forward", "backward", "accumulate", "select", "pack"]
PHASES += ["exchange", "wait", "transfer", "merge", "update"]


def layout_for(data: Data, hidden: int = 256) -> mpitopk.Layout:
    """Return the layout of a network with one hidden layer."""
    return mpitopk.Layout(
        {"w1": (data.features, hidden), "b1": hidden, "w2": (hidden, data.classes), "b2": data.classes}
    )


class Network:
    """Input, one hidden layer of rectified units, softmax. Parameters and gradient are flat."""

    def __init__(self, layout: mpitopk.Layout, xp: Any) -> None:
        self.layout, self.xp = layout, xp

    def start(self, seed: int) -> Array:
        """Return random parameters (He et al. 2015), the same ones on every device."""
        rng = np.random.default_rng(seed)
        parameters = np.zeros(self.layout.size, np.float32)
        for view in self.layout.views(parameters).values():
            if view.ndim == 2:
                view[...] = rng.standard_normal(view.shape) * (2 / view.shape[0]) ** 0.5
        return self.xp.asarray(parameters)

    def forward(self, parameters: Array, inputs: Array) -> tuple[Array, Array]:
        """Return the hidden activations and the logarithms of the probabilities."""
        p, xp = self.layout.views(parameters), self.xp
        hidden = xp.maximum(inputs @ p["w1"] + p["b1"], 0)
        logits = hidden @ p["w2"] + p["b2"]
        logits -= logits.max(axis=1, keepdims=True)
        return hidden, logits - xp.log(xp.exp(logits).sum(axis=1, keepdims=True))

    def backward(
        self, parameters: Array, inputs: Array, hidden: Array, error: Array, gradient: Array
    ) -> None:
        """Write the gradient, given the derivative of the loss by the logits."""
        p, g = self.layout.views(parameters), self.layout.views(gradient)
        self.xp.matmul(hidden.T, error, out=g["w2"])
        error.sum(axis=0, out=g["b2"])
        behind = (error @ p["w2"].T) * (hidden > 0)
        self.xp.matmul(inputs.T, behind, out=g["w1"])
        behind.sum(axis=0, out=g["b1"])


@dataclass
class Training:
    """What the training loop needs; also of use to the comparison of the schemes.

    `xp`: NumPy, or CuPy where the runtime is on a GPU; the runtime comes first, since it chooses the GPU.
    """

    layout: mpitopk.Layout
    data: Data
    momentum: float
    xp: Any = np
    batch: int = 256
    rate: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        self.network = Network(self.layout, self.xp)
        self.parameters = self.network.start(self.seed)
        self.velocity = self.xp.zeros_like(self.parameters)

    def examples(self, at: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the inputs at some positions, and where among the outputs the right ones are."""
        inputs, labels = map(self.xp.asarray, self.data.batch(at))
        return inputs, (self.xp.arange(len(labels)), labels)

    def share(self, step: int, rank: int, ranks: int) -> tuple[Array, tuple[Array, Array]]:
        """Return a rank's part of the batch of a step."""
        rng = np.random.default_rng((self.seed, step))
        return self.examples(rng.integers(0, self.data.training, max(self.batch, ranks))[rank::ranks])

    def backward(
        self, inputs: Array, hidden: Array, log_probability: Array, right: Any, ranks: int, gradient: Array
    ) -> None:
        """Write a rank's gradient: such that the mean over the ranks is that of the batch."""
        error = self.xp.exp(log_probability)
        error[right] -= 1
        error *= ranks / max(self.batch, ranks)
        self.network.backward(self.parameters, inputs, hidden, error, gradient)

    def update(self, mean: Array, step: int, steps: int) -> None:
        """Make a step of momentum SGD; from half of the steps on the rate falls to zero."""
        rate = self.rate * min(1, 2 * (1 - step / steps))
        self.velocity *= self.momentum
        self.velocity += mean
        self.parameters -= rate * self.velocity

    def train(
        self,
        runtime: mpitopk.Runtime,
        rank: int,
        ranks: int,
        steps: int,
        *,
        stop: int | None = None,
        report: Any = None,
    ) -> None:
        """Take steps until there have been `steps` of them, or `stop`."""
        gradient = runtime.gradient
        while runtime.step < (stop or steps):
            step = runtime.step
            inputs, right = self.share(step, rank, ranks)
            with runtime.range("forward"):
                hidden, log_probability = self.network.forward(self.parameters, inputs)
            with runtime.range("backward"):
                self.backward(inputs, hidden, log_probability, right, ranks, gradient)
            mean = runtime.allreduce(gradient)
            with runtime.range("update"):
                self.update(mean, step, steps)
            if report is not None:
                report(step + 1)

    def test(self) -> tuple[float, float]:
        """Return the loss on held-out data, in bits, and the accuracy."""
        inputs, right = self.examples(np.arange(self.data.training, len(self.data.labels))[:20000])
        _, log_probability = self.network.forward(self.parameters, inputs)
        loss = -float(log_probability[right].mean()) / np.log(2)
        return float(loss), float((log_probability.argmax(axis=1) == right[1]).mean())


def on_rank_0(comm: MPI.Intracomm, function: Any) -> Any:
    """Return what a function returns on rank 0; where it fails, end all ranks with its message."""
    result = None
    if comm.rank == 0:
        try:
            result = function()
        except (OSError, ValueError) as error:
            result = error
    result = comm.bcast(result)
    if isinstance(result, Exception):
        sys.exit(f"train_mlp.py: {result}" if comm.rank == 0 else 1)
    return result


def make_runtime(comm: MPI.Intracomm, data: Data, options: argparse.Namespace) -> mpitopk.Runtime:
    """Return the runtime; where there can be none, end all ranks with the reason."""
    try:
        return mpitopk.Runtime(comm, layout_for(data, options.hidden), options.scheme, device=options.device)
    except mpitopk.MpiTopkError as error:
        sys.exit(f"train_mlp.py: {error}" if comm.rank == 0 else 1)


def save(prefix: str, rank: int, training: Training, runtime: mpitopk.Runtime) -> None:
    """Write this rank's file: its own state, and parameters and velocity, which all ranks share."""
    to_host = getattr(training.xp, "asnumpy", np.asarray)
    shared = {"parameters": to_host(training.parameters), "velocity": to_host(training.velocity)}
    np.savez(f"{prefix}-{rank}.npz", **shared, **runtime.state_dict())  # type: ignore[arg-type]


def resume(prefix: str, comm: MPI.Intracomm, training: Training, runtime: mpitopk.Runtime) -> None:
    """Go on from saved files, of any number of ranks."""
    first = on_rank_0(comm, lambda: dict(np.load(f"{prefix}-0.npz")))
    training.parameters[:] = training.xp.asarray(first["parameters"])
    training.velocity[:] = training.xp.asarray(first["velocity"])
    mine = range(comm.rank, mpitopk.saved_size(first), comm.size)
    runtime.load_state_dict(*[dict(np.load(f"{prefix}-{rank}.npz")) for rank in mine])


def summary(runtime: mpitopk.Runtime, taken: int) -> str:
    """Return what the steps have cost this rank."""
    metrics = runtime.metrics
    lines = ["ms a step (exchange: wait for the slowest, then transfer)"]
    lines += [f"  {n:11}{1e3 * metrics.seconds[n] / taken:8.3f}" for n in PHASES if n in metrics.seconds]
    if metrics.dense_bytes:
        got, dense = metrics.bytes / 2**20, metrics.dense_bytes / 2**20
        lines.append(f"received {got:.2f} MiB, dense {dense:.2f} MiB: {got / dense:.1%}")
    return "\n".join(lines)


def main() -> None:
    """Train and report."""
    comm = MPI.COMM_WORLD
    rank, ranks = comm.rank, comm.size
    mpitopk.abort_on_error()
    with contextlib.ExitStack() as quiet:
        for redirect in (contextlib.redirect_stderr, contextlib.redirect_stdout) if rank > 0 else ():
            quiet.enter_context(redirect(io.StringIO()))
        options = parse(__doc__)
    data = on_rank_0(comm, lambda: DATASETS[options.data](options.data_folder))
    with make_runtime(comm, data, options) as runtime:
        xp = import_module("cupy" if options.device in ("cuda", "cupy") else "numpy")
        given = options.optimizer_momentum, xp, options.batch, options.rate, options.seed
        training = Training(runtime.layout, data, *given)
        runtime.broadcast(training.parameters)
        if options.resume:
            resume(options.resume, comm, training, runtime)
        started = runtime.step

        def report(step: int) -> None:
            if rank > 0:
                return
            if options.progress:
                done = 40 * step // options.steps
                end = "\n" if step == options.steps else ""
                print(f"\r[{'=' * done}{' ' * (40 - done)}] {step}", end=end, file=sys.stderr, flush=True)
            if step % max(1, options.steps // 5) == 0 or step == options.steps:
                loss, accuracy = training.test()
                result = f"{loss:.4f} bits a character" if data.text else f"accuracy {accuracy:.2%}"
                print(f"step {step:5}  loss {loss:.4f} bits  {result}", flush=True)

        if rank == 0:
            print(f"{ranks} ranks, {runtime.layout}, {runtime.scheme.describe()}", flush=True)
        training.train(runtime, rank, ranks, options.steps, stop=options.stop, report=report)
        runtime.check_replicas(training.parameters)
        if rank == 0 and runtime.step > started:
            print(summary(runtime, runtime.step - started))
            print(f"parameters identical on all {ranks} ranks")
        if options.save:
            save(options.save, rank, training, runtime)


if __name__ == "__main__":
    main()
