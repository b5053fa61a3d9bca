"""Matches weights with a model: what fits is loaded, a head for other classes is new, and the rest is named."""

import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from raydali.errors import UsageError
from raydali.text import plural, summarize
from raydali.training.finetuning import expression
from raydali.training.models.classification import head_names, on_meta, tensor_shapes
from raydali.training.weights.reading import State, Weights

Build = Callable[[int], nn.Module]
BODY_SHARE = 0.9
"""Share of the body's elements that must be loaded."""
_WRAPPERS = re.compile(r"(^|(?<=\.))((_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|module)\.)+")
"""What torch.compile, activation checkpointing, FSDP and DDP add to names, wherever they wrap a part of a model."""
_OF_OLD_DENSENETS = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.\w+$)")
"""When the weights of torchvision's DenseNets were saved, the layer `norm1` had the name `norm.1`."""


@dataclass(frozen=True)
class MatchedWeights:
    """Weights that fit a model.

    Attributes:
        origin: where they are from, for messages.
        sha256: see `Weights`.
        loaded: names of the tensors that are loaded.
        skipped: names that are only in the file, or have another shape there, or belong to a head of other classes.
        missing: names that are only in the model, which keep their initial values. Counters of BatchNorm, which old
            files lack, are not among them.
        new_head: names of the model's head, if it is new; empty if it is loaded.
        classes: number of classes of the model.
        earlier_classes: number of classes of the head in the file, if it can be told.
        state: the tensors to load.
    """

    origin: str
    sha256: str
    loaded: tuple[str, ...]
    skipped: tuple[str, ...]
    missing: tuple[str, ...]
    new_head: tuple[str, ...]
    classes: int
    earlier_classes: int | None
    state: State = field(repr=False)

    def load(self, model: nn.Module) -> None:
        """Load the tensors into a model, on any device; all else in it keeps its values.

        Raises:
            ValueError: the model is not the one that the weights were matched with.
        """
        own = model.state_dict()
        wrong = [name for name, value in self.state.items() if name not in own or own[name].shape != value.shape]
        if wrong:
            raise ValueError(f"weights of another model: {summarize(wrong)}")
        with torch.no_grad():
            for name, value in self.state.items():
                own[name].copy_(value)

    def describe(self) -> list[str]:
        """Return the lines for the console: what is loaded and what is new, then what did not match, if any."""
        head = "the head is loaded, too"
        if self.new_head:
            before = f" instead of {self.earlier_classes:,}" if self.earlier_classes not in (None, self.classes) else ""
            head = f"the head is new ({plural(self.classes, 'class')}{before}): {summarize(self.new_head)}"
        lines = [f"weights: {plural(len(self.loaded), 'tensor')} of {self.origin}; {head}"]
        rest = {"not loaded": self.skipped, "left at initial values": self.missing}
        others = {what: [name for name in names if name not in self.new_head] for what, names in rest.items()}
        if text := "; ".join(f"{what}: {summarize(names)}" for what, names in others.items() if names):
            lines.append(f"weights: {text}")
        return lines


def match(
    weights: Weights,
    build: Build,
    classes: int,
    class_names: Sequence[str] | None = None,
    new_layers: str | None = None,
) -> MatchedWeights:
    """Match weights with a model by names and shapes.

    Names of wrappers such as `_orig_mod.` are left out, and first parts of names, such as `backbone.`, if more names
    match then. A file may have only a part of the model, as a classifier has the backbone of a detector; the rest of
    the body is new then. The head is loaded whole or not at all.

    Args:
        weights: what was read.
        build: makes the model for a number of classes; it is only called to look at shapes.
        classes: the number of classes.
        class_names: the classes in order. The head of a run of other classes, or of another order, is not loaded.
        new_layers: regular expression of the beginnings of names that need not be in the weights.

    Raises:
        UsageError: of the body, or the part of it, the weights have less than nine tenths of the elements, or lack all
            parameters of a layer; some are NaN; the expression is invalid.
    """
    may_lack = expression("--new-layers", new_layers).match if new_layers is not None else lambda _: None
    model = on_meta(partial(build, classes))
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    head = head_names(build, classes)
    state = _adapted(weights.state, model, own)
    before, part = _part_of(state, own)
    inside = {name: part + name.removeprefix(before) for name in state}
    state = {inside[name] if inside[name] in own else name: value for name, value in state.items()}
    fitting = _fitting(state, own)
    others = weights.classes is not None and class_names is not None and weights.classes != tuple(class_names)
    new_head = head if others or not head <= fitting else frozenset[str]()
    loaded = fitting - new_head

    expected = (name for name in own if name not in head and name.startswith(part) and not may_lack(name))
    body = {name: own[name].numel() for name in expected}
    share = sum(body[name] for name in loaded & body.keys()) / max(1, sum(body.values()))
    if share < BODY_SHARE:
        unfit = [name for name in body if name not in fitting]
        raise UsageError(
            f"--weights {weights.origin} has {share:.0%} of this model, not {BODY_SHARE:.0%}: {summarize(unfit, 2)} "
            f"do not fit (the file has {summarize(state, 1)}): check --model and --image-size"
        )
    layers = [(name.rpartition(".")[0], name in loaded) for name, _ in model.named_parameters() if name in body]
    if lacking := sorted({layer for layer, _ in layers} - {layer for layer, fits in layers if fits}):
        raise UsageError(
            f"--weights {weights.origin} has no weights that fit {plural(len(lacking), 'layer')} of this model, "
            f"{summarize(lacking, show=repr)}: check --model, or give --new-layers REGEX to train these anew"
        )
    broken = [name for name in sorted(loaded) if not state[name].isfinite().all()]
    if broken:
        raise UsageError(f"--weights {weights.origin} has infinite values or NaN in {summarize(broken)}: give others")
    missing = own.keys() - state.keys()
    return MatchedWeights(
        origin=weights.origin,
        sha256=weights.sha256,
        loaded=tuple(sorted(loaded)),
        skipped=tuple(sorted(state.keys() - loaded)),
        missing=tuple(sorted(name for name in missing if not name.endswith(".num_batches_tracked"))),
        new_head=tuple(sorted(new_head)),
        classes=classes,
        earlier_classes=len(weights.classes) if weights.classes else _classes_of(state, build, new_head, classes),
        state={name: state[name] for name in own if name in loaded},
    )


