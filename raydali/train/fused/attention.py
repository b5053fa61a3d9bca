"""Self-attention without copies of queries, keys and values, as a replacement for that of `nn.MultiheadAttention`.

PyTorch's function copies them out of the projection three times: it separates them, and has the sequence before the
batch. Kernels of attention read and write them where they are.
"""

import inspect

import torch
from torch.fx import Graph
from torch.nn import functional

_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)
_PLAIN = {
    **dict.fromkeys(("bias_k", "bias_v", "key_padding_mask", "attn_mask", "static_k", "static_v")),
    **dict.fromkeys(("add_zero_attn", "need_weights", "use_separate_proj_weight", "is_causal"), False),
}
"""Arguments for which it is plain attention."""


def replace_attention(graph: Graph) -> int:
    """Replace self-attention without masks and further options; return how often.

    Args:
        graph: the forward pass as Dynamo traces it.
    """
    count = 0
    for node in graph.find_nodes(op="call_function", target=functional.multi_head_attention_forward):
        bound = _SIGNATURE.bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        given = bound.arguments
        query, outputs = given["query"], [*node.users]
        if not (query is given["key"] is given["value"] and all(given[name] == _PLAIN[name] for name in _PLAIN)):
            continue
        if query.meta["example_value"].dim() != 3 or any(each.args[1:] != (0,) for each in outputs):
            continue
        projections = (given[name] for name in ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias"))
        dropout = given["dropout_p"] if given["training"] else 0.0
        with graph.inserting_before(node):
            ours = graph.call_function(self_attention, (query, given["num_heads"], *projections, dropout))
        for each in outputs:
            ours.meta = dict(each.meta)
            each.replace_all_uses_with(ours)
            graph.erase_node(each)
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
