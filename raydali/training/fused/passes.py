"""Replace BatchNorm with addition, ReLU and max-pooling, and attention, in models that torch.compile compiles.

The model itself stays as it is, and so do the names of its parameters and the classes of its layers, so that this works
for any model, such as torchvision's and timm's. Two passes of Inductor do it:

    before gradients    batch_norm -> (+ residual) -> relu      -->  raydali::batch_norm (layers.py)
                        batch_norm -> relu -> max_pool2d        -->  raydali::batch_norm
                        conv2d with a stride of 2               -->  raydali::stem_convolution (layers.py)
                        self-attention                          -->  the same without copies (self_attention)
    after gradients     gradient + another gradient -> backward -->  backward of two gradients

BatchNorm without ReLU is replaced where it is the residual of another one, as in blocks that downsample. What has other
users, layers in evaluation mode, and other activations are left to Inductor. `layers.SyncBatchNorm` is traced as
raydali::batch_norm, and fused with what follows in the same way.
"""

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import constrain_to_fake_tensors, lowerings, make_fallback
from torch.fx import Graph, Node
from torch.nn import functional
from torch.nn.modules.utils import _pair

from raydali.training.fused import kernels, layers, operators, pooling_kernels

_RELUS = functional.relu, torch.relu
_ADDITIONS = operator.add, operator.iadd, torch.add
_SIGNATURES: dict[object, inspect.Signature] = {
    functional.batch_norm: inspect.signature(functional.batch_norm),
    functional.max_pool2d: inspect.signature(functional.max_pool2d_with_indices),  # the other one has no names
    functional.multi_head_attention_forward: inspect.signature(functional.multi_head_attention_forward),
}
_PLAIN = {
    **dict.fromkeys(("bias_k", "bias_v", "key_padding_mask", "attn_mask", "static_k", "static_v")),
    **dict.fromkeys(("add_zero_attn", "need_weights", "use_separate_proj_weight", "is_causal"), False),
}
"""Arguments for which it is attention without masks and further options."""
_WINDOWS = [(size, size) for size in (*pooling_kernels.WINDOWS, 1)] + [False, False]
_FUSED = torch.ops.raydali.batch_norm.default
_SYNCHRONIZED = torch.ops.raydali.batch_norm
"""BatchNorm over ranks, as Dynamo traces it."""
_SIGNATURES[_SYNCHRONIZED] = inspect.signature(layers.batch_norm)
_GRADIENTS = torch.ops.raydali.batch_norm_gradients.default, torch.ops.raydali.batch_norm_pool_gradients.default
_CALLED = (
    *_GRADIENTS,
    torch.ops.raydali.batch_norm_statistics.default,
    torch.ops.raydali.batch_norm_normalize.default,
    torch.ops.raydali.batch_norm_pool.default,
)
_FILES = (__file__, *(str(module.__file__) for module in (kernels, layers, operators, pooling_kernels)))


@cache
def inductor_options() -> dict[str, str | int | bool | Callable[..., object]]:
    """Return the options of torch.compile that fuse.

    Inductor calls the operators as they are. If they are not registered, it does the same, but first torch 2.11 writes
    out the graph before each of them, once for each path through a network with residual blocks: this takes hours.

    They are the same at each call: blocks that are compiled one by one share code only if their options are equal.
    """
    for called in _CALLED:
        if called not in lowerings:
            make_fallback(called, layout_constraint=constrain_to_fake_tensors)
    return {"pre_grad_custom_pass": _Pass(fuse), "post_grad_custom_pre_pass": _Pass(fuse_additions)}


class _Pass(CustomGraphPass):  # type: ignore[misc]  # mypy reads nothing of Inductor
    """A pass that lets Inductor cache what it compiles."""

    def __init__(self, function: Callable[[Graph], int]) -> None:
        self._function = function

    def __call__(self, graph: Graph) -> None:
        self._function(graph)

    def uuid(self) -> tuple[str, bytes]:
        return self._function.__name__, get_hash_for_files(_FILES)


def fuse(graph: Graph) -> int:
    """Replace layers of BatchNorm in training before ReLU, with an addition between them or without; and attention.

    Args:
        graph: the forward pass as Dynamo traces it.

    Returns:
        the number of layers of BatchNorm that are replaced.
    """
    count = 0
    for relu in list(graph.nodes):
        before = relu.args[0] if relu.target in _RELUS and relu.args else None
        if not isinstance(before, Node) or len(before.users) > 1:
            continue
        if _is_training(before):
            _replace([before, relu], None)
            count += 1
        elif before.target in _ADDITIONS and (summands := _summands(before)):
            norm, residual = summands
            if _is_training(residual) and len(residual.users) == 1:
                residual = _replace([residual], None)
                count += 1
            _replace([norm, before, relu], residual)
            count += 1
    fuse_pooling(graph)
    replace_stem(graph)
    replace_attention(graph)
    return count


