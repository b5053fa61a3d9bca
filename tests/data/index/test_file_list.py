"""Lists of files: what a line may look like, what labels mean, and how wrong lines are told."""

import logging
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from raydali.commands.verify import Verify, main
from raydali.data.index.exclusion import exclude
from raydali.data.index.file_list import FileList, is_list
from raydali.data.index.labeled import LabeledFiles
from raydali.errors import DataError, UsageError
from tests.support.lists import Write
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.trees import bytes_of, grow, samples


def relative(files: FileList, root: Path) -> list[tuple[str, str]]:
    return [(path.removeprefix(f"{root}/"), files.classes[label]) for path, label in samples(files)]


PLAIN = [("cat/1.jpg", "cat"), ("dog/a, b.jpg", "dog"), ("cat/2.jpg", "cat")]


@pytest.mark.parametrize(
    "text",
    [
        'cat/1.jpg,cat\n"dog/a, b.jpg",dog\ncat/2.jpg,cat\n',
        'path,label\ncat/1.jpg,cat\n"dog/a, b.jpg",dog\ncat/2.jpg,cat',
        '\ufeffFile name,Class\r\ncat/1.jpg,cat\r\n"dog/a, b.jpg",dog\r\n\r\ncat/2.jpg,cat\r\n\r\n',
        '\r\n  \r\nimage,class\rcat/1.jpg,cat\r"dog/a, b.jpg",dog\rcat/2.jpg,cat\r',
        "cat/1.jpg\tcat\ndog/a, b.jpg\tdog\ncat/2.jpg\tcat\n",
        '\ufeffimage\tclass\ncat/1.jpg\t"cat"\n"dog/a, b.jpg"\tdog\n cat/2.jpg\t cat \n',
        '  cat/1.jpg , cat\n "dog/a, b.jpg", dog\n"cat/2.jpg",cat\n',
        'cat/1.jpg,"cat"  \n"dog/a, b.jpg" , dog \n  cat/2.jpg , "cat"\n',
        'cat/1.jpg\tcat \n "dog/a, b.jpg" \tdog \n"cat/2.jpg"\t cat\n',
        "cat/1.jpg;cat\ndog/a, b.jpg;dog\ncat/2.jpg;cat\n",
        '\ufefffile name;the class\r\n"cat/1.jpg";"cat"\r\ndog/a, b.jpg;dog\r\n cat/2.jpg ; cat\r\n',
    ],
)
def test_the_same_list_in_many_dialects(text: str, write: Write, tmp_path: Path) -> None:
    files = FileList.from_file(write(text))
    assert relative(files, tmp_path) == PLAIN
    assert files.classes == ("cat", "dog") and files.labels.dtype == np.int64
    assert files.root == str(tmp_path)


def test_what_is_listed_is_read(write: Write) -> None:
    files = FileList.from_file(write('cat/2.jpg,1\n"dog/""c"".jpg",0\ndog/"c".jpg,0\ncat/1.jpg,1\n'))
    expected = [b"content of cat/2.jpg", *[b'content of dog/"c".jpg'] * 2, b"content of cat/1.jpg"]
    assert bytes_of(files.contents(np.arange(4))) == expected


def test_what_stands_between_quotes_counts(write: Write, tmp_path: Path) -> None:
    grow(tmp_path, [" 1.jpg", '2" ,.jpg'])
    files = FileList.from_file(write('" 1.jpg",a\n"2"" ,.jpg",b\n'))
    assert relative(files, tmp_path) == [(" 1.jpg", "a"), ('2" ,.jpg', "b")]


