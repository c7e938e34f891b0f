"""A chunk of draws as a graph of operators, with the keys of the masks as inputs: what the compiler is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from latedrop.errors import LatedropError
from latedrop.masking.masks import hashes
from latedrop.masking.thinning import Thinning
from latedrop.model.calling import call, read
from latedrop.model.rows import copied, repeated, row_count, tensors
from latedrop.model.running import derives, may_derive, quietly
from latedrop.model.scripts import optimized_scripts
from latedrop.model.sites import Site
from latedrop.model.twin import release, twin_of
from latedrop.switches import plain_kernels
from latedrop.torch_inside import contents_of, leaves_and_structure, traced, version_of
from latedrop.variance.engine.options import Sampling
from latedrop.variance.engine.refusing import refuse
from latedrop.variance.engine.shared import SharedLayers, by_draw
from latedrop.variance.moments import out_of_memory

__all__ = [
    "MaskPlace",
    "apart_from_others",
    "fill_up_channels",
    "first_line",
    "lifted",
    "mask_places",
    "settled",
    "split",
    "traced_chunk",
    "written_down",
]

MaskPlace: TypeAlias = "tuple[str, int, tuple[int, ...]]"
"""A mask: its site, the call, and its shape."""


def mask_places(model: nn.Module, x: Any, sites: Sequence[Site], options: Sampling) -> list[MaskPlace]:
    """The masks of one pass, in order."""
    scripts = optimized_scripts(model)
    if scripts:  # torch crashes when it traces them
        refuse(f"parts that torch.jit.optimize_for_inference has made {scripts}")

    def run() -> list[MaskPlace]:
        noted, twin = _Noted(), twin_of(model, own_gradients=may_derive(model))
        thinning, held = Thinning(twin, sites, noted, shared=options.shared), _held(twin)
        before = [version_of(value) for value in held]
        with thinning.passing(x):
            read(call(twin, copied(x)), options.readout, row_count(x))
        release(twin)
        if [version_of(value) for value in held] != before:
            refuse("tensors of its own that it writes into in every pass")
        return list(noted.found)

    with torch.inference_mode(False):  # in which torch does not count what is written
        found = quietly(model, run)
    if derives(model):
        refuse("derivatives inside its forward (torch.autograd.grad)")
    return found


def _held(twin: nn.Module) -> list[Tensor]:
    """The tensors that the modules of a twin hold: a program would write into those of the model."""
    found: list[Tensor] = []
    for module in twin.modules():
        _, own, attributes = contents_of(module)
        found += [*own, *tensors(list(attributes.values()))]
    return found


def traced_chunk(
    model: nn.Module,
    x: Any,
    sites: Sequence[Site],
    options: Sampling,
    places: Sequence[MaskPlace],
    arguments: Sequence[Tensor],
) -> fx.GraphModule:
    """A chunk as a graph `(*inputs, weights, limits, scales, *keys) -> first draw, mean and squares relative to it`."""
    flat, structure = leaves_and_structure(x)
    where = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]

    def chunk(*values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = list(flat)
        for i, value in zip(where, values[: len(where)], strict=True):
            inputs[i] = value
        weights, limits, scales, *keys = values[len(where) :]
        masks = _Hashed(dict(zip(places, keys, strict=True)), [site.name for site in sites], limits, scales)
        outputs = _outputs(model, structure.unflatten(inputs), sites, options, masks, len(weights))
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        count = weights.to(outputs).view(-1, *[1] * (outputs.dim() - 1))
        off = torch.where(count > 0, outputs - outputs[0], 0.0)  # what fills up the last chunk may even be NaN
        mean = off.sum(0) / count.sum()
        return outputs[0], mean, ((off - mean).square() * count).sum(0)

    return written_down(model, chunk, [*(apart_from_others(flat[i]) for i in where), *arguments])


def apart_from_others(value: Tensor) -> Tensor:
    """The same values in an object of their own: what is traced tells its inputs from all else by these."""
    return value.detach()


def written_down(model: nn.Module, function: Callable[..., Any], arguments: list[Tensor]) -> fx.GraphModule:
    """A function that runs a model, as a graph that says the same of all inputs."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    try:
        with plain_kernels() if recurrent else nullcontext():
            graph = traced(function, arguments)
    except LatedropError:
        raise
    except Exception as error:  # the model runs; what it does cannot be written down
        if out_of_memory(error):
            raise
        if "_local_scalar_dense" in str(error):
            refuse("Python code that decides by values of its tensors", error)
        refuse(f"what cannot be traced ({first_line(error)})", error)
    _check(graph)
    return graph


