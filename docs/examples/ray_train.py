"""Raydali's loader and measuring in a Ray Train script.

Usage: python docs/examples/ray_train.py FOLDER WORKERS [--gpu]
"""

import sys
import tempfile

import ray.train as rt
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torchvision.models import resnet18

from raydali import Normalized, Stream, TrainImages, labeled_images, make_loader, measured


def train(config: dict[str, str]) -> None:
    """What every worker runs: plain PyTorch, fed and timed by raydali."""
    import torch  # here: were it a global, Ray would try to send `torch.classes` too, because of `images.classes`

    rank, workers, start = rt.get_context().get_world_rank(), rt.get_context().get_world_size(), 0
    images = labeled_images(config["folder"])
    stream = Stream(samples=len(images), epochs=3, batch_size=8, global_batch_size=32, seed=0)
    network = Normalized(resnet18(num_classes=len(images.classes))).to(memory_format=torch.channels_last)
    model = prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    if checkpoint := rt.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt", map_location="cpu")
        network.load_state_dict(saved["model"])
        start = stream.steps_of(saved["stream"])
    where = {"rank": rank, "world_size": workers, "start": start, "device": get_device(), "threads": 2}
    with make_loader("dali", images, TrainImages(image_size=64, seed=0), stream, **where) as loader:
        for epoch in measured(loader):
            for batch in epoch:
                loss = torch.nn.functional.cross_entropy(model(batch["images"]), batch["labels"])
                (loss / stream.micro_batches_of(rank, workers)).backward()
                epoch.add(loss)
                if epoch.ends_step:
                    optimizer.step()
                    optimizer.zero_grad()
            record = epoch.record()
            with tempfile.TemporaryDirectory() as folder:
                torch.save({"model": network.state_dict(), "stream": loader.state_dict()}, f"{folder}/state.pt")
                rt.report(record or {}, checkpoint=rt.Checkpoint.from_directory(folder) if rank == 0 else None)


if __name__ == "__main__":
    scaling = rt.ScalingConfig(num_workers=int(sys.argv[2]), use_gpu="--gpu" in sys.argv)
    run = rt.RunConfig(name="own-loop", failure_config=rt.FailureConfig(max_failures=2))
    print(TorchTrainer(train, train_loop_config={"folder": sys.argv[1]}, scaling_config=scaling, run_config=run).fit())
