"""Pairs of images, an input and its target, for restoration."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from raydali.data.index.file_rules import SkippedFiles, select_files
from raydali.data.index.files import Files, absolute, digest
from raydali.data.index.labeled import IMAGE_EXTENSIONS
from raydali.data.index.listing import list_tree
from raydali.data.index.validation_set import Split, split
from raydali.data.read.storage import is_folder
from raydali.errors import UsageError
from raydali.text import plural, summarize


@dataclass(frozen=True, eq=False)
class ImagePairs:
    """N pairs by id 0..N-1, sorted by path. Made by `scan`.

    Attributes:
        inputs, targets: N files each, below one root; an input and a target with the same id are a pair.
        skipped: how many other files, which may be images, were ignored, per kind.
    """

    inputs: Files
    targets: Files
    skipped: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def scan(cls, root: str, inputs: str = "img", targets: str = "gt") -> Self:
        """Index the images that have the same path in two folders, such as img/scene/1.jpg and gt/scene/1.png.

        Args:
            root: a local path (`~` is expanded), or an `s3://` or `gs://` URI, opened as
                `storage.file_system` describes.
            inputs: the folder of the inputs, below the root.
            targets: the folder of the targets.

        Raises:
            UsageError: no such folder or bucket, or no right to read it; no images; images without a partner; two
                images that differ only in their extensions; an object whose name DALI cannot read.
        """
        root, inputs, targets = absolute(root), inputs.strip("/"), targets.strip("/")
        skipped = SkippedFiles()
        of_inputs, of_targets = _images(root, inputs, skipped), _images(root, targets, skipped)
        skipped.warn(root, IMAGE_EXTENSIONS)
        unmatched = [
            f"{plural(len(stems), 'image')} in {folder} without one in {other}: {summarize(sorted(stems), show=repr)}"
            for folder, other, stems in (
                (inputs, targets, of_inputs.keys() - of_targets.keys()),
                (targets, inputs, of_targets.keys() - of_inputs.keys()),
            )
            if stems
        ]
        if unmatched:
            raise UsageError(
                f"{root} has images without a partner ({'; '.join(unmatched)}): add images with the same names (any "
                f"extension), or remove these"
            )
        order = sorted(of_inputs)
        return cls(
            Files.from_list(root, [of_inputs[stem] for stem in order]),
            Files.from_list(root, [of_targets[stem] for stem in order]),
            skipped.kinds,
        )

    def __len__(self) -> int:
        """N."""
        return len(self.inputs)

    def __str__(self) -> str:
        """For messages: the root."""
        return str(self.inputs)

    def relocate(self, root: str) -> Self:
        """The same index for a copy of the data at another root; does not check that the files exist.

        Raises:
            UsageError: an unknown kind of root.
        """
        return replace(self, inputs=self.inputs.relocate(root), targets=self.targets.relocate(root))

    def drop(self, ids: Iterable[int]) -> Self:
        """The index without these pairs; the ids of those after them change."""
        left_out = list(ids)
        return replace(self, inputs=self.inputs.drop(left_out), targets=self.targets.drop(left_out))

    def relative_paths(self) -> Iterator[str]:
        """Yield the paths of the inputs, relative to the root."""
        return self.inputs.relative_paths()

    def path(self, id: int) -> str:
        """The absolute paths or URIs of a pair, for messages."""
        return f"{self.inputs.path(id)} and {self.targets.path(id)}"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the relative paths, 32 hex digits; without the root, so that the data may move."""
        return digest(self.inputs.packed_paths.data, self.targets.packed_paths.data)


def in_splits(
    root: str,
    splits: tuple[str, str],
    inputs: str,
    targets: str,
    val_fraction: float | None = None,
    fold: str | None = None,
    val_group: str | None = None,
) -> list[ImagePairs]:
    """Index the pairs in the two folders of `splits`, or split the pairs of a root that has inputs and targets itself.

    Args:
        root: see `ImagePairs.scan`.
        splits: the names of the folders of training and of validation pairs.
        inputs: see `ImagePairs.scan`.
        targets: see `ImagePairs.scan`.
        val_fraction: the share that validates if they are split, see `Split`. None: 0.1.
        fold: K/N, of which the K-th of N folds validates.
        val_group: which pairs stay together.

    Raises:
        UsageError: they cannot be indexed, or there is nothing to split.
    """
    asked = Split(val_fraction, fold, val_group)
    root = absolute(root)
    if is_folder(f"{root}/{targets}") and not is_folder(f"{root}/{splits[0]}"):
        return [*split(ImagePairs.scan(root, inputs, targets), asked)]
    if asked:
        raise UsageError(f"{asked} splits {inputs}/ and {targets}/, which {root} lacks: leave it out")
    return [ImagePairs.scan(f"{root}/{folder}", inputs, targets) for folder in splits]


def _images(root: str, folder: str, skipped: SkippedFiles) -> dict[str, str]:
    """Find a folder's images: paths below the root, by path in the folder without extension. Counts other files."""
    images: dict[str, str] = {}
    selected, others = select_files(list_tree(f"{root}/{folder}", of="images"), IMAGE_EXTENSIONS)
    skipped.kinds.update(others.kinds)
    skipped.folders.update({folder: sum(others.folders.values())} if others.folders else {})
    for subfolder, names in selected.items():
        for name in names:
            path = f"{subfolder}/{name}".lstrip("/")
            stem = path.rpartition(".")[0]
            if stem in images:
                one, other = sorted((images[stem], f"{folder}/{path}"))
                raise UsageError(f"{root} has both {one!r} and {other!r}: remove one of them")
            images[stem] = f"{folder}/{path}"
    if not images:
        raise UsageError(f"{root}/{folder} has no images: give files that end in {', '.join(IMAGE_EXTENSIONS)}")
    return images
