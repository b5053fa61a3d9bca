"""Small files of all kinds that other people's programs write: sound ones, and those that all loaders refuse.

Their picture is `PICTURE`, upright, in most of them; the headers are written by hand where Pillow does not write them.
"""

import io
import struct
import zlib
from base64 import b64decode
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

WIDTH, HEIGHT = 48, 32
XMP = b"<rdf:Description xmlns:tiff='http://ns.adobe.com/tiff/1.0/' tiff:Orientation=\"%d\"/>"

# 8 x 8 pixels of 12 bits, the upper half white; written by imagecodecs, as Pillow writes none.
JPEG_2000_12_BITS = """
AAAADGpQICANCocKAAAAFGZ0eXBqcDIgAAAAAGpwMiAAAAAtanAyaAAAABZpaGRyAAAACAAAAAgAAwsHAAAAAAAPY29scgEAAAAAABAAAAEPanAyY/9P
/1EALwAAAAAACAAAAAgAAAAAAAAAAAAAAAgAAAAIAAAAAAAAAAAAAwsBAQsBAQsBAf9SAAwAAAABAQAEBAAB/1wABEBg/2QAJQABQ3JlYXRlZCBieSBP
cGVuSlBFRyB2ZXJzaW9uIDIuNS40/5AACgAAAAAAlwAB/5Pf4TQ7DQiCDwEWdTJQDAgqPDYeZjwj7lNEfcpoj7lNEfcpoj7lNEfcpoj7lNEfcpoj7lNE
fcpoj7lNEfcpoj7lNEfcpoj7lNEfcpoj7lNEf4Df4NRQPQpUE3PbE7SQDBwGT7BgWncCnmxBaf9zYgo4DzYgkOFzYgW6LmxAo4XNiA3AubEBTxc2IP/Z"""
JPEG_12_BITS = """
/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMUFRUVDA8XGBYUGBIU
FRT/2wBDAQMEBAUEBQkFBQkUDQsNFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBT/wQARDAAIAAgDASIAAhEB
AxEB/8QAFQABAQAAAAAAAAAAAAAAAAAAAAH/xAAiEAAABQEJAAAAAAAAAAAAAAAAExQWGAUXGh0jQ0tjaoj/xAAVAQEBAAAAAAAAAAAAAAAAAAAJC//E
ACYRAAAEBAYCAwAAAAAAAAAAAAMEBRMCBgcIAQkKEhQVFiQRIiP/2gAMAwEAAhEDEQA/AJjFRf7do6gpE/so2hulz+TKSiStvnNWaRWYAAUlb80y8C3G
oCjS2ls6cBEINMAdeljtvgBmBf1MEhhotwwwkf3Ei27tsPxBhDDhQAyt9BPpx86S0KTL8r8rZfLanzbz+1VfLp7S+V1aodRiPoo0zpyaAwmpxMt6xMF1
l4ZwwIKLH//Z"""
JPEG_LOSSLESS = "/9j/xAAXAAEBAQEAAAAAAAAAAAAAAAAACwwP/8MACxAACAAIAQARAP/aAAgBAAAGAADh/wDCAAAAAAMABAAgAQANAAAAAAD/2Q=="


