"""Lists with several columns: the one that holds the labels, or a column for each label."""

import pytest

from raydali.data.index.file_list import FileList
from raydali.errors import UsageError
from tests.support.lists import Write
from tests.support.messages import mentioning, mentions

ELPV = "cat/1.jpg  1.0   mono\ncat/2.jpg  0.333  poly\n"
TABLE = 'file,"a, b",type\ncat/1.jpg,1,mono\ncat/2.jpg,0,poly\n'


@pytest.mark.parametrize(
    ("text", "column", "labels"),
    [
        (ELPV, "1", ["1.0", "0.333"]),
        (ELPV, "2", ["mono", "poly"]),
        ('"cat/1.jpg" x mono 3\n  "cat/2.jpg" y  poly  4 \n', "2", ["mono", "poly"]),
        ("path prob type\n" + ELPV, "type", ["mono", "poly"]),
        (TABLE, "type", ["mono", "poly"]),
        (TABLE, "1", ["1", "0"]),
        (TABLE.replace(",", "\t").replace('"a\t b"', "p"), "p", ["1", "0"]),
        ("cat/1.jpg,,mono\ncat/2.jpg,0,poly\n", "2", ["mono", "poly"]),
        ("cat/1.jpg,mono\n", "1", ["mono"]),
    ],
)
def test_one_of_several_columns(text: str, column: str, labels: list[str], write: Write) -> None:
    files = FileList.from_file(write(text), label_column=column)
    assert [files.classes[label] for label in files.labels] == labels


@pytest.mark.parametrize(
    ("text", "column", "told"),
    [
        (ELPV, None, "list.csv 2 columns 1.0 mono --label-column 1 2"),
        (TABLE, None, "list.csv 2 columns type --label-column type"),
        (TABLE, "kind", "list.csv 'kind' type --label-column"),
        (TABLE, "0", "list.csv '0' type --label-column"),
        (ELPV, "3", "list.csv '3' 2 columns --label-column"),
        (TABLE, "1,2", "2 columns --label-column"),
        (TABLE + "cat/1.jpg,1\n", "type", "line 4 2 fields 3"),
        (TABLE + "cat/1.jpg,1,\n", "type", "line 4 no label"),
    ],
)
def test_columns_that_are_not_told(text: str, column: str | None, told: str, write: Write) -> None:
    with pytest.raises(UsageError, match=mentioning(told)):
        FileList.from_file(write(text), label_column=column)


def test_a_column_for_each_label(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    text = "path,cat,dog,tree\ncat/1.jpg,1,0,1\ncat/2.jpg,0,0,1.0\n"
    files = FileList.from_file(write(text), multi_label=True)
    assert files.classes == ("cat", "dog", "tree") and files.labels.tolist() == [[1, 0, 1], [0, 0, 1]]
    assert files.one_each is None and mentions(caplog.text, "list.csv 0 'dog' 1 'tree'")
    assert files.drop([0]).labels.tolist() == [[0, 0, 1]]
    some = FileList.from_file(write(text), label_column="tree,1", multi_label=True)
    assert some.classes == ("tree", "cat") and some.labels.tolist() == [[1, 1], [1, 0]]
    other = write("path,dog,tree,cat\ncat/1.jpg,0,1,1\n", "val.csv")
    assert FileList.from_file(other, None, files.classes, multi_label=True).labels.tolist() == [[1, 0, 1]]
    assert files.fingerprint != some.fingerprint


@pytest.mark.parametrize(
    ("text", "column", "told"),
    [
        ("cat/1.jpg,1,0\n", None, "list.csv header --multi-label"),
        ("path,cat,dog\ncat/1.jpg,1,2\n", None, "line 2 '2' 'dog' 0 1"),
        ("path,cat,dog\ncat/1.jpg,1,cat\n", None, "line 2 'cat' 'dog' 0 1"),
        ("path,cat,dog\ncat/1.jpg,1\n", None, "line 2 2 fields 3"),
        ("path,cat,dog\ncat/1.jpg,1,0,1\n", None, "line 2 4 fields 3"),
        ("path,cat,dog\ncat/1.jpg,1,\n", None, "line 2 label"),
        ("path,cat,dog\ncat/1.jpg,1,0\n", "cow", "list.csv 'cow' 'cat' 'dog'"),
        ("path,cat,cat\ncat/1.jpg,1,0\n", None, "list.csv twice 'cat'"),
        ("path,cat,dog\n", None, "list.csv lists no files"),
    ],
)
def test_labels_that_are_not_0_or_1(text: str, column: str | None, told: str, write: Write) -> None:
    with pytest.raises(UsageError, match=mentioning(told)):
        FileList.from_file(write(text), label_column=column, multi_label=True)