def test_roots(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write("1.jpg,a\n2.jpg,b\n")
    for root in (f"{tmp_path}/cat", "cat/", "~/cat"):
        files = FileList.from_file("~/list.csv", root)
        assert samples(files) == [(f"{tmp_path}/cat/1.jpg", 0), (f"{tmp_path}/cat/2.jpg", 1)]
    assert files.relocate("/moved").fingerprint == files.fingerprint

    write(f"cat/1.jpg,a\n{tmp_path}/elsewhere/3.jpg,b\n")
    assert samples(FileList.from_file("list.csv"))[1] == (f"{tmp_path}/elsewhere/3.jpg", 1)


def test_any_name_of_a_file(tmp_path: Path, nasty: Path) -> None:
    scanned = LabeledFiles.scan(str(nasty))
    lines = [
        '"{}",{}'.format(scanned.path(id).removeprefix(f"{nasty}/").replace('"', '""'), scanned.classes[label])
        for id, label in enumerate(scanned.labels.tolist())
        if Path(scanned.path(id)).is_file()
    ]
    (tmp_path / "list.txt").write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    listed = FileList.from_file(str(tmp_path / "list.txt"), str(nasty))
    expected = [(path, scanned.classes[label]) for path, label in samples(scanned) if Path(path).is_file()]
    assert [(path, listed.classes[label]) for path, label in samples(listed)] == expected
    assert listed.classes == scanned.classes


@pytest.mark.parametrize(
    ("first", "is_header"),
    [
        ("path,label", True),
        ("bare,label", False),  # there is such a file
        ("nowhere,0", False),  # a header's label is no number
        ("nowhere.jpg,label", False),
        ("no/where,label", False),
    ],
)
def test_what_a_header_is(first: str, is_header: bool, write: Write) -> None:
    path = write(f"{first}\ncat/1.jpg,cat\n")
    if is_header:
        assert len(FileList.from_file(path)) == 1
    elif first.startswith("bare"):
        assert len(FileList.from_file(path)) == 2
    else:
        assert FileList.from_file(path).missing == (0,)


@pytest.mark.parametrize(
    ("labels", "classes", "warning"),
    [
        (["cat", "dog", "ape"], ("ape", "cat", "dog"), ""),
        ([10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0], tuple(map(str, range(11))), ""),
        ([1, 2, 10], ("1", "2", "10"), "3 classes '1' '2' '10'"),
        (["01", "1.0", "0", "1"], ("0", "01", "1", "1.0"), "4 classes"),
        ([-1, 1], ("-1", "1"), "2 classes '-1' '1'"),
        (["0.0", "1.0", "10.0", "2.0"], ("0.0", "1.0", "2.0", "10.0"), "4 classes"),
        ([0, 1, "l"], ("0", "1", "l"), "3 classes"),
        (["7"], ("7",), "1 class '7'"),
        (["none", "inf"], ("inf", "none"), ""),
        ([0, 1, 3], ("0", "1", "3"), "2 3 classes '0' '1' '3'"),
        ([0, "0.333", 1], ("0", "0.333", "1"), "3 classes '0' '0.333' '1'"),
        ([3, "cat"], ("3", "cat"), "'3' 'cat' numbers words"),
    ],
)
def test_labels(
    labels: Sequence[object],
    classes: tuple[str, ...],
    warning: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    grow(tmp_path, [f"{i}.jpg" for i in range(len(labels))])
    (tmp_path / "list.csv").write_text("\n".join(f"{i}.jpg,{label}" for i, label in enumerate(labels)))
    with caplog.at_level(logging.WARNING):
        files = FileList.from_file(str(tmp_path / "list.csv"))
    assert files.classes == classes
    assert [files.classes[label] for label in files.labels] == [str(label) for label in labels]
    assert mentions(caplog.text, warning) if warning else not caplog.text


def test_measurements_are_no_labels(write: Write) -> None:
    with pytest.raises(UsageError, match=mentioning("list.csv 50 labels 50 lines '0.49' --label-column")):
        FileList.from_file(write("".join(f"cat/1.jpg,0.{i:02}\n" for i in range(50))))


@pytest.mark.parametrize("absent", ["nan", "NaN", "<NA>", "#N/A"])
def test_what_pandas_writes_without_a_label_is_no_class(absent: str, write: Write) -> None:
    path = write(f"path,label\ncat/1.jpg,cat\ncat/2.jpg,{absent}\n")
    with pytest.raises(UsageError, match=mentioning(f"{path} 1 2 lines line 3 {absent!r}")):
        FileList.from_file(path)


def test_a_file_with_two_labels(write: Write, tmp_path: Path) -> None:
    path = write("cat/1.jpg,cat\n\ncat/2.jpg,cat\ncat/2.jpg,cat\ncat/2.jpg,dog\ncat/1.jpg,cow\n")
    with pytest.raises(UsageError, match=mentioning(f"{tmp_path}/cat/1.jpg line 1 'cat' line 6 'cow' --multi-label")):
        FileList.from_file(path)
    path = write("path,cat,dog\ncat/1.jpg,1,1\ncat/2.jpg,1,0\ncat/1.jpg,0,0\n")
    with pytest.raises(UsageError, match=mentioning(f"{tmp_path}/cat/1.jpg line 2 'cat' 'dog' line 4 remove")):
        FileList.from_file(path, multi_label=True)


def test_a_list_with_spaces_may_have_semicolons_in_paths(tmp_path: Path) -> None:
    grow(tmp_path, ["a;b.jpg"])
    (tmp_path / "list.txt").write_text("a;b.jpg 3\n")
    assert FileList.from_file(str(tmp_path / "list.txt")).classes == ("3",)


def test_wrong_lines_are_told_together(write: Write) -> None:
    text = 'path,label\n\ncat/1.jpg\ncat/1.jpg,\n,cat\n"cat/1.jpg,cat\ndog/a, b.jpg,dog\nhttp://host/1.jpg,cat\n'
    path = write(text + "cat/1.jpg,cat\n")
    with pytest.raises(UsageError) as error:
        FileList.from_file(path)
    told = str(error.value)
    assert mentions(told, f"6 7 {path} 3 'cat/1.jpg' 4 'cat/1.jpg,' 5 ',cat' path,label") and "3 more" in told
    for line, reason in (
        ('"cat/1.jpg,cat', "quotes"),
        ("dog/a, b.jpg,dog", "3 fields separator quotes"),
        ("http://host/1.jpg,cat", "http://host/1.jpg s3://BUCKET/FOLDER"),
    ):
        with pytest.raises(UsageError, match=mentioning(f"1 of 2 {path} {reason}")):
            FileList.from_file(write(f"cat/1.jpg,cat\n{line}\n"))


def test_of_many_wrong_lines_the_first_are_shown_in_short(write: Write) -> None:
    text = "".join(f"{'gone/' * 99}{i}.jpg\ncat/1.jpg,0\n" for i in range(500))
    with pytest.raises(UsageError) as error:
        FileList.from_file(write(text))
    said = str(error.value)
    assert mentions(said, "500 of 1,000 lines 497")
    assert "\n" not in said and len(said) < 500


def test_a_root_below_which_nothing_is(write: Write, tmp_path: Path) -> None:
    path = write("".join(f"images/{i}.png,{i % 3}\n" for i in range(2100)))
    with pytest.raises(UsageError) as error:
        FileList.from_file(path)
    told = str(error.value)
    assert (
        mentions(told, f"2,100 files {path} 1 2 3 {tmp_path}/images/0.png {tmp_path}/images/2.png --root")
        and "2097 more" in told
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("9,cat/1.jpg\n", "cat/1.jpg column first"),
        ("cat/1,x\n", "cat/1.jpg endings"),
        ("cat\\1.jpg,x\n", "cat\\1.jpg backslashes"),
    ],
)
def test_paths_in_another_column_or_without_endings(text: str, told: str, write: Write) -> None:
    with pytest.raises(UsageError, match=mentioning(told)):
        FileList.from_file(write(text))


def test_some_files_that_are_missing_can_be_left_out(write: Write, tmp_path: Path) -> None:
    path = write("cat/1.jpg,0\ncat/3.jpg,0\n/no/1.jpg,1\ncat,1\ncat/2.jpg,1\ncat/3.jpg,0\n")
    files = FileList.from_file(path)
    assert files.missing == (1, 2, 3, 5) and files.drop([0, 2]).missing == (0, 1, 3)
    named = f"'{tmp_path}/cat/3.jpg', '/no/1.jpg', '{tmp_path}/cat' and 1 more"
    with pytest.raises(UsageError, match=mentioning(f"4 of 6 files {named} --exclude")):
        exclude(None, files)
    (tmp_path / "broken.txt").write_text("/no/1.jpg\n")
    with pytest.raises(UsageError, match=mentioning("3 5 --exclude")):
        exclude(str(tmp_path / "broken.txt"), files)
    with pytest.raises(DataError, match=mentioning("6 of 6 broken")):
        main(Verify(data=path, output=str(tmp_path / "broken.txt"), workers=1))
    (tmp_path / "broken.txt").write_text("".join(f"{files.path(id)}\n" for id in files.missing))
    (rest,) = exclude(str(tmp_path / "broken.txt"), files)
    assert samples(rest) == [(f"{tmp_path}/cat/1.jpg", 0), (f"{tmp_path}/cat/2.jpg", 1)] and not rest.missing


CAFFE = [("cat/1.jpg", "3"), ("dog/a, b.jpg", "0"), ("cat/2.jpg", "3")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cat/1.jpg 3\ndog/a, b.jpg 0\ncat/2.jpg 3\n", CAFFE),
        ('cat/1.jpg   3\r\n"dog/a, b.jpg" 0\r\n  cat/2.jpg 3  \r\n', CAFFE),
        ("path label\ncat/1.jpg 3\n", CAFFE[:1]),
        ("cat/1.jpg long-haired\n", [("cat/1.jpg", "long-haired")]),
        ("cat/1.jpg -1.5\n", [("cat/1.jpg", "-1.5")]),
    ],
)
def test_a_label_behind_a_space(text: str, expected: list[tuple[str, str]], write: Write, tmp_path: Path) -> None:
    assert relative(FileList.from_file(write(text)), tmp_path) == expected


