"""One kernel for many small tensors, where torch.compile makes a kernel for each of them.

In mixed precision, each step casts each weight, casts its gradient back, and counts the batches of each BatchNorm. For
ResNet-50 these are 160 small kernels. Three operators on lists do the same.
"""

import operator
from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

_CAST = torch.ops.prims.convert_element_type.default
_COPY = torch.ops.aten.copy_.default
_ADD = torch.ops.aten.add.Tensor
_INPUTS = "primals_"
"""The names of the model's inputs, which are its weights first of all; a backward pass has saved tensors, too."""
_KERNELS = operator.getitem, torch.ops.aten.mm.default
"""Operators that compute gradients of weights without a cast: convolution_backward, with several results, and mm."""


@torch.library.custom_op("raydali::cast", mutates_args=())
def cast(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return tensors in another dtype, with the same strides."""
    results = [torch.empty_like(each, dtype=dtype) for each in tensors]
    torch._foreach_copy_(results, tensors)
    return results


@cast.register_fake
def _(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty_like(each, dtype=dtype) for each in tensors]


@torch.library.custom_op("raydali::add_one", mutates_args=("counters",))
def add_one(counters: list[torch.Tensor]) -> None:
    """Add one to counters in place."""
    torch._foreach_add_(counters, 1)


def group(graph: Graph) -> int:
    """Group casts of weights and of their gradients, and counters; return how many operators of lists there are now.

    Args:
        graph: a forward or a backward pass, after all gradients are traced.
    """
    casts = graph.find_nodes(op="call_function", target=_CAST)
    last = graph.output_node()
    weights = [each for each in casts if _source(each).name.startswith(_INPUTS) and _narrows(each)]
    gradients = [each for each in casts if _source(each).target in _KERNELS and list(each.users) == [last]]
    return _group_casts(graph, weights, None) + _group_casts(graph, gradients, last) + _group_counters(graph)


def _source(node: Node) -> Node:
    return node.all_input_nodes[0]


def _narrows(node: Node) -> bool:
    """Return whether it casts from fp32 to a type of 16 bits."""
    return bool(_source(node).meta["val"].dtype == torch.float32 and node.meta["val"].dtype.itemsize == 2)


def _group_casts(graph: Graph, nodes: Iterable[Node], before: Node | None) -> int:
    """Cast all at once, before a node or at the start of the graph; return the number of groups."""
    groups: dict[tuple[torch.dtype, torch.dtype, torch.device], list[Node]] = {}
    for node in nodes:
        of, to = _source(node).meta["val"], node.meta["val"]
        groups.setdefault((of.dtype, to.dtype, to.device), []).append(node)
    found = [(dtype, members) for (_, dtype, _), members in groups.items() if len(members) > 1]
    for dtype, members in found:
        first = next(each for each in graph.nodes if each.op != "placeholder")
        with graph.inserting_before(before or first):
            all_of_them = graph.call_function(cast._opoverload, ([_source(each) for each in members], dtype))
            all_of_them.meta["val"] = [each.meta["val"] for each in members]
            results = [graph.call_function(operator.getitem, (all_of_them, at)) for at in range(len(members))]
        for member, result in zip(members, results, strict=True):
            result.meta = dict(member.meta)
            member.replace_all_uses_with(result)
            graph.erase_node(member)
    return len(found)


def _group_counters(graph: Graph) -> int:
    """Add one to all counters at once; return the number of groups."""
    copies = [each for each in graph.find_nodes(op="call_function", target=_COPY) if _counts(*each.args)]
    if len(copies) < 2:
        return 0
    with graph.inserting_before(copies[0]):
        graph.call_function(add_one._opoverload, ([_source(each) for each in copies],))
    for copy in copies:
        total = copy.all_input_nodes[1]
        graph.erase_node(copy)
        graph.erase_node(total)
    return 1


def _counts(counter: Node, total: Node) -> bool:
    """Return whether the total is the counter plus one, and has no other user."""
    return total.target is _ADD and total.args == (counter, 1) and not total.kwargs and len(total.users) == 1