def picture(seed: int = 1, width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """A smooth picture with black, white and different corners, so that any turn, shift or scale shows."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    small[0, 0], small[2, 3] = 255, 0
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


PICTURE = picture()
COLOURS = np.asarray(PICTURE)
GREY = np.asarray(PICTURE.convert("L"))
ALPHA = np.tile(np.linspace(0, 255, WIDTH).astype(np.uint8), (HEIGHT, 1))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def tiff_header(entries: Iterable[tuple[int, int, int, int]], order: str = "<", announced: int = 0) -> bytes:
    """A TIFF header and its directory of entries of tag, type, number and value or offset."""
    listed = sorted(entries, key=lambda entry: entry[0])
    packed = b"".join(
        struct.pack(f"{order}HHI", tag, kind, number)
        + (struct.pack(f"{order}HH", value, 0) if kind == 3 and number == 1 else struct.pack(f"{order}I", value))
        for tag, kind, number, value in listed
    )
    magic = b"II*\0" if order == "<" else b"MM\0*"
    count = struct.pack(f"{order}IH", 8, len(listed) + announced)
    return magic + count + packed + struct.pack(f"{order}I", 0)


def exif(orientation: int, order: str = "<", kind: int = 3, more: Sequence[tuple[int, int, int, int]] = ()) -> bytes:
    return tiff_header([(274, kind, 1, orientation), *more], order)


def with_segments(*bodies: bytes, of: bytes | None = None, marker: bytes = b"\xff\xe1") -> bytes:
    """A JPEG with these segments after its beginning."""
    data = saved(PICTURE, "JPEG", quality=92) if of is None else of
    return data[:2] + b"".join(marker + struct.pack(">H", len(body) + 2) + body for body in bodies) + data[2:]


def in_jpeg(*blocks: bytes) -> bytes:
    return with_segments(*(b"Exif\0\0" + block for block in blocks))


def in_xmp(orientation: int) -> bytes:
    return b"http://ns.adobe.com/xap/1.0/\0" + XMP % orientation


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    depth: int = 8, kind: int = 2, rows: NDArray[np.uint8] = COLOURS, before: bytes = b"", after: bytes = b""
) -> bytes:
    """A PNG of these rows, as they are stored, with chunks before and after its pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, kind, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + head + before + pixels + after + chunk(b"IEND", b"")


def packed_bits(depth: int) -> NDArray[np.uint8]:
    """The rows of the grey picture with this number of bits a pixel."""
    bits = np.unpackbits((GREY >> (8 - depth)).astype(np.uint8)[..., None], axis=2)[:, :, 8 - depth :]
    return np.packbits(bits.reshape(HEIGHT, -1), axis=1)


def bmp(bits: int, rows: bytes, packing: int = 0, palette: bytes = b"", size: int = 40, height: int = HEIGHT) -> bytes:
    offset = 14 + size + len(palette)
    if size == 12:
        info = struct.pack("<IHHHH", 12, WIDTH, height, 1, bits)
    else:
        used = len(palette) // 4 if packing != 3 else 0
        info = struct.pack("<IiiHHIIiiII", size, WIDTH, height, 1, bits, packing, len(rows), 2835, 2835, used, 0)
    return b"BM" + struct.pack("<IHHI", offset + len(rows), 0, 0, offset) + info + palette + rows


def tiff(pixels: NDArray[Any], bits: int, colours: int = 1, samples: int = 1, **tags: int) -> bytes:
    """An unpacked TIFF; tags by the names below."""
    numbers = {"planes": 284, "alpha": 338, "sign": 339, "orientation": 274}
    entries = [(256, 3, 1, WIDTH), (257, 3, 1, HEIGHT), (259, 3, 1, 1), (262, 3, 1, colours), (277, 3, 1, samples)]
    entries += [(278, 3, 1, HEIGHT), *((numbers[name], 3, 1, value) for name, value in tags.items())]
    strips = samples if tags.get("planes") == 2 else 1
    end = 8 + 2 + 12 * (len(entries) + 3) + 4
    length = pixels.nbytes // strips
    more = struct.pack(f"<{samples}H", *[bits] * samples) if samples > 2 else b""
    entries.append((258, 3, samples, end if more else bits | bits << 16 if samples == 2 else bits))
    listed = struct.pack(f"<{strips}I", *(end + len(more) + 8 * strips + i * length for i in range(strips)))
    lengths = struct.pack(f"<{strips}I", *[length] * strips)
    at = end + len(more)
    entries.append((273, 4, strips, at if strips > 1 else at + 8))
    entries.append((279, 4, strips, at + 4 * strips if strips > 1 else length))
    return tiff_header(entries) + more + listed + lengths + pixels.tobytes()


def webp(lossless: bool, prefix: bytes = b"", **options: Any) -> bytes:
    """A WebP with orientation 6, which has a prefix as some programs write it."""
    data = saved(PICTURE, "WEBP", lossless=lossless, quality=90, exif=exif(6), **options)
    at, body = data.index(b"EXIF"), prefix + exif(6)
    data = data[:at] + b"EXIF" + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)
    return data[:4] + struct.pack("<I", len(data) - 8) + data[8:]


