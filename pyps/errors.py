"""The errors that pyps raises.

    PypsError
    |-- InputError        a file, field or argument is wrong               (exit code 2)
    |-- Infeasible        well-formed, but no plan can satisfy it          (exit code 3)
    |-- Diverged          training went to values that are not finite      (exit code 1)
    |-- CoreMissing       this installation has no C core                  (exit code 2)
    `-- StoreError        the parameter store refused; `code` is the C name (exit code 2)
        |-- InvalidArgument  SystemCallFailed  SegmentExists  SegmentNotFound  OutOfSpace  SegmentCorrupt
        |-- OtherABI  NotOurs  StoreFull  TimedOut  Fenced  SnapshotCancelled  PushRejected  Forked  NotReady
        |-- NotFinite  FalseLook  Busy  Ended  UnknownPolicy  WaitInterrupted  StoreClosed
        `-- LinkLost  LinkRefused  ShardLost (a NotReady)

An error is raised where the fact is known; pyps.cli turns it into one line and an exit code.
"""

from __future__ import annotations

import difflib
import platform
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any

HIDDEN = ("Cc", "Cf", "Zl", "Zp")  # Unicode's classes of signs that are not seen
LONGEST_WORD = 100  # characters for which a like one is looked for


class PypsError(Exception):
    """Base of every error of pyps; its text is one message for the user. Other processes can receive it."""

    exit_code = 2

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (type(self), self.args, self.__dict__)


def _received(kind: type[PypsError], args: tuple[Any, ...], values: dict[str, Any]) -> PypsError:
    """Return the error as it was where it was raised, whatever its class is made from."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(values)
    return error


class InputError(PypsError):
    """Bad input: `where` (file), `field`, what was `found` and what is `expected`."""

    def __init__(self, where: str, field: str, found: str, expected: str) -> None:
        self.where, self.field, self.found, self.expected = where, field, found, expected
        place = f"{where}: {field}" if field else where
        super().__init__(f"{place}: found {found}; expected {expected}")


def reason_of(error: Exception) -> str:
    """Say in lower case why the operating system refused, or what else an error says."""
    return str(getattr(error, "strerror", None) or error).lower()


class CoreMissing(PypsError):
    """The compiled core was asked for where only the pure-Python package is installed."""

    def __init__(self) -> None:
        super().__init__(
            "this installation has no C core, which stores, servers, `pyps run`, `pyps simulate` and codecs "
            f"other than f32 need: found {sys.platform} on {platform.machine()}; expected Linux on x86-64 or "
            "aarch64, and its wheel. Profiling, planning, pyps.torch and workers at tcp:// work without it"
        )


def how_to_install(extra: str) -> str:
    """Return the command that adds what an extra of pyproject.toml has, from where this was installed."""
    from pyps_commands import installed_from

    return f"pip install '{installed_from()}[{extra}]'"


def needed(module: str, extra: str) -> Any:
    """A module that an extra of pyproject.toml brings. Raises PypsError, with how to install it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise PypsError(f"{name} cannot be imported ({error}): {how_to_install(extra)}") from error


def one_of(found: str, choices: Iterable[str]) -> str:
    """Return what is expected instead of a word that is none of the choices; names the one that it is most
    like.
    """
    names = list(choices)
    near = difflib.get_close_matches(found[:LONGEST_WORD], names)
    near.sort(key=lambda name: sorted(name) != sorted(found))  # one with two letters exchanged comes first
    return f"one of {', '.join(names)}" + (f"; did you mean {near[0]!r}?" if near else "")


def shown(text: str, keep: str = "") -> str:
    """Text of a file or another host for a terminal: control and direction signs, but for `keep`, escaped."""
    if text.isprintable():
        return text
    hidden = {c for c in text if unicodedata.category(c) in HIDDEN and c not in keep}
    return "".join(c.encode("unicode_escape").decode() if c in hidden else c for c in text)


