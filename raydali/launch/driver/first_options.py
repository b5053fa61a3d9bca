"""`--help` of a job: the options that people use first, in groups. `--help-all` shows all options in one list."""

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Annotated, Any, get_type_hints

import tyro

FIRST: Mapping[str, Sequence[str]] = {
    "data": ("data", "val_data", "val_fraction", "label_column", "multi_label"),
    "model": ("model", "weights", "image_size"),
    "training": ("epochs", "batch_size", "learning_rate", "optimizer", "augment", "recipe", "precision", "compile"),
    "where_it_runs": ("workers", "gpu", "no_gpu"),
    "results": ("storage", "name", "checkpoint_every"),
}


def show_first(config: type[Any], prog: str) -> None:
    """Show the first options of a job's class, and those that it declares itself; then leave."""
    known = {each.name: each for each in fields(config)}
    grouped = {name for names in FIRST.values() for name in names}
    own = [name for name in config.__annotations__ if name in known and name not in grouped]
    hints, texts = get_type_hints(config, include_extras=True), _texts(config)
    members = []
    for group, names in {**FIRST, "of_this_job": own}.items():
        shown = [
            (name, Annotated[hints[name], tyro.conf.arg(help=texts.get(name, ""))], _default(known[name]))
            for name in names
            if name in known
        ]
        if shown:
            members.append((group, make_dataclass(group, shown, kw_only=True), field()))
    more = f"{prog} --help-all shows all {len(known)} options."
    config_style = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
    page = make_dataclass("First", members, kw_only=True)
    tyro.cli(page, prog=prog, description=f"{config.__doc__}\n\n{more}", args=["--help"], config=config_style)


def _default(each: Any) -> Any:  # noqa: ANN401 (a field of a dataclass)
    return field() if each.default is MISSING else field(default=each.default)


def _texts(config: type[Any]) -> dict[str, str]:
    """Return the text below each field of a class and its bases, as their source has it."""
    texts = {}
    for base in reversed(config.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for declared, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(declared, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(declared.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts
