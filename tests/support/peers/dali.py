"""NVIDIA DALI with its own reader, set up as its ResNet-50 example is."""

# https://docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/use_cases/pytorch/resnet50/pytorch-resnet50.html
from typing import Any

from tests.support.peers import Batches, Setup, images_of

NAME = "DALI"
PACKAGE = "nvidia.dali"
DISTRIBUTION = "nvidia-dali-cuda120"


def batches(setup: Setup) -> Batches:
    from nvidia.dali import Pipeline, fn
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    on_gpu = setup.device != "cpu"
    given: dict[str, Any] = {"file_root": setup.images}
    if setup.remote:
        files, labels = zip(*images_of(setup.images), strict=True)
        given = {"files": list(files), "labels": list(labels)}
    pipeline = Pipeline(setup.batch_size, setup.threads, 0 if on_gpu else None, prefetch_queue_depth=2)
    with pipeline:
        encoded, labels = fn.readers.file(**given, random_shuffle=True, initial_fill=4096, name="reader")
        decoder = {"device": "mixed", "hw_decoder_load": 0.65} if on_gpu else {"device": "cpu"}
        images = fn.decoders.image_random_crop(encoded, random_area=[0.08, 1.0], **decoder)
        images = fn.resize(images, size=(setup.image_size, setup.image_size))
        images = fn.flip(images, horizontal=fn.random.coin_flip())
        pipeline.set_outputs(images, labels.gpu() if on_gpu else labels)
    pipeline.build()
    loader = DALIGenericIterator(
        pipeline, ["images", "labels"], reader_name="reader", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
    )
    while True:
        for (batch,) in loader:
            yield batch["images"], batch["labels"]