def _fitting(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of tensors that can be copied into the model."""
    plain = (name for name, value in state.items() if value.layout == torch.strided and not value.is_quantized)
    return frozenset(name for name in plain if name in own and own[name].shape == state[name].shape)


def _part_of(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> tuple[str, str]:
    """Return what names begin with in the file and in the model, such as `features.` and `backbone.`.

    Both are empty unless three quarters of the file are that part of the model.
    """
    by_rest: dict[tuple[str, torch.Size], list[str]] = {}
    for name, value in state.items():
        for before, rest in _splits(name):
            by_rest.setdefault((rest, value.shape), []).append(before)
    counts = Counter(
        (before, part)
        for name, value in own.items()
        for part, rest in _splits(name)
        for before in by_rest.get((rest, value.shape), ())
    )
    both = max(counts, key=lambda both: (counts[both], -len("".join(both))), default=("", ""))
    return both if counts[both] > max(counts["", ""], 0.75 * len(state)) else ("", "")


def _classes_of(state: Mapping[str, torch.Tensor], build: Build, head: Collection[str], classes: int) -> int | None:
    """Return how many classes the head in the file has, by what one class more adds to each size; None if unclear."""
    here, longer = (tensor_shapes(build, number) for number in (classes, classes + 1))
    sizes = {
        classes + (there - size) / (more - size)
        for name in head
        if name in state and state[name].dim() == len(here[name])
        for there, size, more in zip(state[name].shape, here[name], longer[name], strict=True)
        if more != size
    }
    return int(sizes.pop()) if len(sizes) == 1 else None


# ---------------------------------------------------------------------------------------------------------------------
# Other names and sizes


def _adapted(state: State, model: nn.Module, own: Mapping[str, torch.Tensor]) -> State:
    """Return the tensors under the model's names, with position embeddings for the model's image size."""
    plain = {_WRAPPERS.sub("", name): name for name in own}
    named = ((_WRAPPERS.sub("", name), name) for name in sorted(state, key=own.__contains__))  # the exact names last
    state = {plain.get(short, short): state[name] for short, name in named}
    state = _without_prefix(state, own)
    state = {name if name in own else _OF_OLD_DENSENETS.sub(r"\1\2", name): state[name] for name in state}
    for adapt in (_by_torchvision, _by_timm):
        try:
            adapted = adapt(state, model)
        except Exception:  # of libraries, on weights of another model
            continue
        if len(_fitting(adapted, own)) > len(_fitting(state, own)):
            state = adapted
    return state


def _without_prefix(state: State, own: Collection[str]) -> State:
    """Leave out the first parts of names that hide most of the model's names, unless several hide as many."""
    counts = Counter(prefix for name in state for prefix, rest in _splits(name) if rest in own)
    (prefix, most), (_, next_most) = (*counts.most_common(2), ("", 0), ("", 0))[:2]
    if not prefix or most == next_most:
        return state
    others = {name: value for name, value in state.items() if not name.startswith(prefix)}
    return others | {name.removeprefix(prefix): value for name, value in state.items() if name not in others}


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Split a name before each of its parts: "a.b" into "" and "a.b", and "a." and "b"."""
    ends = [0, *(dot.end() for dot in re.finditer(r"\.", name))]
    return ((name[:end], name[end:]) for end in ends)


def _by_torchvision(state: State, model: nn.Module) -> State:
    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    if not isinstance(model, VisionTransformer):
        return state
    return dict(interpolate_embeddings(model.image_size, model.patch_size, OrderedDict(state)))


def _by_timm(state: State, model: nn.Module) -> State:
    """Apply what timm does to published weights: each of its modules has a function of this name for that."""
    module = type(model).__module__
    adapt = getattr(sys.modules[module], "checkpoint_filter_fn", None) if module.startswith("timm.") else None
    return dict(adapt(dict(state), model)) if adapt else state