def _jpegs() -> dict[str, bytes]:
    plain = saved(PICTURE, "JPEG", quality=92)
    turned = exif(6)
    return {
        **{f"{mode}.jpg": saved(PICTURE.convert(mode), "JPEG", quality=92) for mode in ("L", "CMYK", "YCbCr")},
        **{f"{name}.jpg": saved(PICTURE, "JPEG", subsampling=number) for name, number in (("444", 0), ("422", 1))},
        **{f"orientation-{number}.jpg": in_jpeg(exif(number)) for number in range(10)},
        "progressive.jpg": saved(PICTURE, "JPEG", progressive=True),
        "restarts.jpg": saved(PICTURE, "JPEG", restart_marker_rows=1),
        "profile.jpg": saved(PICTURE, "JPEG", icc_profile=b"x" * 70_000),
        "rgb.jpg": saved(PICTURE, "JPEG", keep_rgb=True),
        "two-pictures.jpg": saved(PICTURE, "MPO", save_all=True, append_images=[picture(2)]),
        "more-behind.jpg": plain + b"a video" * 100,
        "big-endian.jpg": in_jpeg(exif(6, ">")),
        "long.jpg": in_jpeg(exif(6, kind=4)),
        "byte.jpg": in_jpeg(exif(6, kind=1)),
        "doubled-tag.jpg": in_jpeg(exif(6, more=[(274, 3, 1, 3)])),
        "far-offset.jpg": in_jpeg(exif(6, more=[(271, 2, 40, 0x00F00000)])),
        "more-entries.jpg": in_jpeg(tiff_header([(274, 3, 1, 6)], announced=7)),
        "two-blocks.jpg": in_jpeg(exif(6), exif(3)),
        "two-other-blocks.jpg": in_jpeg(exif(1), exif(6)),
        "after-comment.jpg": with_segments(b"abcd", of=in_jpeg(turned), marker=b"\xff\xfe"),
        "odd-prefix.jpg": with_segments(b"Exif\0\xff" + turned),
        "xmp.jpg": with_segments(in_xmp(6)),
        "xmp-against-exif.jpg": with_segments(in_xmp(6), b"Exif\0\0" + exif(1)),
        "exif-against-xmp.jpg": with_segments(b"Exif\0\0" + turned, in_xmp(1)),
    }


def _pngs() -> dict[str, bytes]:
    palette = PICTURE.convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    raw = (b"Exif\0\0" + exif(6)).hex().encode()
    others = {"save_all": True, "append_images": [picture(2), picture(3)]}
    wide = COLOURS.astype(">u2") * 257
    return {
        **{f"grey-{depth}.png": png(depth, 0, packed_bits(depth)) for depth in (1, 2, 4)},
        **{f"{mode}.png": saved(PICTURE.convert(mode), "PNG") for mode in ("L", "P", "1", "LA", "RGBA")},
        "alpha.png": saved(Image.fromarray(np.dstack([COLOURS, ALPHA])), "PNG"),
        "16-bits.png": png(16, 2, wide.view(np.uint8).reshape(HEIGHT, -1)),
        "grey-16.png": saved(Image.fromarray(GREY.astype(np.uint16) * 257), "PNG"),
        "palette-4.png": saved(palette, "PNG"),
        "palette-transparent.png": saved(palette, "PNG", transparency=3),
        "transparent-colour.png": saved(PICTURE, "PNG", transparency=(255, 255, 255)),
        "exif.png": png(before=chunk(b"eXIf", exif(6))),
        "exif-behind.png": png(after=chunk(b"eXIf", exif(6))),
        "text-as-exif.png": png(before=chunk(b"eXIf", b"no TIFF header at all")),
        "exif-as-text.png": png(before=chunk(b"tEXt", b"Raw profile type exif\0\nexif\n  44\n" + raw + b"\n")),
        "xmp.png": png(before=chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP % 6)),
        "gamma.png": png(before=chunk(b"gAMA", struct.pack(">I", 100_000))),
        "wrong-text-checksum.png": png(before=chunk(b"tEXt", b"Comment\0hello")[:-1] + b"\0"),
        "animated.png": saved(PICTURE, "PNG", **others),
        "animated-default.png": saved(PICTURE, "PNG", default_image=True, **others),
    }


def _webps() -> dict[str, bytes]:
    found = {"animated.webp": saved(PICTURE, "WEBP", save_all=True, append_images=[picture(2)], duration=50)}
    for lossless in (False, True):
        name = "lossless" if lossless else "lossy"
        found |= {
            f"{name}.webp": saved(PICTURE, "WEBP", lossless=lossless, quality=90),
            f"{name}-odd.webp": saved(picture(3, 47, 31), "WEBP", lossless=lossless),
            f"{name}-alpha.webp": saved(Image.fromarray(np.dstack([COLOURS, ALPHA])), "WEBP", lossless=lossless),
            f"{name}-profile.webp": saved(PICTURE, "WEBP", lossless=lossless, icc_profile=b"abc"),
            f"{name}-exif.webp": webp(lossless),
            f"{name}-exif-prefix.webp": webp(lossless, b"Exif\0\0"),
            f"{name}-xmp.webp": saved(PICTURE, "WEBP", lossless=lossless, xmp=XMP % 6),
        }
    return found


