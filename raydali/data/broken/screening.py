"""Screens the image files of a batch before DALI decodes them: which ones Pillow decodes, and which ones are broken.

    not plain (decoder_choice.py)             -->  decoded by Pillow in a child process; DALI gets the pixels as PNM
    plain, but DALI refused it              -->  the same, from now on
    seems cut off, or is too large          -->  read as a whole by Pillow, once in a run (quarantine.py)
    all others                              -->  decoded by DALI

A truncated JPEG still decodes if the crop is above the cut. To wait for an error is therefore not enough: whether a
sample is broken must not depend on the crop of an epoch.

DALI's error ends its pipeline with all batches in flight. The first FAILURES errors cost that, and a trial of these
batches in a child process. After that, each file is tried there once before DALI gets it: a file that DALI refuses then
costs one decoding more, however many there are.

A graph of one's own may also fail on samples whose files can be decoded. DALI reports only that a batch failed. The
batches in flight are therefore run again in smaller and smaller parts (`failing`).
"""

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from raydali.data.broken.quarantine import Quarantine
from raydali.data.decode.dali_trial import refused
from raydali.data.decode.decoder_choice import plain_shape
from raydali.data.decode.pillow import Pixels, decoded_apart, has_end
from raydali.data.read.contents import Contents
from raydali.data.tasks.pipeline import SampleErrors
from raydali.errors import DataError
from raydali.host.child import Child, ChildDiedError

MAX_PIXELS = 178_956_970
"""Pixels of an image. Pillow refuses larger ones as decompression bombs (twice PIL.Image.MAX_IMAGE_PIXELS)."""
FAILURES = 3
"""Errors of DALI after which files are tried before DALI gets them."""
TRIES = 8
"""How often a file is tried that may have killed a process: damage to memory does not always end it."""
MAX_SUSPECTED = 32
"""How many of the files that a process decoded last are suspected if it dies, whichever batch they were of."""
MAX_LOADS = 100
"""Batches that are tried. If more are needed, the cause is another one, such as the GPU's memory."""
_END = b"\xff\xd9"
_TAIL = 16
"""Number of last bytes among which the end of most JPEGs is."""

File = NDArray[np.uint8]
Ids = NDArray[np.int64]
Keys = Sequence[tuple[int, int]]
"""Pairs of id and the key of its draws: its epoch and its repeat."""


class Read:
    """The image files of a micro-batch.

    Args:
        ids: of the samples (N,), as they are read.
        contents: for each of the pipeline's image files, the contents (N).

    Attributes:
        files: the contents as arrays.
        for_dali: the same, or lists of DALI, which it takes faster, if nothing is replaced.
    """

    def __init__(self, ids: Ids, contents: Sequence[Contents]) -> None:
        self.ids, self.files = ids, cast("list[list[File]]", [*contents])
        self.for_dali = [column if column.tensors is None else column.tensors for column in contents]
        self._contents = contents  # their memory may be DALI's

    def replace(self, column: int, place: int, file: File) -> None:
        """Replace a file."""
        self.files[column][place] = file
        self.for_dali[column] = self.files[column]


