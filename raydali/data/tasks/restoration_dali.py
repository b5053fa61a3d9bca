"""The DALI graph of restoration.py:

    contents of inputs and targets --> decode the window --> flip
    windows, placed by draws from (seed, epoch, id) --^        ^-- flips

On the CPU the pixels are Pillow's, bit for bit; on a GPU JPEGs differ by the rounding of its decoder.
"""

from typing import Any

from nvidia.dali import fn

from raydali.data.tasks.dali_ops import decoder
from raydali.data.tasks.pipeline import Device
from raydali.data.tasks.restoration import Pairs


def pair_graph(
    settings: Pairs, inputs: Any, targets: Any, starts: Any, flips: Any, *, device: Device
) -> tuple[Any, Any]:
    """`Pairs.graph`."""
    options = decoder(device, settings.hw_decoder_load, settings.largest_image)

    def cropped(encoded: Any) -> Any:
        images = fn.decoders.image_slice(encoded, start=starts, shape=settings.crop_size, axes=[0, 1], **options)
        return fn.flip(images, vertical=flips[0], horizontal=flips[1])

    return cropped(inputs), cropped(targets)
