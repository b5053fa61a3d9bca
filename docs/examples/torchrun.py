"""Raydali's loader and measuring without Ray.

Usage: torchrun --nproc-per-node 2 docs/examples/torchrun.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from raydali import Normalized, Stream, TrainImages, labeled_images, make_loader, measured

STATE = Path("state.pt")

dist.init_process_group()
rank, workers, start = dist.get_rank(), dist.get_world_size(), 0
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
images = labeled_images(sys.argv[1])
stream = Stream(samples=len(images), epochs=3, batch_size=8, global_batch_size=32, seed=0)
network = Normalized(resnet18(num_classes=len(images.classes))).to(device).to(memory_format=torch.channels_last)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
if STATE.exists():
    saved = torch.load(STATE, map_location="cpu")
    network.load_state_dict(saved["model"])
    start = stream.steps_of(saved["stream"])
train = TrainImages(image_size=64, seed=0)
with make_loader(
    "dali", images, train, stream, rank=rank, world_size=workers, start=start, device=device, threads=2
) as loader:
    for epoch in measured(loader):
        for batch in epoch:
            loss = torch.nn.functional.cross_entropy(model(batch["images"]), batch["labels"])
            (loss / stream.micro_batches_of(rank, workers)).backward()
            epoch.add(loss)
            if epoch.ends_step:
                optimizer.step()
                optimizer.zero_grad()
        if record := epoch.record():
            print(json.dumps(record), flush=True)
            torch.save({"model": network.state_dict(), "stream": loader.state_dict()}, "state.new")
            Path("state.new").rename(STATE)
dist.destroy_process_group()