class Screening:
    """The screening of a loader's batches. Threads may share it.

    Args:
        quarantine: the loader's.
        gpu: the number of the GPU on which DALI decodes; None: it decodes on the CPU.
        threads: of DALI.
    """

    def __init__(self, quarantine: Quarantine, gpu: int | None, threads: int) -> None:
        self._quarantine, self._gpu, self._threads = quarantine, gpu, threads
        self._child = Child("decoder")
        self._decoded = deque[tuple[int, bytes]](maxlen=MAX_SUSPECTED)  # by this child process: ids and files
        self._failures = 0
        self._trying = threading.Lock()
        self._tried = np.zeros(len(quarantine.sound), np.bool_)

    def shapes(self, read: Read) -> list[NDArray[np.int64]]:
        """Return the heights and widths (N, 2) of the upright images, for each of the image files.

        In `read.files`, the files that Pillow decodes are replaced by their pixels.

        Raises:
            SampleErrors: samples are broken, which the quarantine knows.
        """
        quarantine, ids = self._quarantine, read.ids.tolist()
        self._try_first(read)
        self._refuse_known(ids)
        shapes = [[plain_shape(file.data) for file in files] for files in read.files]
        odd: list[tuple[int, int]] = []
        suspects: list[int] = []
        for column, files in enumerate(read.files):
            for place, shape in enumerate(shapes[column]):
                if shape is None or ids[place] in quarantine.for_pillow:
                    odd.append((column, place))
                elif shape[0] * shape[1] > MAX_PIXELS:
                    suspects.append(ids[place])
                # Most files are JPEGs with their end, for which no function is called.
                elif files[place][0] == 0xFF and _END in files[place][-_TAIL:].tobytes():
                    continue
                elif not quarantine.sound[ids[place]] and _seems_cut(files[place].data):
                    suspects.append(ids[place])
        if suspects:
            with self._trying:  # other threads may examine the same ones for another epoch
                quarantine.examine(suspects)
        if odd:
            decoded = decoded_apart([bytes(read.files[column][place]) for column, place in odd])
            for (column, place), pixels in zip(odd, decoded, strict=True):
                if isinstance(pixels, MemoryError):
                    raise pixels
                if isinstance(pixels, Exception):
                    if not quarantine.examine([ids[place]], again=True):  # its reason also names the file of a pair
                        quarantine.mark_broken(ids[place], pixels)
                    continue
                read.replace(column, place, as_pnm(pixels))
                shapes[column][place] = pixels.shape[:2]
        self._refuse_known(ids)
        return [np.array(of_column, np.int64).reshape(-1, 2) for of_column in shapes]

    def _refuse_known(self, ids: list[int]) -> None:
        if known := self._quarantine.known:
            broken = {place: DataError(known[id].reason) for place, id in enumerate(ids) if id in known}
            if broken:
                raise SampleErrors(broken)

    def find_refused(self, batches: Sequence[Read]) -> bool:
        """Find the files on which DALI failed, if any: Pillow decodes them from now on, or they are broken."""
        self._failures += 1
        with self._trying:  # all are tried
            return sum(self._try(read, np.ones(len(read.ids), np.bool_)) for read in batches) > 0

    def _try_first(self, read: Read) -> None:
        """Try files that DALI has not decoded, if it has failed often, or if one of them may have killed a process."""
        untried, alone = ~self._tried[read.ids], self._failures < FAILURES
        if alone:
            suspected = self._quarantine.in_flight_at_death
            untried &= np.array([id in suspected for id in read.ids.tolist()], np.bool_) if suspected else False
        if untried.any():
            with self._trying:
                self._try(read, untried, alone=alone)

    def _try(self, read: Read, chosen: NDArray[np.bool_], *, alone: bool = False) -> bool:
        """Have DALI decode the chosen files (N,) in a child process; return whether it refuses any.

        If `alone`, it gets one file after the other: whether damage to memory ends it may depend on other files.
        """
        places = [
            (column, int(place))
            for column, files in enumerate(read.files)
            for place in np.flatnonzero(chosen)
            if plain_shape(files[place].data) is not None and int(read.ids[place]) not in self._quarantine.known
        ]
        files = [(int(read.ids[place]), bytes(read.files[column][place])) for column, place in places]
        reasons = self._refused(files, alone=alone)
        self._tried[read.ids[chosen]] = True
        for id, reason in reasons.items():
            if isinstance(reason, ChildDiedError):
                self._quarantine.mark_broken(id, reason)
            elif id not in self._quarantine.for_pillow:
                self._quarantine.for_pillow.add(id)
                self._quarantine.examine([id], again=True)
        return bool(reasons)

    def _refused(self, files: list[tuple[int, bytes]], *, alone: bool) -> dict[int, str | ChildDiedError]:
        """Return why DALI refuses files, by their ids; a ChildDiedError for one that ends its process."""
        reasons_by_id: dict[int, str | ChildDiedError] = {}
        size, times = (1, TRIES) if alone else (max(1, len(files)), 1)
        waiting = [range(first, first + size) for first in range(0, len(files), size)]
        while waiting:
            part = waiting.pop()
            try:
                tried = [files[place][1] for place in part for _ in range(times)]
                reasons = self._child.call(refused, tried, self._gpu, self._threads)
            except ChildDiedError as died:
                if len(part) == 1:
                    reasons_by_id[self._culprit([files[part[0]], *reversed(self._decoded)])] = died
                else:
                    waiting += [part[: len(part) // 2], part[len(part) // 2 :]]
                self._decoded.clear()
            else:
                reasons_by_id.update((files[part[place // times]][0], reason) for place, reason in reasons.items())
                self._decoded.extend(files[place] for place in part)
        return reasons_by_id

    def _culprit(self, files: list[tuple[int, bytes]]) -> int:
        """Return the id of the file that ends a new child process; the first one's if none does.

        A file may damage memory, of which the process dies later, while it decodes another file.
        """
        for id, file in files:
            self._child.close()
            try:
                self._child.call(refused, [file] * TRIES, self._gpu, self._threads)
            except ChildDiedError:
                return id
        return files[0][0]

    def close(self) -> None:
        """End the child process."""
        self._child.close()


def as_pnm(pixels: Pixels) -> NDArray[np.uint8]:
    """Return the content of a file with these pixels (H, W, 3), which every decoder of DALI reads exactly."""
    head = b"P6 %d %d 255\n" % (pixels.shape[1], pixels.shape[0])
    return np.concatenate([np.frombuffer(head, np.uint8), pixels.reshape(-1)])


def _seems_cut(data: memoryview) -> bool:
    """Return whether a plain image seems to be cut off; of BMP, PNM and TIFF the last bytes do not show it."""
    kind = data[0]
    if kind == 0xFF:
        return not has_end(data)
    if kind == ord("R"):
        return bool(struct.unpack_from("<I", data, 4)[0] + 8 > len(data))
    return kind in b"BPIM"


def failing(keys: Iterable[tuple[int, int]], loads: Callable[[Keys], bool]) -> list[int]:
    """Return the ids of the samples that fail in a batch of one; an empty list if MAX_LOADS tries do not suffice.

    Args:
        keys: of the samples.
        loads: whether these samples can be loaded as one batch.
    """
    failed: list[int] = []
    waiting, tried = [[*dict.fromkeys(keys)]], 0
    while waiting and tried < MAX_LOADS:
        part, tried = waiting.pop(), tried + 1
        if loads(part):
            continue
        if len(part) == 1:
            failed.append(part[0][0])
        else:
            waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
    return [] if waiting else [*dict.fromkeys(failed)]
