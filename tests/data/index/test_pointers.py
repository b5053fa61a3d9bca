"""A file that Git LFS or git-annex has not fetched is named with the command that fetches it, whatever it should be."""

from collections.abc import Callable
from pathlib import Path

import pytest

from raydali.commands.verify import Kind, Verify, main
from raydali.data.index.coco import Coco
from raydali.data.index.formats import labeled_images, unlabeled_files
from raydali.data.index.labeled import IMAGE_EXTENSIONS
from raydali.data.read.storage import why_pointer
from raydali.errors import DataError, UsageError
from raydali.training.weights.reading import read_state
from tests.support.broken import jpeg
from tests.support.messages import mentioning, mentions
from tests.support.tars import tar_cache  # noqa: F401 (a fixture)
from tests.support.videos import moving, write_video

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
ANNEX = b"/annex/objects/MD5E-s123--0123456789abcdef.jpg\n"

OPENED: dict[str, Callable[[str], object]] = {
    "0.tar": labeled_images,
    "0.parquet": labeled_images,
    "train.tfrecord": labeled_images,
    "list.csv": labeled_images,
    "paths.csv": lambda path: unlabeled_files(path, None, IMAGE_EXTENSIONS),
    "boxes.json": lambda path: Coco.from_file(path, str(Path(path).parent)),
    "model.safetensors": lambda path: read_state(Path(path).read_bytes(), path),
    "model.pth": lambda path: read_state(Path(path).read_bytes(), path),
}


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.usefixtures("tar_cache")
def test_files_of_every_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LFS)
    with pytest.raises(UsageError, match=mentioning(f"{tmp_path}/{name} Git LFS `git lfs pull`")):
        OPENED[name](str(tmp_path / name))


@pytest.mark.parametrize(("kind", "ending"), [("images", "jpg"), ("videos", "mp4")])
def test_samples(tmp_path: Path, kind: Kind, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    for place, content in (("a/1", b""), ("b/1", LFS), ("b/2", ANNEX)):
        (path := tmp_path / f"{place}.{ending}").parent.mkdir(exist_ok=True)
        if content:
            path.write_bytes(content)
        elif kind == "videos":
            write_video(path, moving(2), "h264")
        else:
            path.write_bytes(jpeg())
    with pytest.raises(DataError, match=mentioning("2 broken 3")):
        main(Verify(data=str(tmp_path), kind=kind, workers=1))
    told = capsys.readouterr().out
    assert mentions(told, f"{tmp_path}/b/1.{ending} Git LFS `git lfs pull`")
    assert mentions(told, f"{tmp_path}/b/2.{ending} git-annex `git annex get .`")


def test_what_is_no_pointer() -> None:
    assert why_pointer(LFS[:12]) and why_pointer(ANNEX[:12])
    assert not any(map(why_pointer, (b"", LFS[:11], b"version 2 of this", b"/annex.jpg,cat\n", jpeg())))
