"""The variance without drawing: exact to first order in the masks, for all rates at once.

Write a mask as `m = 1 + d`, with `E d = 0` and `Var d = rate / (1 - rate)`, independent for every unit. To first order
the output is `y + sum_i d_i · phi_i` with `phi_i = h_i · dy/dh_i`, so that

    Var y = sum over sites s of  rate_s / (1 - rate_s) · v_s,     v_s = sum over the units i of s of phi_i^2.

`phi` is the gradient of the output by the mask at 1: one forward and one backward pass per scalar output give it for
every site. Where the output is affine in the masks (one site before the last layer) nothing is left out; elsewhere it
takes the slope for what dropping one unit does, the limit of small rates.

Where the layout of a site's input does not tell which entries are whose, as of the nodes of graphs, gradients tell:
with `s` the sum of all outputs and `w` that of `i` times the output of row `i`, an entry of row `i` has
`dw/dh = i · ds/dh`. An entry of several rows may have their mean for its `i`; a second weight, irregular in `i`, tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor, nn

from latedrop.data.arrays import any_true, check_inputs, constants, floating, place, widened
from latedrop.data.rows import Collate, Graphs, copied, row_count, take_rows
from latedrop.dropout.moments import out_of_memory
from latedrop.errors import ArgumentError, LatedropWarning, OutputError
from latedrop.network.find_sites import placed_batches
from latedrop.network.functional import RECURRENT
from latedrop.network.network import Network, Pass, Readout, Thinner, call, check_finite, read
from latedrop.network.private_copy import Guard
from latedrop.network.sites import Rate, Site, Sites, odds_by_site
from latedrop.torch_private import bare, being_traced, version_of, without_cudnn

__all__ = ["FirstOrder", "Linearization", "first_order", "linearize", "unit_variances"]

_MOST_OUTPUTS, _OUTPUTS_AT_ONCE = 1024, 16
_LARGE = 2**17  # units of all rows, from which on outputs are differentiated one by one on a CPU: faster then
_MOST_COUNTED = {torch.float16: 16, torch.bfloat16: 16}  # rows that gradients tell apart, with room for rounding
_UNCLEAR = 0.25, 0.02  # how far an entry may be from the number and the second weight of its row
_NOISE = 1e-4  # share of the largest gradient
_SHARED = "shared entries"  # a note that a network has some
_IN_PLACE, _INFERENCE = "modified by an inplace operation", "nference tensor"  # in torch's own words


@dataclass(frozen=True)
class Linearization:
    """The model's own output, and what each site adds to its variance.

    Attributes:
        mean: `(N, ...)`, the output of the model as it is.
        variance_by_site: `(N, outputs, sites)`, per unit of `rate / (1 - rate)`; `outputs` counts the entries of one
            example's output.
        sites: in the order of the last axis.
    """

    mean: Tensor
    variance_by_site: Tensor
    sites: Sites

    def __repr__(self) -> str:
        return f"Linearization of {len(self.mean)} rows, mean {tuple(self.mean.shape)}, {len(self.sites)} sites"

    def variance(self, rate: Rate) -> Tensor:
        """Return `sum_s rate_s / (1 - rate_s) · v_s`, in the shape of `mean`.

        `rate` is a number, or a mapping from site names or patterns to numbers, as for `sample`.

        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> linearize(net, torch.ones(5, 2)).variance(0.1).shape
        torch.Size([5, 1])
        """
        odds, by_site = odds_by_site(self.sites, rate), self.variance_by_site
        return (by_site @ constants(odds).to(by_site)).reshape(self.mean.shape)

    @classmethod
    def joined(cls, parts: Sequence[Linearization]) -> Linearization:
        """Return those of some rows after the others as one."""
        if len(parts) == 1:
            return parts[0]
        mean, by_site = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "variance_by_site"))
        return cls(mean, by_site, parts[0].sites)


def linearize(
    model: nn.Module | Network,
    x: Any,
    sites: Sequence[Site] | None = None,
    readout: Readout = None,
    *,
    chunk: int | None = None,
    collate: Collate = None,
) -> Linearization:
    """Return the first-order variance of `model` on `x`, site by site, without any draw.

    Args:
        model: any trained module that autograd can differentiate, or a `Network` of it; it is left as it was.
        x: inputs with N rows, or a `DataLoader` or data set, as for `sample`.
        sites: from `find_sites`; found by a probe pass where None.
        readout: what of the output to take. A readout that sums a map to a count costs one backward pass.
        chunk: rows that run at once; all where None, halved when memory runs out.
        collate: from a list of items to what `model` takes, where `x` is a list of objects; see `find_sites`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> result = linearize(net, torch.ones(5, 2))
    >>> result.mean.shape, result.variance_by_site.shape
    (torch.Size([5, 1]), torch.Size([5, 1, 1]))
    """
    network = Network.of(model)
    sites, batches = placed_batches(network, x, sites, collate, check=False)
    parts = list[Linearization]()
    for batch in batches:
        try:
            parts += [part.linear for part in first_order(network, batch, sites, readout, chunk, check=True)]
        except Exception:
            check_inputs(floating(batch))  # which a model may fail on in any way
            raise
    return Linearization.joined(parts)


class FirstOrder(NamedTuple):
    """First order of some rows: output and variances, and for each entry of the output `phi` where it was asked for.

    `phi` is `h · dy/dh`, `(rows, units)`, by the names of the sites, in the dtype of the model.
    """

    linear: Linearization
    phi: list[dict[str, Tensor]]
    watcher: Any  # who looked at the inputs of the sites


def first_order(
    network: Network,
    x: Any,
    sites: Sites,
    readout: Readout = None,
    chunk: int | None = None,
    *,
    phi: bool = False,
    watch: Callable[[], Thinner] | None = None,
    of: Callable[[Tensor], Tensor] | None = None,
    check: bool = False,
) -> Iterator[FirstOrder]:
    """Yield first order of some rows after the others; the inputs must have been placed, or `check` looks at them too.

    `watch` makes another who looks at the inputs of the sites, one for each batch that runs at once. `of` gives what of
    the output is differentiated, `(N, k)`; each of its entries where None.
    """
    rows, together = row_count(x), isinstance(x, Graphs) and bool(x.nodes)
    if chunk is not None and chunk < 1:
        raise ArgumentError(f"expected chunk to be at least 1 row; found {chunk}.")
    chunk = rows if together else min(chunk or rows, rows)
    if any(site.batch_axis is None or site.moved for site in sites):  # gradients tell which entries are whose
        alone = any(site.coupled for site in sites) or _SHARED in network.notes
        chunk = 1 if alone else min(chunk, _MOST_COUNTED.get(network.weight.dtype, 1024))
    # cuDNN's recurrent functions have no backward pass in eval mode, which an exported program calls them in.
    recurrent = network.weight.is_cuda and any(site.layer in RECURRENT for site in sites)
    done = 0
    while done < rows:
        part = x if chunk == rows else take_rows(x, slice(done, done + chunk))
        run = partial(_first_order, network, part, sites, readout, phi, watch, of, check)
        try:
            with without_cudnn() if recurrent else nullcontext():
                result = network.quietly(run, gradients=True)
        except Exception as error:
            shared = isinstance(error, _SharedEntriesError)
            if not (shared or out_of_memory(error)) or chunk == 1 or together:
                raise
            if shared:  # as what a network makes of its weights alone: one row at a time
                network.notes[_SHARED] = True
            chunk = 1 if shared else chunk // 2
            torch.cuda.empty_cache()
        else:
            yield result
            done += chunk


def unit_variances(
    model: nn.Module | Network, x: Any, sites: Sequence[Site], readout: Readout = None
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return the output on one example, and for each of its entries the variance of every unit of every site."""
    network = Network.of(model)
    x = place(x, network.copy)
    if row_count(x) != 1:
        raise ArgumentError(f"expected one example; found {row_count(x)}. Pass a batch of one row, such as x[:1].")
    part = next(first_order(network, x, Sites(sites), readout, phi=True))
    return part.linear.mean, [{name: widened(row[0]).square() for name, row in entry.items()} for entry in part.phi]


