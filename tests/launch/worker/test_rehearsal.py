"""A kept ceiling belongs to the code that it is of."""

import importlib.util
from pathlib import Path
from types import ModuleType

from raydali.launch.worker.run_ceiling import code_of


def imported(file: Path, code: str) -> ModuleType:
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_other_code_of_a_loss_or_a_model_is_another_one(tmp_path: Path) -> None:
    model = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    loss = "def loss(x):\n    return x.mean()\n"
    of_loss, of_model = imported(tmp_path / "the_loss.py", loss).loss, imported(tmp_path / "the_model.py", model).Net()
    before = code_of(of_model, [of_loss, print])
    assert code_of(of_model, [of_loss, print]) == before
    imported(tmp_path / "the_loss.py", loss.replace("mean", "sum"))
    after = code_of(of_model, [of_loss, print])
    assert after != before
    imported(tmp_path / "the_model.py", model.replace("2", "3"))
    assert code_of(of_model, [of_loss, print]) not in (before, after)
