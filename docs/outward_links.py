"""What the site does to pages before it renders them: links out of docs/, which work in the repository, become names.

mkdocs calls `on_page_markdown` (mkdocs.yml, `hooks`). With `repo_url` set there, they become links to its files.
"""

import re
from typing import Any

OUTWARD = re.compile(r"\[([^]]+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """The page with links such as `[jobs/video.py](../jobs/video.py)` made to fit."""
    repository = (config.repo_url or "").rstrip("/")
    return OUTWARD.sub(rf"[\1]({repository}/blob/main/\2)" if repository else r"`\1`", markdown)
