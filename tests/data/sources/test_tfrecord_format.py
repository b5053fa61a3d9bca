"""TFRecord's framing, against tensorboardX's."""

import io

import pytest
from tensorboardX.record_writer import masked_crc32c as expected_crc32c

from raydali.data.sources.tfrecord import as_record, masked_crc32c, records


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"123456789", bytes(range(256))])
def test_checksums_are_those_of_tensorboardx(data: bytes) -> None:
    assert masked_crc32c(data) == expected_crc32c(data)


def test_records_come_out_as_they_went_in() -> None:
    items = [b"", b"one", b"x" * 1000]
    file = b"".join(map(as_record, items))
    read = io.BytesIO(file)

    def at(position: int, length: int) -> bytes:
        read.seek(position)
        return read.read(length)

    assert [file[begin:end] for begin, end in records(at, len(file))] == items