def _first_order(
    network: Network, x: Any, sites: Sites, readout: Readout, whole: bool, watch: Any, of: Any, check: bool
) -> FirstOrder:
    """Return first order of a batch, with all of `phi` where `whole`; gradients have to be on."""
    rows, notes = row_count(x), network.notes
    derives = notes.get("derives")
    record = _Record(None if watch is None else watch(), notes.get("overwrites", False), bool(derives))
    guard = Guard(bare(network.model)) if derives is None and not being_traced() else None
    now = Pass(sites, record, rows, shared=False)
    with network.passing(now):  # also of what is computed again in the backward pass
        try:
            with guard or nullcontext():
                output = read(call(network.copy, copied(x)), readout, rows)
        except RuntimeError as error:
            if _IN_PLACE in str(error) or _INFERENCE in str(error):
                raise _cannot_differentiate(error) from error
            raise
        if 0 in now.times.values():
            network.warn_of_idle(now)
        if guard is not None:
            if "cuts" in guard.deeds:
                raise OutputError(
                    "expected a model that keeps the graph of its derivatives; it takes some without "
                    "create_graph=True, and first order would count nothing there. Use method='sample', or pass "
                    "create_graph=True to torch.autograd."
                )
            notes["derives"] = "derives" in guard.deeds
        mean = widened(output.detach()).clone()  # a model may write every output to one place
        check_finite(mean, "without dropout", floating(x) if check else ())
        outputs = output if of is None else of(output)
        outputs = outputs if outputs.dim() == 2 else outputs.reshape(len(outputs), -1)
        if record.without_gradients and outputs.requires_grad:
            raise OutputError(
                f"expected gradients at every site; the model runs {sorted(record.without_gradients)} without: in "
                "torch.no_grad(), or in a function with a backward pass of its own. Use method='sample', or select=."
            )
        record.closed = True
        overwrites = not record.copies and any(item.version != version_of(item.value) for item in record.inputs)
        # Of a model that derives, masks act on the derivatives, too, so that `phi` is not `h · dy/dh`.
        if overwrites or record.factors != notes.get("derives", False):
            notes["overwrites"] = record.copies or overwrites
            return _first_order(network, x, sites, readout, whole, watch, of, check)
        # Nodes affect each other: what each does to all of its graph, added up by signs.
        signs = x.signs.to(outputs)[:, None] if isinstance(x, Graphs) and x.nodes else None
        outputs = outputs if signs is None else outputs * signs
        values = [item.value for item in record.inputs]
        squares, entries = [], []
        try:
            loose = any(item.loose is not None for item in record.inputs)
            first = record.find_owners(outputs, x, notes.setdefault("entries", {})) if loose else None
            for grads in _gradients(values, outputs) if first is None else [first]:
                phi = record.phi(grads, sites, outputs)
                norms = [
                    torch.linalg.vector_norm(units, dim=1, dtype=torch.promote_types(units.dtype, torch.float32))
                    for units in phi.values()
                ]
                squares.append(torch.stack(norms, 1).square())  # few operators for all sites
                if whole:
                    entries.append(phi if signs is None else {name: part * signs for name, part in phi.items()})
        except (RuntimeError, NotImplementedError) as error:
            if out_of_memory(error):
                raise
            raise _cannot_differentiate(error) from error
    unreached = {item.site for item in record.inputs} - record.reached
    if unreached and not being_traced():
        _warn_of_silent(network, [site for site in sites if site.name in unreached], x, readout)
    linear = Linearization(mean, torch.stack(squares, 1) if len(squares) > 1 else squares[0][:, None], sites)
    return FirstOrder(linear, entries, record.watcher)


