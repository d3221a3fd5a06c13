"""Every error pyps raises on purpose.

    PypsError
    |-- InputError        a file, field or argument is wrong               (exit code 2)
    |-- Infeasible        well-formed, but no plan can satisfy it          (exit code 3)
    `-- StoreError        the parameter store refused; `code` is the C name (exit code 2)
        |-- InvalidArgument  SystemCallFailed  SegmentExists  SegmentNotFound  OutOfSpace  SegmentCorrupt
        |-- OtherABI  NotOurs  StoreFull  TimedOut  Fenced  SnapshotCancelled  PushRejected  Forked  NotReady
        |-- NotFinite  Busy  Ended  UnknownPolicy  StoreClosed
        `-- LinkLost  LinkRefused

Errors are raised where the fact is known and turned into one line and an exit code in pyps.cli alone.
"""

from __future__ import annotations


class PypsError(Exception):
    """Base of every deliberate error; its text is one clear message for a person."""

    exit_code = 2


class InputError(PypsError):
    """Bad input: where (file), which field, what was found and what would be right."""

    def __init__(self, where: str, field: str, found: str, expected: str) -> None:
        self.where, self.field, self.found, self.expected = where, field, found, expected
        place = f"{where}: {field}" if field else where
        super().__init__(f"{place}: found {found}; expected {expected}")


class Infeasible(PypsError):
    """No assignment satisfies the constraints: the reason, and the smallest change that would help."""

    exit_code = 3

    def __init__(self, reason: str, nearest: str = "") -> None:
        self.reason, self.nearest = reason, nearest
        super().__init__(f"{reason}; {nearest}" if nearest else reason)


class StoreError(PypsError):
    """The store refused a call: `what` was asked, the C core's `message`, and the class's `hint` what to do.

    `code` is the name of the C code, e.g. "PYPS_EFENCED".
    """

    code = "PYPS_E?"
    hint = ""

    def __init__(self, what: str, message: str) -> None:
        self.what, self.message = what, message
        super().__init__(f"{what}: {message}" + (f" ({self.hint})" if self.hint else ""))


class InvalidArgument(StoreError):
    code = "PYPS_EINVAL"


class SystemCallFailed(StoreError):
    code = "PYPS_ESYS"
    hint = "the operating system refused; its reason is in the message"


class SegmentExists(StoreError):
    code = "PYPS_EEXIST"
    hint = "open it, choose another name, or remove what nobody uses with `pyps shm gc`"


class SegmentNotFound(StoreError):
    code = "PYPS_ENOENT"
    hint = "has it been created, and with the same PYPS_SHM_DIR? `pyps shm ls` lists the segments"


class OutOfSpace(StoreError):
    code = "PYPS_ENOSPC"
    hint = "free memory with `pyps shm gc`, enlarge /dev/shm (docker run --shm-size), or set PYPS_SHM_DIR"


class SegmentCorrupt(StoreError):
    code = "PYPS_ECORRUPT"
    hint = "the file is not a whole pyps segment; make a new one"


class OtherABI(StoreError):
    code = "PYPS_EABI"
    hint = "every process must use the same version of pyps on the same kind of machine"


class NotOurs(StoreError):
    code = "PYPS_EPERM"
    hint = "a segment must be a plain file of this user that no one else may read or write"


class StoreFull(StoreError):
    code = "PYPS_EFULL"
    hint = "create the store with more ranks or a larger max_participants"


class TimedOut(StoreError):
    code = "PYPS_ETIMEDOUT"
    hint = "the others did not come in time; `pyps shm ls` and the logs of the workers say who is missing"


class Fenced(StoreError):
    code = "PYPS_EFENCED"
    hint = "this worker was too late and is out: call rejoin() and drop the gradient"


class SnapshotCancelled(StoreError):
    code = "PYPS_ESTALE"
    hint = "take it again, or create the store with more snapshot_spares"


class PushRejected(StoreError):
    code = "PYPS_EREJECTED"
    hint = "the parameters are unchanged: start again from fresh ones"


class Forked(StoreError):
    code = "PYPS_EFORKED"
    hint = "a handle belongs to the process that opened it: open the store again in the child"


class NotReady(StoreError):
    code = "PYPS_ENOTREADY"
    hint = "its creator is still at it, or died: try again, then `pyps shm gc`"


class Busy(StoreError):
    code = "PYPS_EBUSY"
    hint = "in use by a live process: wait for it or choose another"


class Ended(StoreError):
    code = "PYPS_EEND"
    hint = "every sample has been handed out and accounted for"


class UnknownPolicy(StoreError):
    code = "PYPS_EPOLICY"
    hint = "the segment needs a pyps that knows its policy"


class NotFinite(StoreError):
    code = "PYPS_ENONFINITE"
    hint = "skip the step (samples=0), or choose the policy skip or zero"


class StoreClosed(StoreError):
    """Not from C: the Python handle has been closed."""

    code = "closed"
    hint = "open the store again"


class LinkLost(StoreError):
    """Not from C: the server of a remote store is gone, or was never there."""

    code = "lost"
    hint = "is `pyps serve` running there, and are these its keys? Workers have to be started again"


class LinkRefused(StoreError):
    """Not from C: the server of a remote store does not let this client in."""

    code = "refused"
    hint = "both sides need the keys of one `pyps serve --keys` folder"
