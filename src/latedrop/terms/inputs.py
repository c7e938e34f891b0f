"""Noise of the inputs, carried to the output to first order.

With `s_i` the standard deviation of the noise of input i, `t(x) = sum_i s_i^2 (dy/dx_i)^2`. Where the sizes are known,
the coefficient should come out near 1; where they are not, the inputs' own spread stands in, and the coefficient is the
fraction of their variance that is noise.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from latedrop.data.arrays import widened
from latedrop.data.rows import copied, row_count, tensors
from latedrop.errors import ArgumentError, OutputError
from latedrop.network.calling import Readout, call, read
from latedrop.network.network import Network
from latedrop.records import record
from latedrop.stored_tensors import StoredTensor
from latedrop.terms.term import BatchContext, Term
from latedrop.torch_private import without_cudnn

__all__ = ["InputNoise"]


@record
@dataclass(init=False, eq=False)
class InputNoise(Term):
    """Noise of the inputs.

    Args:
        std: its size: a number, or a tensor that broadcasts with one row of the (only floating) input.

    >>> import latedrop
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> latedrop.calibrate(net, (x, x**2), method=latedrop.Terms(["dropout", InputNoise(0.1)])).predict(x).std.shape
    torch.Size([64, 1])
    """

    std: StoredTensor
    name: Literal["inputs"] = "inputs"

    def __init__(self, std: Tensor | float = 1.0) -> None:
        self.std = torch.as_tensor(std, dtype=torch.float32)
        if not bool(torch.isfinite(self.std).all()) or bool((self.std < 0).any()):
            raise ArgumentError(f"expected finite sizes of at least 0 for the noise of the inputs; found {std}.")

    def values(self, rows: BatchContext) -> Tensor:
        """See `Term`."""
        by_output = _gradients(rows.network, rows.x, rows.readout)
        if len(by_output[0]) > 1 and self.std.dim() > 0:
            raise ArgumentError(
                f"expected one size for the noise of {len(by_output[0])} floating inputs; found "
                f"{tuple(self.std.shape)}."
            )
        flat = [torch.cat([self._carried(g) for g in gradients], 1).sum(1) for gradients in by_output]
        return torch.stack(flat, 1).reshape(rows.mean.shape)

    def checked(self) -> InputNoise:
        """See `Term`."""
        return InputNoise(self.std)

    def _carried(self, gradient: Tensor) -> Tensor:
        """`(N, entries)` from the gradient of one output with respect to an input."""
        try:
            return (gradient * self.std.to(gradient)).square().flatten(1)
        except RuntimeError as error:
            raise ArgumentError(
                f"expected sizes of the noise that broadcast with inputs {tuple(gradient.shape[1:])}; found "
                f"{tuple(self.std.shape)}."
            ) from error


def _gradients(model: nn.Module | Network, x: Any, readout: Readout) -> list[list[Tensor]]:
    """For each entry of the output, its gradients with respect to the floating inputs, `(N, ...)` each."""
    network, rows = Network.of(model), row_count(x)

    def run() -> list[list[Tensor]]:
        given = copied(x)
        leaves = [t.requires_grad_() for t in tensors(given) if t.is_floating_point() and t.shape[:1] == (rows,)]
        with network.passing(network.begin((), None, rows)):  # checkpointed parts run once more in the backward pass
            output = read(call(network.copy, given), readout, rows)
            return _differentiated(output.reshape(len(output), -1), leaves)

    recurrent = network.weight.is_cuda and any(isinstance(layer, nn.RNNBase) for layer in network.layers.values())
    with without_cudnn() if recurrent else nullcontext():
        return network.quietly(run, gradients=True)


def _differentiated(outputs: Tensor, leaves: list[Tensor]) -> list[list[Tensor]]:
    if not leaves or not outputs.requires_grad:
        raise OutputError(
            "expected an output that autograd can differentiate with respect to floating inputs; found none."
        )
    found = []
    for k in range(outputs.shape[1]):
        more = k + 1 < outputs.shape[1]
        gradients = torch.autograd.grad(outputs[:, k].sum(), leaves, retain_graph=more, materialize_grads=True)
        found.append([widened(gradient) for gradient in gradients])
    return found