def _outputs(model: nn.Module, x: Any, sites: Sequence[Site], options: Sampling, masks: _Hashed, times: int) -> Tensor:
    """`(times, N, ...)`, of draws that are rows of one batch."""
    rows, twin = row_count(x), twin_of(model, own_buffers=False)
    functional = any(site.weight is not None for site in sites)
    layers = None if functional else SharedLayers(model)
    if layers is not None:
        layers.attach(twin)
    thinning = Thinning(twin, sites, masks, shared=options.shared)
    x = repeated(x, times) if layers is None else layers.inputs(x, times)
    with torch.no_grad(), thinning.passing(x, times):
        output = read(call(twin, x), options.readout, rows * times)
    outputs: Tensor = output.unflatten(0, (times, rows))
    release(twin)
    return outputs


class _Noted:
    """Notes what is asked for, and thins nothing."""

    def __init__(self) -> None:
        self.found: dict[MaskPlace, None] = {}

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        self.found[site.name, call, shape] = None
        return value

    def thin_packed(self, site: Site, *_: Any) -> Tensor:
        refuse(f"packed sequences at site {site.name!r}")


class _Hashed(_Noted):
    """Masks by plain operators, which are compiled into the kernel that makes the layer's input."""

    def __init__(self, keys: dict[MaskPlace, Tensor], names: list[str], limits: Tensor, scales: Tensor) -> None:
        super().__init__()
        self._keys, self._names, self._limits, self._scales = keys, names, limits, scales

    def thin(self, site: Site, call: int, value: Tensor, shape: tuple[int, ...], axis: int | None) -> Tensor:
        """In single precision or better, then rounded."""
        keys, number = self._keys[site.name, call, shape], self._names.index(site.name)
        keep = hashes(keys, prod(shape)).view(len(keys), *shape) >= self._limits[number]
        wide = torch.promote_types(value.dtype, torch.float32)
        mask = torch.where(keep, self._scales[number].to(wide), 0.0)
        if axis is None:
            return (value * mask[0]).to(value.dtype)
        thinned = (by_draw(value, axis, len(keys)) * mask.movedim(0, axis)).to(value.dtype)
        return thinned.flatten(axis, axis + 1)


def _check(graph: fx.GraphModule) -> None:
    """Raise where the graph would not say what the model says: for other draws, or for other inputs."""
    for node in graph.graph.nodes:
        tags = getattr(node.target, "tags", ())
        noise = torch.Tag.nondeterministic_seeded in tags and "scaled_dot_product" not in str(node.target)
        if noise or (torch.Tag.dynamic_output_shape in tags and not _by_numbers(node)):
            why = "noise of its own" if noise else "sizes that depend on values"
            refuse(f"{why} ({node.target})")


