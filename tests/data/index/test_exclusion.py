"""Lists of samples to leave out: any name survives the way from `raydali verify -o` to `--exclude`."""

import os
from pathlib import Path

import pytest

from raydali.commands.verify import Verify, main
from raydali.data.index import files
from raydali.data.index.exclusion import as_line, exclude
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.labeled import LabeledFiles
from raydali.errors import DataError
from tests.support.broken import jpeg
from tests.support.messages import mentioning
from tests.support.trees import grow

NAMES = ["\n.jpg", "a\tb.jpg", "\r.jpg", "a\n#b.jpg", '"q".jpg', '"\t"\\t.jpg', "\\n.jpg", " .jpg", "#.jpg", "b\r.jpg"]
NAMES += [f'"quoted".{os.fsdecode(bytes([byte]))}.jpg' for byte in range(1, 256) if byte != ord("/")]


def test_any_name_survives(tmp_path: Path) -> None:
    grow(tmp_path / "data", [f"class\t{i % 2}/{name}" for i, name in enumerate(NAMES)])
    (tmp_path / "data/class\t0/sound.jpg").write_bytes(jpeg())
    output = tmp_path / "broken.txt"
    with pytest.raises(DataError, match=mentioning(f"{len(NAMES)} {len(NAMES) + 1} samples --exclude")):
        main(Verify(data=str(tmp_path / "data"), output=str(output), workers=1))
    assert len(output.read_bytes().splitlines()) >= len(NAMES) + 1
    (rest,) = exclude(str(output), LabeledFiles.scan(str(tmp_path / "data")))
    assert [rest.path(id) for id in range(len(rest))] == [f"{tmp_path}/data/class\t0/sound.jpg"]


def test_lists_of_before_mean_what_they_meant(tmp_path: Path) -> None:
    names = ['"1".jpg', '"\\n".jpg', "\\t.jpg", "3.jpg", "4.jpg"]
    data = LabeledFiles.scan(str(grow(tmp_path / "data", [f"a/{name}" for name in names])))
    (tmp_path / "list.txt").write_text("".join(f"a/{name}\twhy\r\n" for name in names[:3]) + "a/3.jpg\r\n")
    (rest,) = exclude(str(tmp_path / "list.txt"), data)
    assert [rest.path(id) for id in range(len(rest))] == [f"{tmp_path}/data/a/4.jpg"]


def test_pairs_by_either_image_or_both(tmp_path: Path) -> None:
    grow(tmp_path / "pairs", [f"{part}/{i}\n.jpg" for part in ("img", "gt") for i in range(5)])
    pairs = ImagePairs.scan(str(tmp_path / "pairs"))
    named = [pairs.path(0), pairs.inputs.path(1), pairs.targets.path(3), "img/4\n.jpg"]
    (tmp_path / "list.txt").write_text("".join(as_line(path, "why") for path in named))
    (rest,) = exclude(str(tmp_path / "list.txt"), pairs)
    assert [rest.path(id) for id in range(len(rest))] == [pairs.path(2)]


def test_names_are_looked_at_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = LabeledFiles.scan(str(grow(tmp_path / "data", [f"a/{i}.jpg" for i in range(9)])))
    named = [data.path(id) for id in (0, 3, 5, 8)]
    (tmp_path / "list.txt").write_text("".join(f"{path}\n" for path in named))
    for at_once in range(1, 11):
        monkeypatch.setattr(files, "_PATHS_AT_ONCE", at_once)
        (rest,) = exclude(str(tmp_path / "list.txt"), data)
        assert [rest.path(id)[-5:] for id in range(len(rest))] == [f"{i}.jpg" for i in (1, 2, 4, 6, 7)]