class _SharedEntriesError(OutputError):
    """Entries of a layer's input move the outputs of several rows."""


class _Input(NamedTuple):
    """Input of a site in one call, how often it had been written into, and shape and rows' axis of its mask.

    Where the layout of the input does not tell which entries are whose, also the value before any factor, `loose`.
    """

    site: str
    call: int
    value: Tensor
    version: int
    shape: tuple[int, ...]
    axis: int | None
    loose: Tensor | None

    def entries(self, numbers: Tensor) -> Tensor:
        """Return numbers of a loose value as `(entries, units)`."""
        axes = [i for i, size in enumerate(self.shape) if size == 1] if self.axis is None else [self.axis]
        axes = axes[:-1] if len(axes) == numbers.dim() else axes
        if not axes:
            return numbers.reshape(1, -1)
        return numbers.movedim(axes, tuple(range(len(axes)))).flatten(0, len(axes) - 1).flatten(1)


@dataclass
class _Record:
    """Notes the input of every call of every site: a `Thinner` that thins nothing.

    `owners` tells, for every loose input by its place, the row of each entry; the number of rows where it moves no
    output.
    """

    watcher: Any  # another who looks at the inputs
    copies: bool  # whether sites read copies, as the model writes over what they read
    factors: bool  # whether to differentiate by factors of the inputs, which act on the model's own derivatives too
    inputs: list[_Input] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)  # sites that some output has gradients of
    without_gradients: set[str] = field(default_factory=set)  # sites that ran where gradients were off
    owners: dict[int, Tensor] = field(default_factory=dict)
    closed: bool = False  # whether the pass is over; checkpointed parts run once more in the backward pass

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """Record the input of a site as a tensor to differentiate by; see `Thinner`."""
        if self.watcher is not None and not self.closed:
            self.watcher.thin(site, call, value, shape, axis)
        if not torch.is_grad_enabled():
            self.without_gradients.add(site.name)
        value = value.clone() if self.copies else value
        loose = value.detach() if axis is None or site.moved else None
        if self.factors:
            passed = torch.ones_like(value).requires_grad_()
            value = value * passed
        elif value.requires_grad:
            # A view is a node of its own: gradients by it leave out what goes past the site, as a skip connection does.
            value = passed = value.view_as(value)
        else:
            passed = value.detach().requires_grad_()
            value = passed.view_as(passed)  # which a model may write into
        if not self.closed:
            self.inputs.append(_Input(site.name, call, passed, version_of(passed), shape, axis, loose))
        return value

    def find_owners(self, outputs: Tensor, x: Any, layouts: dict[Any, str]) -> Any:
        """Find the row of every entry of loose inputs, from `outputs` `(n, k)`, and show these to the watcher.

        `layouts` remembers which inputs are the nodes or the edges of graphs `x`, and that no entry is of several rows:
        the first pass finds it out, and later ones believe it. Returns the gradients by all inputs, of one output.
        """
        rows, one = len(outputs), outputs.shape[1] == 1
        loose = {(i, item.site): item for i, item in enumerate(self.inputs) if item.loose is not None}
        lists: dict[str, Tensor] = x.owners(outputs.device) if isinstance(x, Graphs) else {}
        lengths = {key: len(item.entries(item.value)) for key, item in loose.items()}
        owners = {key: lists[layouts[key]] for key in loose if layouts.get(key, "") in lists}
        owners = {key: owner for key, owner in owners.items() if len(owner) == lengths[key]}
        asked, grads = loose.keys() - owners.keys(), list[Sequence[Any]]()
        if asked or one:
            each = (outputs * torch.linspace(1, 1.7, outputs.shape[1]).to(outputs)).sum(1)
            weights = _row_weights(rows).to(each)[: 3 if asked - layouts.keys() else 2 if asked else 1]
            values = [item.value for item in self.inputs]
            grads = [torch.autograd.grad(each @ w, values, retain_graph=True, allow_unused=True) for w in weights]
        for (i, name), item in loose.items():
            key = i, name
            if key in asked:
                slopes = [torch.zeros_like(item.value) if grad[i] is None else grad[i] for grad in grads]
                owner = _owners(name, [item.entries(widened(slope)) for slope in slopes], rows)
                alike = {kind: of for kind, of in lists.items() if len(of) == len(owner)}
                names = [kind for kind, of in alike.items() if not any_true((owner != of) & (owner != rows))]
                if rows > 1 and len(names) < 2:
                    layouts.setdefault(key, names[0] if names else "")
                owners[key] = lists[names[0]] if names else owner
            self.owners[i] = owners[key]
            if self.watcher is not None and item.loose is not None:
                self.watcher.note_entries(name, widened(item.entries(item.loose)), owners[key], rows)
        return grads[0] if one else None

    def phi(self, grads: Sequence[Tensor | None], sites: Sites, like: Tensor) -> dict[str, Tensor]:
        """Return `phi = h · dy/dh` of every site, `(rows, units)`, summed as its masks are; calls one after another."""
        calls: dict[str, dict[int, Tensor]] = {site.name: {} for site in sites}
        for i, (item, grad) in enumerate(zip(self.inputs, grads, strict=True)):
            if grad is not None:
                self.reached.add(item.site)
            phi = torch.zeros_like(item.value) if grad is None else item.value.detach() * grad
            if item.loose is not None:
                units = item.entries(widened(phi))
                phi = units.new_zeros(len(like) + 1, units.shape[1]).index_add(0, self.owners[i], units)[:-1]
            else:
                phi = phi if phi.shape == item.shape else phi.sum_to_size(item.shape)
                phi = phi.movedim(item.axis, 0) if item.axis else phi
                phi = phi if phi.dim() == 2 else phi.flatten(1)
            before = calls[item.site].get(item.call)  # of a channel mask, which serves all calls of its layer
            calls[item.site][item.call] = phi if before is None else before + phi
        result = {}
        for name, each in calls.items():
            several = [*each.values()] or [like.new_zeros(len(like), 1)]  # its layer did not run
            result[name] = torch.cat(several, 1) if len(several) > 1 else several[0]
        return result