def test_spaces_that_are_no_separators(write: Write) -> None:
    for line in ("my cat.jpg", "cat/1.jpg dog/2"):
        with pytest.raises(UsageError, match=mentioning("1 lines label space")):
            FileList.from_file(write(f"{line}\n"))


@pytest.mark.parametrize(
    ("place", "line", "root"),
    [("list.csv", "1.jpg", "cat"), ("cat/list.csv", "elsewhere/3.jpg", ""), ("cat/list.csv", "y.jpg", "a/work")],
)
def test_a_root_nearby_is_told(
    place: str, line: str, root: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(grow(tmp_path / "a/work", ["y.jpg"]))
    with pytest.raises(UsageError, match=mentioning(f"{line} --root {tmp_path / root}")):
        FileList.from_file(write(f"{line},a\n", place))


@pytest.mark.slow
def test_memory_of_many_lines(tmp_path: Path) -> None:
    names = [f"n{i % 100:08d}/n{i % 100:08d}_{i:05d}.JPEG" for i in range(50_000)]
    for folder in range(100):
        (tmp_path / f"n{folder:08d}").mkdir()
    for name in names:
        os.mknod(tmp_path / name)
    (tmp_path / "list.csv").write_text("".join(f"{name},{i % 100}\n" for i, name in enumerate(names)))
    tracemalloc.start()
    files = FileList.from_file(str(tmp_path / "list.csv"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(files) == len(names) and not files.missing
    assert peak < 100 * len(names) + (6 << 20), "what a part of the lines takes, and 100 bytes a line"


def test_a_file_listed_twice_is_warned_about(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    assert len(FileList.from_file(write("cat/1.jpg,0\ncat/2.jpg,1\ncat/1.jpg,0\n"))) == 3
    assert mentions(caplog.text, "list.csv 1 line")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "list.csv path,label"),
        (b"path,label\r\n\r\n", "lists no files"),
        (b"\xff\xfec\0a\0t\0", "UTF-8 NUL"),
        (None, "list.csv"),
        ("folder", "list.csv"),
    ],
)
def test_what_is_no_list(content: bytes | str | None, message: str, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / "list.csv").write_bytes(content)
    elif content:
        (tmp_path / "list.csv").mkdir()
    with pytest.raises(UsageError, match=mentioning(message)):
        FileList.from_file(str(tmp_path / "list.csv"))


def test_files_in_a_folder_that_cannot_be_listed(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr("os.scandir", refuse)
    assert len(FileList.from_file(write("cat/1.jpg,0\n"))) == 1
    with pytest.raises(UsageError, match=mentioning("1 file line 1 cat/9")):
        FileList.from_file(write("cat/9.jpg,0\n"))


def test_a_list_in_s3(s3: PutObjects) -> None:
    s3("lists", {"lists/train.csv": b"path,label\na/1.jpg,x\ns3://others/2.jpg,y\n", "lists/a/1.jpg": b"one"})
    s3("others", {"2.jpg": b"two", "keys.txt": b"bare,x\nnone,x\n", "bare": b"three"})
    files = FileList.from_file("s3://lists/lists/train.csv")
    assert samples(files) == [("s3://lists/lists/a/1.jpg", 0), ("s3://others/2.jpg", 1)]
    assert bytes_of(files.contents(np.array([1, 0]))) == [b"two", b"one"]
    assert len(FileList.from_file("s3://others/keys.txt")) == 2
    with pytest.raises(UsageError, match=mentioning("s3://lists/none.csv")):
        FileList.from_file("s3://lists/none.csv")


def test_a_local_list_of_objects(s3: PutObjects, write: Write) -> None:
    s3("below", {"cat/1.jpg": b"in S3"})
    files = FileList.from_file(write("cat/1.jpg,a\ncat/none.jpg,b\n"), "s3://below")
    assert files.read(0) == b"in S3" and files.path(1) == "s3://below/cat/none.jpg"
    with pytest.raises(UsageError, match=mentioning("2 below/what?.jpg")):
        FileList.from_file(write("cat/1.jpg,a\nwhat?.jpg,b\n"), "s3://below")


def test_what_names_a_list(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write("", "no-ending")
    (tmp_path / "folder.txt").mkdir()
    for name in ("no-ending", "missing.csv", "missing.TSV"):
        assert is_list(f"{tmp_path}/{name}") and is_list(f"~/{name}")
    assert is_list("s3://bucket/list.txt")
    for name in (str(tmp_path / "folder.txt"), str(tmp_path), "s3://bucket/folder", str(tmp_path / "missing")):
        assert not is_list(name)
