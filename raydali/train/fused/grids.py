"""How kernels divide images among their programs.

The settings below do not depend on the GPU, so that results are the same on each.
"""

from dataclasses import dataclass

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton interprets its kernels on the host, as in tests."""
TILE = 4096
"""Elements that a program holds at a time."""
REDUCING = 132 * 6
"""Largest number of programs of a reduction; an H100 or H200 has 132 multiprocessors."""
SWEEPING = 132 * 32
"""Largest number of programs of a kernel without a reduction, which need not be few."""
WARPS = 8
"""Warps of each program."""
STAGES = 3
"""Tiles of each program that are read at a time, asynchronously."""

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Grid:
    """How kernels divide a matrix of rows and columns."""

    rows: int
    columns: int
    elements: int
    """Elements of a tile."""

    @property
    def tile(self) -> dict[str, int]:
        """The rows and columns of a tile, and how a program reads tiles."""
        block_c = min(128, triton.next_power_of_2(self.columns))
        return {"block_r": self.elements // block_c, "block_c": block_c, "stages": STAGES, "num_warps": WARPS}

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles: next to each other, and one above another."""
        return triton.cdiv(self.columns, self.tile["block_c"]), triton.cdiv(self.rows, self.tile["block_r"])

    @property
    def reduction(self) -> tuple[int, int]:
        """The programs of a reduction, each for every `reduction[1]`-th tile of some columns."""
        across, down = self.tiles
        return across, max(1, min(REDUCING // across, down // STAGES))

    @property
    def height(self) -> int:
        """Number of tiles, one above another, of each program of a kernel without a reduction."""
        across, down = self.tiles
        return int(triton.cdiv(across * down, SWEEPING))

    @property
    def sweep(self) -> tuple[int, int]:
        """The programs of a kernel without a reduction."""
        across, down = self.tiles
        return across, int(triton.cdiv(down, self.height))

    @property
    def completion(self) -> dict[str, int]:
        """The partial sums and columns of a program that completes sums."""
        block_s = triton.next_power_of_2(self.reduction[1])
        return {"block_s": block_s, "block_c": max(1, min(32, TILE // block_s)), "num_warps": WARPS}

    @property
    def completing(self) -> tuple[int]:
        """The programs that complete sums."""
        return (triton.cdiv(self.columns, self.completion["block_c"]),)

    def partial(self, like: torch.Tensor) -> Pair:
        """Make room for two partial sums of each program of a reduction."""
        size = (2, self.reduction[1], self.columns)
        first, second = like.new_empty(size, dtype=torch.float32)
        return first, second


def grid_of(y: torch.Tensor, elements: int | None = None) -> Grid:
    """Return how kernels divide images, into tiles of TILE elements or of others."""
    return Grid(y.numel() // y.shape[1], y.shape[1], elements or TILE)