def _gradients(values: list[Tensor], outputs: Tensor) -> Iterator[Sequence[Tensor | None]]:
    """Yield, for each of `outputs` `(n, k)`, its gradients by all values."""
    k, done = outputs.shape[1], 0
    if k > _MOST_OUTPUTS:
        raise ArgumentError(
            f"expected at most {_MOST_OUTPUTS} outputs per example, each costs a backward pass; found {k}. Use a "
            "readout such as a map's sum, or method='propagate' or 'sample' for maps."
        )
    if not values:  # no site ran
        yield from [()] * k
        return
    if not outputs.requires_grad:
        raise OutputError(
            "expected an output that autograd can differentiate with respect to the sites; found one without a graph: "
            "the model or the readout detaches it or runs without gradients. Use method='sample'."
        )
    if k > 1 and (not outputs.is_cpu or sum(value.numel() for value in values) < _LARGE):
        try:
            for done in range(0, k, _OUTPUTS_AT_ONCE):
                part = outputs[:, done : done + _OUTPUTS_AT_ONCE]
                count = part.shape[1]
                each = torch.eye(count, dtype=part.dtype, device=part.device)[:, None].expand(count, *part.shape)
                grads = torch.autograd.grad(
                    part, values, each, is_grads_batched=True, retain_graph=True, allow_unused=True
                )
                yield from ([None if grad is None else grad[i] for grad in grads] for i in range(count))
            return
        except RuntimeError as error:  # some operator has no batching rule for its backward
            if out_of_memory(error) or _IN_PLACE in str(error):
                raise
    for i in range(done, k):
        output = outputs if k == 1 else outputs[:, i]
        total = output if output.numel() == 1 else output.sum()
        yield torch.autograd.grad(total, values, retain_graph=i + 1 < k, allow_unused=True)