def fuse_pooling(graph: Graph) -> int:
    """Let layers of BatchNorm and ReLU that are replaced do the max-pooling after them; return how many do."""
    count = 0
    for pool in graph.find_nodes(op="call_function", target=functional.max_pool2d):
        norm, *sizes, ceil_mode, return_indices = _arguments(pool).values()
        windows = [*(_pair(size) for size in sizes), ceil_mode, return_indices]
        if norm.target is _FUSED and len(norm.users) == 1 and windows == _WINDOWS:
            y, residual, *others, relu, is_pooled, group = norm.args
            if relu and residual is None and not is_pooled:
                norm.args = (y, residual, *others, relu, True, group)
                norm.meta = dict(pool.meta)
                pool.replace_all_uses_with(norm)
                graph.erase_node(pool)
                count += 1
    return count


def replace_stem(graph: Graph) -> int:
    """Replace convolutions that may be the stem's; return how many are replaced."""
    convolutions = [
        node
        for node in graph.find_nodes(op="call_function", target=torch.conv2d)
        if node.args[3:] == layers.STEM_SETTINGS
    ]
    for node in convolutions:
        node.target, node.args = torch.ops.raydali.stem_convolution.default, node.args[:3]
    return len(convolutions)


def replace_attention(graph: Graph) -> int:
    """Replace self-attention of `nn.MultiheadAttention`; return how often.

    PyTorch's function copies queries, keys and values out of the projection three times: it separates them, and has the
    sequence before the batch. Kernels of attention read and write them where they are.
    """
    count = 0
    for node in graph.find_nodes(op="call_function", target=functional.multi_head_attention_forward):
        bound = _arguments(node)
        query, outputs = bound["query"], [*node.users]
        if not (query is bound["key"] is bound["value"] and all(bound[name] == _PLAIN[name] for name in _PLAIN)):
            continue
        if query.meta["example_value"].dim() != 3 or any(output.args[1:] != (0,) for output in outputs):
            continue
        projections = (bound[name] for name in ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias"))
        dropout = bound["dropout_p"] if bound["training"] else 0.0
        with graph.inserting_before(node):
            ours = graph.call_function(self_attention, (query, bound["num_heads"], *projections, dropout))
        for output in outputs:
            ours.meta = dict(output.meta)
            output.replace_all_uses_with(ours)
            graph.erase_node(output)
        graph.erase_node(node)
        count += 1
    return count


def self_attention(
    sequences: torch.Tensor,
    heads: int,
    in_weight: torch.Tensor,
    in_bias: torch.Tensor | None,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Return what `functional.multi_head_attention_forward` does for sequences (L, N, E)."""
    batch = sequences.transpose(0, 1)
    projected = functional.linear(batch, in_weight, in_bias).unflatten(-1, (3, heads, -1))
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind()  # (N, heads, L, E / heads)
    attended = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
    return functional.linear(attended.transpose(1, 2).flatten(2), out_weight, out_bias).transpose(0, 1)


def fuse_additions(graph: Graph) -> int:
    """Let backward passes add two gradients, as of an output that two layers use; return how many do.

    Args:
        graph: a forward or a backward pass, after all gradients are traced.
    """
    count = 0
    for node in [node for node in graph.nodes if node.target in _GRADIENTS]:
        total = node.args[0]
        if total.target is torch.ops.aten.add.Tensor and len(total.users) == 1 and not total.kwargs:
            values = [tensor.meta["val"] for tensor in (total, *total.args) if isinstance(tensor, Node)]
            if len({(value.shape, value.dtype, value.stride()) for value in values}) == 1 < len(values) - 1:
                node.args = (*total.args, *node.args[2:])
                graph.erase_node(total)
                count += 1
    return count


def _is_training(node: Node) -> bool:
    """Return whether it is BatchNorm in training, with an average that is known."""
    if node.target is not functional.batch_norm:
        return node.target is _SYNCHRONIZED
    arguments = _arguments(node)
    return arguments["training"] is True and isinstance(arguments["momentum"], float)


def _arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a function by name."""
    bound = _SIGNATURES[node.target].bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _summands(addition: Node) -> tuple[Node, Node] | None:
    """Return the BatchNorm whose result only this addition uses, and the residual; None if there is none."""
    nodes = [summand for summand in addition.args if isinstance(summand, Node)]
    if len(nodes) < 2 or addition.kwargs:
        return None
    # An addition in place changes its first summand, which others may use if it is not the result of BatchNorm.
    for norm, residual in [nodes, nodes[::-1]][: 1 if addition.target is operator.iadd else 2]:
        if _is_training(norm) and len(norm.users) == 1 and len(_input(norm).users) == 1:
            return norm, residual
    return None


def _input(norm: Node) -> Node:
    named = _arguments(norm)
    node: Node = named["y"] if norm.target is _SYNCHRONIZED else named["input"]
    return node


def _replace(nodes: Sequence[Node], residual: Node | None) -> Node:
    """Replace nodes, of which the first is BatchNorm, with one that gives the result of the last one."""
    norm, last = nodes[0], nodes[-1]
    named = _arguments(norm)
    others = [named[name] for name in ("running_mean", "running_var", "weight", "bias", "momentum", "eps")]
    with norm.graph.inserting_before(norm if residual is None else nodes[1]):
        arguments = (_input(norm), residual, *others, last is not norm, False, named.get("group", ""))
        fused = norm.graph.call_function(_FUSED, arguments)
    fused.meta = dict(last.meta)
    last.replace_all_uses_with(fused)
    for node in reversed(nodes):
        norm.graph.erase_node(node)
    return fused
