"""The weights that torchvision and timm publish for a model, from their caches or from the network."""

import http.client
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from raydali.errors import UsageError
from raydali.text import error_line
from raydali.train.models.factories import build_timm, timm_settings
from raydali.train.weights.preprocessing import published_by_torchvision, published_hash

_SECONDS = 20
"""Limit of the wait for a server's next bytes."""


def torchvision_file(model: str) -> Path:
    """Return the file of torchvision's default weights, from the cache of torch.hub; it is downloaded if necessary.

    Raises:
        UsageError: the model has none; the file cannot be downloaded.
    """
    if not published_by_torchvision(model):
        raise UsageError(f"--weights default: no weights are published for --model {model}: give a FILE or a RUN")
    import torchvision

    url = torchvision.models.get_model_weights(model).DEFAULT.url
    file = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if file.exists():
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _short_waits():
            torch.hub.download_url_to_file(url, str(file), published_hash(url), progress=sys.stderr.isatty())
    except (OSError, RuntimeError, http.client.HTTPException) as error:  # RuntimeError: its hash is another
        raise UsageError(
            f"cannot download {url} ({error_line(error)[:60]}): put it into {file.parent}, or give --weights FILE"
        ) from error
    return file


def timm_state(model: str, image_size: int | None) -> dict[str, torch.Tensor]:
    """Return timm's weights for a model, which timm itself adapts to the image size.

    Raises:
        UsageError: the model has none; they cannot be downloaded.
    """
    settings = timm_settings(model)
    if not settings.has_weights:
        raise UsageError(f"--weights default: timm has no weights for --model {model}: give a FILE or a RUN")
    place = f"https://huggingface.co/{settings.hf_hub_id}" if settings.hf_hub_id else settings.url
    try:
        with _short_waits(), _one_attempt():
            built = build_timm(model, settings.num_classes, image_size, pretrained=True)
    except Exception as error:  # clients of hubs raise errors of their own
        raise UsageError(
            f"cannot download {place} ({type(error).__name__}): "
            f"download its model.safetensors elsewhere, and give --weights FILE"
        ) from error
    return dict(built.state_dict())


@contextmanager
def _short_waits() -> Iterator[None]:
    """Limit how long connections wait; torch.hub sets no limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextmanager
def _one_attempt() -> Iterator[None]:
    """Let Hugging Face's client use its cache alone if the hub does not answer once: it would try for a minute."""
    import huggingface_hub

    constants: Any = huggingface_hub.constants
    before = constants.HF_HUB_OFFLINE
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=_SECONDS / 2)
    except Exception:  # of httpx or requests, which depends on the version
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
