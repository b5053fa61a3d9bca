"""TFRecord files made on the spot, their Examples by protobuf itself."""

import struct
from collections.abc import Iterable
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from tensorboardX.record_writer import masked_crc32c

Value = bytes | int | float | list[bytes] | list[int] | list[float]


@cache
def _example_class(packed: bool) -> Any:
    """tf.train.Example, from TensorFlow's example.proto and feature.proto."""
    of = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, str], among: Any = None) -> Any:
        made = (file.message_type if among is None else among).add(name=name)
        for number, (field, kind, of_type) in enumerate(fields, 1):
            label = of.LABEL_REPEATED if of_type.startswith("*") else of.LABEL_OPTIONAL
            added = made.field.add(name=field, number=number, type=kind, label=label)
            if kind == of.TYPE_MESSAGE:
                added.type_name = f".tensorflow.{of_type.removeprefix('*')}"
        return made

    message("BytesList", ("value", of.TYPE_BYTES, "*"))
    message("FloatList", ("value", of.TYPE_FLOAT, "*"))
    message("Int64List", ("value", of.TYPE_INT64, "*")).field[0].options.packed = packed
    kinds = (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List"))
    feature = message("Feature", *((name, of.TYPE_MESSAGE, kind) for name, kind in kinds))
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message("Features", ("feature", of.TYPE_MESSAGE, "*Features.FeatureEntry"))
    entry = message(
        "FeatureEntry", ("key", of.TYPE_STRING, ""), ("value", of.TYPE_MESSAGE, "Feature"), among=features.nested_type
    )
    entry.options.map_entry = True
    message("Example", ("features", of.TYPE_MESSAGE, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def example(features: dict[str, Value], *, packed: bool = True) -> bytes:
    """An Example's bytes; which of its features comes first is protobuf's choice."""
    made = _example_class(packed)()
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        kind = next((kind for kind in (bytes, int, float) if any(isinstance(one, kind) for one in values)), bytes)
        feature = made.features.feature[name]
        {bytes: feature.bytes_list, int: feature.int64_list, float: feature.float_list}[kind].value.extend(values)
    data: bytes = made.SerializeToString()
    return data


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def imagenet(image: bytes, label: int) -> bytes:
    """A record as TensorFlow's models write ImageNet's."""
    boxes: dict[str, Value] = {f"image/object/bbox/{side}": [0.25, 0.5] for side in ("xmin", "xmax", "ymin", "ymax")}
    about: dict[str, Value] = {
        "image/height": 300,
        "image/colorspace": b"RGB",
        "image/class/synset": b"n01440764",
        "image/object/bbox/label": [label, label],
        "image/filename": b"n01440764_10026.JPEG",
    }
    return record(example(boxes | about | {"image/encoded": image, "image/class/label": label}))


def tfrecords(images: Iterable[tuple[bytes, int]]) -> bytes:
    """A file of these images and labels."""
    return b"".join(imagenet(*image) for image in images)
