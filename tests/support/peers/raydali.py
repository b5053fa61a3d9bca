"""raydali's loader, as its jobs make it."""

from tests.support.peers import Batches, Setup

NAME = "raydali"
PACKAGE = DISTRIBUTION = "raydali"


def batches(setup: Setup) -> Batches:
    from raydali.data.index.labeled import LabeledFiles
    from raydali.data.load.make import make_loader
    from raydali.data.stream.stream import Stream
    from raydali.data.tasks.classification import TrainImages
    from raydali.extras import has_dali
    from raydali.host import hardware

    if setup.device != "cpu":
        hardware.set_max_connections()
    source = LabeledFiles.scan(setup.images)
    size = setup.batch_size
    order = Stream(samples=len(source), epochs=1 << 20, batch_size=size, global_batch_size=size, seed=0)
    pipeline = TrainImages(seed=0, image_size=setup.image_size)
    with make_loader(
        "dali" if has_dali() else "torch", source, pipeline, order, device=setup.device, threads=setup.threads
    ) as loader:
        for batch in loader:
            yield batch["images"], batch["labels"]
