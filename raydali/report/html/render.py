"""Fills the templates of report.html. They escape whatever they are given, so that no name or error can be markup."""

from functools import cache
from typing import TYPE_CHECKING, Any

from raydali.report.html.text import count

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> bytes:
    """Fill a template of `templates/`; the page is UTF-8, and needs no other file and no network."""
    text = _environment().get_template(template).render(values)
    return text.encode("utf-8", "replace")  # names of files need not be UTF-8


@cache
def _environment() -> "Environment":
    # Imported with the first page: 0.12 s, which the refusal of a mistyped option need not wait for.
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader(__name__.rpartition(".")[0])
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = count
    environment.globals["asset"] = lambda name: Markup(loader.get_source(environment, name)[0])
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment
