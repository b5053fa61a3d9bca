"""Hook of mkdocs that rewrites links out of docs/, which work in the repository only.

mkdocs calls `on_page_markdown` (mkdocs.yml, `hooks`). Links become names; with `repo_url` set, links to its files.
"""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page


def on_page_markdown(markdown: str, *, page: "Page", config: "MkDocsConfig", **_: object) -> str:
    """Rewrite links such as `[jobs/video.py](../jobs/video.py)` of a page."""
    repository = (config.repo_url or "").rstrip("/")
    out_of_docs = "../" * (page.file.src_uri.count("/") + 1)
    outward = re.compile(rf"\[([^]]+)\]\({re.escape(out_of_docs)}([^)\s]+)\)")
    return outward.sub(rf"[\1]({repository}/blob/main/\2)" if repository else r"`\1`", markdown)
