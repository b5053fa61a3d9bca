"""Restored images, compared with their targets."""

from collections.abc import Sequence
from typing import Any

from raydali.data.loading.loader import Batch
from raydali.data.sources.image_pairs import ImagePairs
from raydali.inference.kinds.kind import Arrays, Columns, Kind
from raydali.inference.worst import worst_of
from raydali.train.evaluation.restoration import per_image


class Restoration(Kind):
    """Restored images; the outputs are their figures against the targets."""

    noun = "pair"
    legend = "The inputs. Below each: its PSNR, that of the model's output, and the loss."

    def open_labeled(self, data: str, classes: Sequence[str] | None, given: Columns) -> ImagePairs:
        return ImagePairs.scan(data, self.config.inputs, self.config.targets)

    def outputs(self, raw: Any, batch: Batch, source: Any) -> dict[str, Any]:
        """Return "psnr", "ssim", "input_psnr" and "losses", each (n,)."""
        return per_image(raw, batch["inputs"], batch["targets"])

    def evaluation(self, arrays: Arrays, source: ImagePairs, classes: Sequence[str]) -> dict[str, Any]:
        """Find the worst images."""

        def words(place: int) -> tuple[str, str]:
            return f"input {arrays['input_psnr'][place]:.1f} dB", f"output {arrays['psnr'][place]:.1f} dB"

        worst = worst_of(arrays, -arrays["psnr"], source.inputs.path, words)
        return {"metrics": {}, "classes": [], "worst": worst}
