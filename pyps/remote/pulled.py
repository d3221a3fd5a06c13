"""The parameters that a session has pulled, where the policy needs those that a gradient was computed on."""

from __future__ import annotations

from pyps.errors import InvalidArgument
from pyps.formats.options import MAX_DEPTH
from pyps.native.values import Flat
from pyps.remote.bounds import Bound

KEPT_VERSIONS = MAX_DEPTH + 1  # at most: a pipeline computes on earlier ones


class BaseParams:
    """The last versions. Where its peer keeps more than its share of the memory, the newest alone."""

    def __init__(self, kept: Bound, peer: str) -> None:
        self._kept, self._peer = kept, peer
        self._versions: dict[int, Flat] = {}  # the last ones at the end
        self._bytes = 0

    def add(self, version: int, flat: Flat) -> None:
        """Keep a copy."""
        self._versions.pop(version, None)
        self.forget(KEPT_VERSIONS - 1)
        self._versions[version] = flat.copy()
        if not self._count():
            self.forget(1)

    def forget(self, left: int) -> None:
        """Keep so many at most."""
        while len(self._versions) > left:
            del self._versions[next(iter(self._versions))]
        self._count()

    def _count(self) -> bool:
        """Whether the peer's sessions keep no more than its share."""
        before, self._bytes = self._bytes, sum(flat.nbytes for flat in self._versions.values())
        return self._kept.add(self._peer, self._bytes - before)

    def base(self, version: int | None) -> Flat | None:
        """The parameters of a version that was pulled; None: of the last one, or none were needed."""
        if not self._versions:
            return None
        wanted = next(reversed(self._versions)) if version is None else version
        if (found := self._versions.get(wanted)) is None:
            kept = ", ".join(map(str, self._versions))
            raise InvalidArgument("push", f"base_version: found {version}; expected one pulled last: {kept}")
        self._versions = {v: flat for v, flat in self._versions.items() if v >= wanted}  # later pushes' bases
        return found
