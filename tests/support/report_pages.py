"""Pages of made-up runs, and what stands in them."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

from raydali.report.html.history import History

VOID = {"meta", "link", "img", "br", "path"}


class _Tree(HTMLParser):
    """Refuses tags that do not match; gathers what is read, and the tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.texts.append(data)


def tree(page: bytes) -> _Tree:
    found = _Tree()
    found.feed(page.decode())
    found.close()
    assert not found.open
    return found


def text(page: bytes) -> str:
    return " ".join(" ".join(tree(page).texts).split())


def history(records: list[Any], events: list[Any] | None = None, **settings: Any) -> History:
    made = History("pets", "/runs/pets", settings or {"epochs": 10})
    for row in events or []:
        made.add_event(row)
    for row in records:
        made.add_epoch(row)
    return made


def charts(page: bytes) -> dict[str, Any]:
    """The numbers of each chart by its title."""
    found = re.findall(
        r'<figure class="chart[^"]*"><figcaption>(.*?)<.*?<script type="application/json">(.*?)</script>',
        page.decode(),
        re.DOTALL,
    )
    return {unescape(title): json.loads(data) for title, data in found}
