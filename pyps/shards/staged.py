"""Gradients that were sent to a shard and are not yet decided on: in files, which outlive their server.

A file is in the folder of segments, with room for one gradient of the shard. Its first word says whether it
holds a whole one. A file whose gradient was applied or dropped is used again.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyps.errors import OutOfSpace
from pyps.native.values import Tag
from pyps.remote.wire import MAX_HEADER_BYTES, PushHeader
from pyps.store.segments import staged_path, staged_paths

WHOLE = 0x7079707367726164  # "pypsgrad"
HEAD_BYTES = 4096 + MAX_HEADER_BYTES  # three words, then the header
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Tag, PushHeader])


@dataclass(eq=False)
class StagedFile:
    """One file: what it holds is `tag`'s, or nothing (None)."""

    path: Path
    memory: mmap.mmap
    tag: Tag | None = None
    header: PushHeader | None = None

    @property
    def _words(self) -> NDArray[np.uint64]:
        return np.frombuffer(self.memory, np.uint64, 3)

    @property
    def numbers(self) -> NDArray[np.uint8]:
        """Return what was sent, as bytes."""
        return np.frombuffer(self.memory, np.uint8, offset=HEAD_BYTES)[: int(self._words[2])]

    def fill(
        self, tag: Tag, header: PushHeader, size: int, copy: Callable[[NDArray[np.uint8]], None]
    ) -> None:
        """Take a gradient of `size` bytes, which `copy` writes. It counts from the last word written on."""
        encoded = _encoder.encode((tag, header))
        words = self._words
        words[0] = 0
        self.memory[4096 : 4096 + len(encoded)] = encoded
        words[1], words[2] = len(encoded), size
        copy(self.numbers)
        words[0] = WHOLE
        self.tag, self.header = tag, header

    def clear(self) -> None:
        self._words[0] = 0
        self.tag = self.header = None

    def recover(self) -> None:
        """Find what an earlier server has put here."""
        words = self._words
        if int(words[0]) == WHOLE:
            self.tag, self.header = _decoder.decode(self.memory[4096 : 4096 + int(words[1])])


class StagedGradients:
    """All of a shard's, each at most `size` bytes. Not thread-safe."""

    def __init__(self, shard: str, size: int) -> None:
        self._shard, self._size = shard, size
        self._files = [self._open(path) for path in staged_paths(shard)]
        for file in self._files:
            file.recover()

    def find(self, tag: Tag) -> StagedFile | None:
        return next((file for file in self._files if file.tag == tag), None)

    def tags(self) -> list[Tag]:
        """Return the tags of all that are held."""
        return [file.tag for file in self._files if file.tag is not None]

    def free(self) -> StagedFile:
        """A file to fill; it is the caller's until it is filled and given back. Raises OutOfSpace."""
        for k, file in enumerate(self._files):
            if file.tag is None:
                return self._files.pop(k)
        number = 0
        while (path := staged_path(self._shard, number)).exists():
            number += 1
        return self._open(path, create=True)

    def give_back(self, file: StagedFile) -> None:
        self._files.append(file)

    def _open(self, path: Path, create: bool = False) -> StagedFile:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, HEAD_BYTES + self._size)
            return StagedFile(path, mmap.mmap(fd, HEAD_BYTES + self._size))
        except OSError as error:
            if create:
                path.unlink()
            if error.errno != errno.ENOSPC:
                raise
            room = f"{path.parent}: no room for {self._size >> 20} MiB more; enlarge it or set PYPS_SHM_DIR"
            raise OutOfSpace("stage", room) from None
        finally:
            os.close(fd)

    def close(self, remove: bool) -> None:
        """Keep the files for another server, or remove them."""
        for file in self._files:
            if remove:
                file.path.unlink(missing_ok=True)
        self._files.clear()