def _bmps() -> dict[str, bytes]:
    grey = b"".join(struct.pack("<BBBB", i, i, i, 0) for i in range(256))
    sixteen = b"".join(struct.pack("<BBBB", 16 * i, 255 - 16 * i, 8 * i, 0) for i in range(16))
    low = (GREY.astype(np.uint16) >> 3) * 0x421
    run = bytes([WIDTH, 0x12, 0, 0]) * HEIGHT + bytes([0, 1])
    return {
        **{f"{mode}.bmp": saved(PICTURE.convert(mode), "BMP") for mode in ("RGB", "P", "1", "RGBA")},
        "8-bits.bmp": bmp(8, GREY[::-1].tobytes(), palette=grey),
        "16-bits.bmp": bmp(16, low[::-1].astype("<u2").tobytes()),
        "runs-of-4.bmp": bmp(4, run, 2, sixteen),
        "runs-of-8.bmp": bmp(8, run, 1, grey),
        "top-down.bmp": bmp(24, COLOURS[..., ::-1].tobytes(), height=-HEIGHT),
        "os2.bmp": bmp(24, COLOURS[::-1, :, ::-1].tobytes(), size=12),
    }


def _pnms() -> dict[str, bytes]:
    size = b"%d %d\n" % (WIDTH, HEIGHT)
    return {
        **{f"{mode}.pnm": saved(PICTURE.convert(mode), "PPM") for mode in ("RGB", "L", "1")},
        "plain.pbm": b"P1\n4 2\n1 0 1 0\n0 0 1 1\n",
        "plain.pgm": b"P2\n4 2\n255\n0 50 100 255\n9 8 7 6\n",
        "plain.ppm": b"P3\n2 1\n255\n0 50 100 255 9 8\n",
        "16-bits.pgm": b"P5\n" + size + b"65535\n" + (GREY.astype(">u2") * 257).tobytes(),
        "16-bits.ppm": b"P6\n" + size + b"65535\n" + (COLOURS.astype(">u2") * 257).tobytes(),
        "100-values.pgm": b"P5\n" + size + b"100\n" + (GREY // 3).tobytes(),
        "comment.ppm": b"P6\n# a comment\n" + size + b"255\n" + COLOURS.tobytes(),
        "two.ppm": saved(PICTURE, "PPM") * 2,
    }


def _tiffs() -> dict[str, bytes]:
    ways = {"raw": None, "lzw": "tiff_lzw", "deflate": "tiff_adobe_deflate", "packbits": "packbits", "jpeg": "jpeg"}
    low = np.uint16(GREY) << 4 | GREY >> 4
    twelve = np.dstack([low[:, ::2] >> 4, (low[:, ::2] & 15) << 4 | low[:, 1::2] >> 8, low[:, 1::2] & 255])
    return {
        **{f"{name}.tif": saved(PICTURE, "TIFF", compression=way) for name, way in ways.items()},
        **{f"{mode}.tif": saved(PICTURE.convert(mode), "TIFF") for mode in ("L", "P", "1", "CMYK", "YCbCr", "LA")},
        **{f"orientation-{n}.tif": tiff(COLOURS, 8, 2, 3, orientation=n) for n in (1, 3, 6, 8)},
        **{f"grey-{depth}.tif": tiff(packed_bits(depth), depth) for depth in (2, 4)},
        "12-bits.tif": tiff(twelve.astype(np.uint8), 12),
        "grey-16.tif": saved(Image.fromarray(GREY.astype(np.uint16) * 257), "TIFF"),
        "16-bits.tif": tiff(COLOURS.astype("<u2") * 257, 16, 2, 3),
        "white-is-0.tif": tiff(255 - GREY, 8, 0),
        "floats.tif": saved(Image.fromarray(GREY.astype(np.float32) / 255), "TIFF"),
        "planes.tif": tiff(COLOURS.transpose(2, 0, 1).copy(), 8, 2, 3, planes=2),
        "alpha.tif": tiff(np.dstack([COLOURS, ALPHA]), 8, 2, 4, alpha=2),
        "associated-alpha.tif": tiff(np.dstack([COLOURS // 2, ALPHA // 2 + 128]), 8, 2, 4, alpha=1),
        "two-samples.tif": tiff(np.dstack([GREY, ALPHA]), 8, 1, 2, alpha=0),
        "pages.tif": saved(PICTURE, "TIFF", save_all=True, append_images=[picture(2)]),
        "big.tif": saved(PICTURE, "TIFF", big_tiff=True),
    }


def _jpegs_2000() -> dict[str, bytes]:
    return {
        **{f"{mode}.jp2": saved(PICTURE.convert(mode), "JPEG2000") for mode in ("RGB", "L", "RGBA", "LA", "YCbCr")},
        "bare.j2k": saved(PICTURE, "JPEG2000", no_jp2=True),
        "grey-16.jp2": saved(Image.fromarray(GREY.astype(np.uint16) * 257), "JPEG2000"),
        "12-bits.jp2": b64decode(JPEG_2000_12_BITS),
    }


def _gifs() -> dict[str, bytes]:
    others: dict[str, Any] = {"save_all": True, "append_images": [picture(2)], "duration": 50}
    clear = Image.fromarray(np.dstack([COLOURS, np.where(ALPHA < 128, 0, 255).astype(np.uint8)]))
    return {
        "picture.gif": saved(PICTURE, "GIF"),
        "interlaced-87.gif": saved(PICTURE, "GIF", interlace=1),
        "grey.gif": saved(PICTURE.convert("L"), "GIF"),
        "transparent.gif": saved(clear, "GIF"),
        "animated.gif": saved(PICTURE, "GIF", **others),
        "no-end.gif": saved(PICTURE, "GIF")[:-2],
    }


def _avifs() -> dict[str, bytes]:
    clear = Image.fromarray(np.dstack([COLOURS, ALPHA]))
    return {
        "picture.avif": saved(PICTURE, "AVIF", quality=90),
        "444.avif": saved(PICTURE, "AVIF", quality=90, subsampling="4:4:4"),
        "odd.avif": saved(picture(3, 47, 31), "AVIF"),
        "alpha.avif": saved(clear, "AVIF", quality=90),
        "turned.avif": saved(PICTURE, "AVIF", exif=exif(6)),
        "animated.avif": saved(PICTURE, "AVIF", quality=90, save_all=True, append_images=[picture(2)], duration=50),
    }


SOUND = _jpegs() | _pngs() | _webps() | _bmps() | _pnms() | _tiffs() | _jpegs_2000() | _gifs() | _avifs()
"""Files that all loaders read alike, by name."""
REFUSED = {
    "12-bits.jpg": (b64decode(JPEG_12_BITS), "12 bits"),
    "lossless.jpg": (b64decode(JPEG_LOSSLESS), "lossless JPEG"),
    "junk-before.jpg": (b"junk" + saved(PICTURE, "JPEG"), "junk"),
    "signed.tif": (tiff(GREY.astype("<i2"), 16, sign=2), "signed or 32-bit integers"),
    "32-bits.tif": (saved(Image.fromarray(GREY.astype(np.int32)), "TIFF"), "signed or 32-bit integers"),
    "deep-planes.tif": (
        tiff(COLOURS.transpose(2, 0, 1).astype("<u2") * 257, 16, 2, 3, planes=2),
        "more than 8 bits in separate planes",
    ),
    "colour-floats.tif": (tiff(COLOURS.astype(np.float32) / 255, 32, 2, 3, sign=3), "3 x 32-bit floats"),
    "10-bits.tif": (tiff(np.zeros((HEIGHT, WIDTH * 10 // 8), np.uint8), 10), "10-bit integers"),
    "large-floats.tif": (saved(Image.fromarray(GREY.astype(np.float32)), "TIFF"), "floats up to"),
    "cut-off.gif": (saved(PICTURE, "GIF")[:1000], "truncated"),
    "cut-off.avif": (saved(PICTURE, "AVIF")[:-9], "Truncated"),
    "icon.ico": (saved(PICTURE, "ICO"), "an icon"),
}
"""Files that all loaders leave out, with a part of the reason."""
TURNED = {
    *("big-endian.jpg", "far-offset.jpg", "more-entries.jpg", "doubled-tag.jpg", "long.jpg", "two-blocks.jpg"),
    *("after-comment.jpg", "exif-against-xmp.jpg", "xmp.jpg"),
    *("exif.png", "exif-behind.png", "exif-as-text.png", "xmp.png", "turned.avif"),
    *(f"{name}-{way}.webp" for name in ("lossy", "lossless") for way in ("exif", "exif-prefix", "xmp")),
    *(f"orientation-{number}.jpg" for number in (5, 6, 7, 8)),
    *(f"orientation-{number}.tif" for number in (6, 8)),
}
"""Sound files whose upright picture is higher than wide."""