def _row_weights(rows: int) -> Tensor:
    """Return `(3, rows)`: ones, the number of a row from 1 on, and something irregular; of one row ones alone."""
    number = torch.arange(1.0, rows + 1)
    return torch.stack([torch.ones(rows), number, number.square().sin()][: 3 if rows > 1 else 1])


def _owners(name: str, grads: Sequence[Tensor], rows: int) -> Tensor:
    """Return the row of every entry, from gradients `(entries, units)` by each weight; `rows` where it moves none."""
    size = grads[0].abs().amax(1, keepdim=True)
    if rows == 1 or not len(size):
        return (size[:, 0] == 0).long()
    plain, *others = (grad / size.clamp_min(torch.finfo(size.dtype).tiny) for grad in grads)
    values = [(plain * other).sum(1) / plain.square().sum(1).clamp_min(1) for other in others]
    row = values[0].round().clamp(1, rows).nan_to_num(1).long() - 1
    exact = _row_weights(rows)[1:].to(row.device)
    near = [(v - w.to(v)[row]).abs() < off for v, w, off in zip(values, exact, _UNCLEAR, strict=False)]
    clear = torch.stack(near).all(0)
    wrong = ~clear & ~(size[:, 0] <= _NOISE * size.max())  # also where it is not a number
    if any_true(wrong):
        raise _SharedEntriesError(
            f"expected every entry of the input of {name!r} to belong to one example; found {int(wrong.sum())} of "
            f"{len(wrong)} that move the outputs of several. Rows of such a model affect each other: use "
            "method='sample', or leave the layer out with select=."
        )
    return torch.where(clear, row, rows)


def _cannot_differentiate(error: Exception) -> OutputError:
    """Say what autograd could not do, and what to do about it."""
    what = f"it raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]} Use method='sample'."
    if _IN_PLACE in str(error):
        what = "it writes over a value that its backward pass needs, as h.add_(f(h)) does. Use method='sample', or "
        what += "write h = h + f(h)."
    elif _INFERENCE in str(error):
        what = "it runs a part in torch.inference_mode(). Use method='sample', or torch.no_grad() where no sites are."
    return OutputError(f"expected a model that autograd can differentiate; {what}")


def _warn_of_silent(network: Network, silent: Sequence[Site], x: Any, readout: Readout) -> None:
    """Warn where the output depends on a site in a way that has no gradient; tried once for each site."""
    tried: set[str] = network.notes.setdefault("silent", set())
    asked = [site for site in silent if site.name not in tried]
    tried.update(site.name for site in asked)
    if not asked or network.random:
        return

    def without(sites: Sequence[Site]) -> Tensor:
        now = Pass(sites, _Zeros(), row_count(x), shared=False)
        return network.quietly(lambda: read(network.output(copied(x), now), readout, row_count(x)).clone())

    try:
        whole = without([])
        moved = [s.name for s in asked if not torch.allclose(without([s]), whole, 1e-3, 1e-6, equal_nan=True)]
    except Exception:  # the model may look at what it computes
        return
    if moved:
        warn(
            f"the output depends on the sites {moved} in a way that has no gradient, as behind detach() or argmax: "
            "first order counts nothing there, and its variance is too small. Use method='sample', or select=.",
            LatedropWarning,
            stacklevel=2,
        )


class _Zeros:
    """Gives zeros: a `Thinner`."""

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        return value * 0.0