def _by_numbers(node: fx.Node) -> bool:
    """Whether rows are picked by their numbers, as many as there are numbers, and not by a mask."""
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    picked: Any = node.args[1]
    kinds = [index.meta["val"].dtype if "val" in index.meta else None for index in picked if index is not None]
    return all(kind in (torch.int64, torch.int32) for kind in kinds)


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def fill_up_channels(graph: fx.GraphModule) -> None:
    """Convolutions in half precision get channels of zeros, up to a multiple of 8, where tensor cores want them.

    The library would do it too, in passes over memory of its own; here it is part of the kernel that makes the input.
    """
    pad, convolution = torch.ops.aten.constant_pad_nd.default, torch.ops.aten.convolution.default
    nodes = graph.graph
    for node in nodes.find_nodes(op="call_function", target=convolution):
        value, weight, bias, *options = node.args
        if weight.op != "get_attr" or options[3] or options[-1] != 1:  # transposed, groups
            continue
        kernel = getattr(graph, weight.target)
        more_out, more_in = ((-channels) % 8 for channels in kernel.shape[:2])
        thin = min(kernel.shape[:2]) < 8  # mostly zeros: other kernels are better at these
        if kernel.dtype not in (torch.float16, torch.bfloat16) or thin or more_out + more_in == 0:
            continue
        behind = [0, 0] * (kernel.dim() - 2)
        with nodes.inserting_before(node):
            value = nodes.call_function(pad, (value, [*behind, 0, more_in], 0.0)) if more_in else value
            weight = nodes.call_function(pad, (weight, [*behind, 0, more_in, 0, more_out], 0.0))
            bias = None if bias is None else nodes.call_function(pad, (bias, [0, more_out], 0.0))
        with nodes.inserting_after(node):
            cut = nodes.call_function(torch.ops.aten.slice.Tensor, (node, 1, 0, kernel.shape[0]))
        node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)
        node.args = (value, weight, bias, *options)
    graph.recompile()


def settled(graph: fx.GraphModule, device: torch.device, model: nn.Module) -> None:
    """Compute now what is made of constants on another device than the program's, as no CUDA graph may wait for it.

    Not of what the model holds, which may be written into.
    """
    elsewhere = [value for value in _held(model) if value.device != device and value.layout is torch.strided]
    held = {value.data_ptr() for value in elsewhere}
    nodes = graph.graph
    for node in list(nodes.nodes):
        sources = [source for source in node.all_input_nodes if source.op == "get_attr"]
        if node.op != "call_function" or not sources or len(sources) < len(node.all_input_nodes):
            continue
        values = {source: getattr(graph, source.target) for source in sources}
        if any(value.device == device or value.data_ptr() in held for value in values.values()):
            continue
        found = node.target(*fx.map_arg(node.args, values.get), **fx.map_arg(node.kwargs, values.get))
        if isinstance(found, Tensor):
            name = f"_settled_{node.name}"
            graph.register_buffer(name, found.detach())
            with nodes.inserting_before(node):
                node.replace_all_uses_with(nodes.get_attr(name))
            nodes.erase_node(node)
    nodes.eliminate_dead_code()
    graph.recompile()


def lifted(graph: fx.GraphModule) -> list[Tensor]:
    """The tensors that a graph holds, which are its first arguments from now on."""
    nodes = graph.graph
    first = next(iter(nodes.nodes))
    given: dict[str, fx.Node] = {}
    for node in nodes.find_nodes(op="get_attr"):
        if node.target not in given:
            with nodes.inserting_before(first):
                given[node.target] = nodes.placeholder(f"held_{len(given)}")
        node.replace_all_uses_with(given[node.target])
        nodes.erase_node(node)
    graph.recompile()
    return [getattr(graph, name).detach() for name in given]


def split(graph: fx.GraphModule, inputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What only the first `inputs` arguments determine, and the rest, which takes its results before all else."""
    nodes = list(graph.graph.nodes)
    arguments = [node for node in nodes if node.op == "placeholder"]
    drawn, given = set(arguments[inputs:]), set(arguments[:inputs])
    for node in nodes:
        if any(source in drawn for source in node.all_input_nodes):
            drawn.add(node)
        elif any(source in given for source in node.all_input_nodes):
            given.add(node)
    crossing = [n for n in nodes if n in given and any(user in drawn for user in n.users)]
    before, after = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in arguments[:inputs] or (node not in drawn and node.op != "output"):
            copies[node] = before.node_copy(node, lambda n: copies[n])
    before.output(tuple(copies[node] for node in crossing))
    copies = {node: after.placeholder(f"ready_{i}") for i, node in enumerate(crossing)}
    for node in nodes:
        if node not in given:
            copies[node] = after.node_copy(node, lambda n: copies[n])
    for part in (before, after):
        part.eliminate_dead_code()
    return fx.GraphModule(graph, before), fx.GraphModule(graph, after)
