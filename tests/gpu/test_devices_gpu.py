"""A run goes on where it is moved to: from CPUs to GPUs and back, with an optimizer whose state lies on the device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.restoration import BLURRED, Data, train
from raydali.data.builtin.blurred import blurred_folder
from raydali.data.index.image_pairs import ImagePairs
from tests.support.ranks import CPU, LocalSession, Stopped, folder_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
GPU = torch.device("cuda", 0)
STEPS = 12


@pytest.mark.parametrize(("first", "then"), [(CPU, GPU), (GPU, CPU)], ids=["to a GPU", "to a CPU"])
def test_a_run_with_adamw_changes_its_device(tmp_path: Path, first: torch.device, then: torch.device) -> None:
    root = blurred_folder()
    data = Data(*(ImagePairs.scan(f"{root}/{split}", "img", "gt") for split in ("train", "test")))
    config = replace(BLURRED, epochs=2, batch_size=16, global_batch_size=16, crop_size=32, channels=16, ceiling=False)
    config = replace(config, checkpoint_every=STEPS // 2, name="run")
    folder = folder_of(tmp_path)
    with pytest.raises(Stopped):
        train(config, data, LocalSession(folder, device=first, stop_at=STEPS))
    session = LocalSession(folder, device=then)
    saved = session.checkpoints.newest()
    assert saved is not None and saved["stream"]["samples_consumed"] >= 16 * STEPS // 2
    train(config, data, session)
    session.checkpoints.finish()
    assert [row["epoch"] for row in folder.rows("epochs.jsonl")] == [0, 1]
    assert folder.rows("epochs.jsonl")[1]["ranks"][0]["device"] == then.type
