"""Pairs of images: which belong together, what is refused by name, what is sent to the workers."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from raydali.data.index.image_pairs import ImagePairs, in_splits
from raydali.errors import UsageError
from tests.support.messages import mentioning
from tests.support.object_stores import PutObjects
from tests.support.trees import grow, read_by_dali

PAIRS = ["img/b/1.jpg", "gt/b/1.PNG", "img/a b/\u00fc.x.png", "gt/a b/\u00fc.x.png", "img/a/c/2.JPEG", "gt/a/c/2.jpeg"]
BESIDES = ["img/b/notes.txt", "gt/b/Thumbs.db", "other/b/3.jpg", "4.jpg"]


def pairs_of(source: ImagePairs) -> list[tuple[str, str]]:
    return [
        (source.inputs.path(id).removeprefix(source.inputs.root), source.targets.path(id).removeprefix(str(source)))
        for id in range(len(source))
    ]


SORTED = [
    ("/img/a b/\u00fc.x.png", "/gt/a b/\u00fc.x.png"),
    ("/img/a/c/2.JPEG", "/gt/a/c/2.jpeg"),
    ("/img/b/1.jpg", "/gt/b/1.PNG"),
]


def test_the_same_path_makes_a_pair(tmp_path: Path) -> None:
    source = ImagePairs.scan(str(grow(tmp_path, PAIRS + BESIDES)))
    assert pairs_of(source) == SORTED
    assert str(source) == str(tmp_path)
    assert source.path(2) == f"{tmp_path}/img/b/1.jpg and {tmp_path}/gt/b/1.PNG"
    contents = [read_by_dali(files.encoded_paths(np.arange(3))) for files in (source.inputs, source.targets)]
    assert contents == [[Path(pair[i]).read_bytes() for pair in _absolute(tmp_path)] for i in (0, 1)]


def _absolute(root: Path) -> list[tuple[str, str]]:
    return [(f"{root}{one}", f"{root}{other}") for one, other in SORTED]


def test_other_names_of_folders(tmp_path: Path) -> None:
    grow(tmp_path, [path.replace("img", "blurry").replace("gt", "deep/sharp") for path in PAIRS])
    source = ImagePairs.scan(str(tmp_path), inputs="blurry/", targets="deep/sharp")
    assert source.path(2) == f"{tmp_path}/blurry/b/1.jpg and {tmp_path}/deep/sharp/b/1.PNG"


def test_s3_is_as_local(s3: PutObjects, tmp_path: Path) -> None:
    local = ImagePairs.scan(str(grow(tmp_path, PAIRS + BESIDES)))
    objects = {f"data/{file}": (tmp_path / file).read_bytes() for file in PAIRS + BESIDES}
    s3("pairs", objects | {"data/img/": b"", "data/img/b/": b""})
    remote = ImagePairs.scan("s3://pairs/data/")
    assert pairs_of(remote) == SORTED
    assert remote.fingerprint == local.fingerprint == local.relocate("s3://pairs/data").fingerprint
    assert remote.path(2) == local.relocate("s3://pairs/data/").path(2)
    assert read_by_dali(remote.targets.encoded_paths(np.array([2]))) == [b"content of gt/b/1.PNG"]
    with pytest.raises(UsageError, match=mentioning("s3://pairs/nowhere/img")):
        ImagePairs.scan("s3://pairs/nowhere")


def test_fingerprint_is_of_the_pairs_not_the_place(tmp_path: Path) -> None:
    def fingerprint(name: str, files: list[str]) -> str:
        return ImagePairs.scan(str(grow(tmp_path / name, files))).fingerprint

    base = fingerprint("base", PAIRS)
    assert fingerprint("moved", PAIRS + BESIDES) == base
    assert fingerprint("fewer", PAIRS[:4]) != base
    renamed = [path.replace("gt/b/1.PNG", "gt/b/1.jpg") for path in PAIRS]
    assert fingerprint("renamed", renamed) != base


def test_pickle_shares_its_buffers(tmp_path: Path) -> None:
    source = ImagePairs.scan(str(grow(tmp_path, PAIRS)))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(source, protocol=5, buffer_callback=buffers.append)
    copy = pickle.loads(data, buffers=[memoryview(buffer).toreadonly() for buffer in buffers])
    assert np.shares_memory(copy.targets.packed_paths, source.targets.packed_paths)
    assert pairs_of(copy) == pairs_of(source) and copy.fingerprint == source.fingerprint


MANY = [f"{folder}/{i}.png" for folder in ("img", "gt") for i in range(9)]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "img images"),
        (["img/1.jpg"], "images"),
        (["img/1.jpg", "gt"], "file images"),
        (["img/1.txt", "gt/1.txt"], "/img .jpg"),
        (["img/1.jpg", "gt/1.txt"], "/gt .jpg"),
        (
            [*MANY, "img/a/1.jpg", "gt/b/1.jpg", "gt/b/2.jpg", "gt/c/2.jpg", "gt/c/3.jpg"],
            "1 a/1 4 b/1 b/2 c/2",
        ),
        ([*MANY, "gt/b/1.jpg"], "1 b/1"),
        ([*MANY, "img/1.jpg"], "img/1.jpg img/1.png"),
        ([*MANY, "gt/1.jpg"], "gt/1.jpg gt/1.png"),
    ],
)
def test_what_is_no_pairs_is_refused_by_name(tmp_path: Path, files: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)) as error:
        ImagePairs.scan(str(grow(tmp_path, files)))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_roots_of_other_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match=mentioning("http://host/x")):
        ImagePairs.scan("http://host/x")


def test_pairs_in_one_folder_are_split(tmp_path: Path) -> None:
    grow(tmp_path, [f"{part}/{i}.png" for part in ("img", "gt") for i in range(40)])
    train, val = in_splits(str(tmp_path), ("train", "test"), "img", "gt", None)
    assert len(train) + len(val) == 40 and 0 < len(val) < 10
    assert not {*map(train.path, range(len(train)))} & {*map(val.path, range(len(val)))}
    folds = [
        in_splits(str(tmp_path), ("train", "test"), "img", "gt", fold=f"{i}/4", val_group=r"(\d)\.")[1]
        for i in (1, 2, 3, 4)
    ]
    assert sorted(path for fold in folds for path in fold.relative_paths()) == sorted(f"img/{i}.png" for i in range(40))
    assert all(len({path[-5] for path in fold.relative_paths()}) == len(fold) // 4 for fold in folds)
    (tmp_path / "train").mkdir()
    with pytest.raises(UsageError, match=mentioning("--val-fraction 0.5 img/ gt/")):
        in_splits(str(tmp_path), ("train", "test"), "img", "gt", 0.5)