class Infeasible(PypsError):
    """No assignment meets the constraints: the `reason`, and in `nearest` the smallest change that helps."""

    exit_code = 3

    def __init__(self, reason: str, nearest: str = "") -> None:
        self.reason, self.nearest = reason, nearest
        super().__init__(f"{reason}; {nearest}" if nearest else reason)


class Diverged(PypsError):
    """Training went to values that are not finite: `what` was seen, and `where` in the run.

    last_finite: the last loss of this worker that was finite, None if there is none.
    """

    exit_code = 1

    def __init__(self, what: str, where: str, last_finite: float | None = None) -> None:
        self.what, self.where, self.last_finite = what, where, last_finite
        before = f"; the last finite one was {last_finite:g}" if last_finite is not None else ""
        hint = "train with a lower learning rate, or go on with --allow-nonfinite"
        super().__init__(f"{what} ({where}{before}): {hint}")


class StoreError(PypsError):
    """The store refused a call: `what` was called, the C core's `message`, and the class's `hint`.

    `code` is the name of the C code, such as "PYPS_EFENCED".
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
    hint = "open it, choose another name, or remove unused segments with `pyps shm gc`"


class SegmentNotFound(StoreError):
    code = "PYPS_ENOENT"
    hint = "was it created, and with the same PYPS_SHM_DIR? `pyps shm ls` lists the segments"


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
    """`staged`: the result of a push that waits for its round, as far as it is known: it counts."""

    code = "PYPS_ETIMEDOUT"
    staged: Any = None
    hint = "other workers did not arrive in time; `pyps shm ls` and the workers' logs show which"


class Fenced(StoreError):
    code = "PYPS_EFENCED"
    hint = "this worker missed a deadline and was removed: call rejoin() and drop the gradient"


class SnapshotCancelled(StoreError):
    code = "PYPS_ESTALE"
    hint = "take the snapshot again, or create the store with more snapshot_spares"


class PushRejected(StoreError):
    code = "PYPS_EREJECTED"
    hint = "the parameters are unchanged: start the step again from new ones"


class Forked(StoreError):
    code = "PYPS_EFORKED"
    hint = "a handle belongs to the process that opened it: open the store again in the child"


class NotReady(StoreError):
    code = "PYPS_ENOTREADY"
    hint = "its creator is still writing it, or has died: try again, then `pyps shm gc`"


class ShardLost(NotReady):
    """A server of several has lost its shard of a store in which workers have trained."""

    hint = "start all of its servers anew, and go on from a checkpoint with pyps run --resume"


class Busy(StoreError):
    code = "PYPS_EBUSY"
    hint = "a live process uses it: wait, or choose another name"


class Ended(StoreError):
    code = "PYPS_EEND"
    hint = "all samples of the run are assigned and accounted for"


class UnknownPolicy(StoreError):
    code = "PYPS_EPOLICY"
    hint = "this version of pyps lacks the segment's policy"


class NotFinite(StoreError):
    code = "PYPS_ENONFINITE"
    hint = "a gradient: skip it (samples=0), or choose nonfinite skip or zero; parameters: training diverged"


class FalseLook(StoreError):
    """A push's `looked` names what is not finite; the gradient was taken without that block."""

    code = "PYPS_EFALSELOOK"
    hint = "what changes a gradient after it was looked at must look again, or not say that it has"


class PlanChanged(StoreError):
    code = "PYPS_EPLAN"
    hint = "another process has re-planned meanwhile: decide again on the present plan"


class WaitInterrupted(StoreError):
    """`staged`: the result of a push that waited for its round, as far as it is known: it counts."""

    code = "PYPS_EINTR"
    staged: Any = None
    hint = "the process ended its own wait; call again"


class StoreClosed(StoreError):
    """Raised by Python: the handle was closed."""

    code = "closed"
    hint = "open the store again"


class LinkLost(StoreError):
    """Raised by Python: the server of a remote store does not answer."""

    code = "lost"
    hint = "is `pyps serve` running there, with these keys? Start the workers again"


class LinkRefused(StoreError):
    """Raised by Python: the server of a remote store refuses this client."""

    code = "refused"
    hint = "both sides need the keys of one `pyps serve --keys` folder"
