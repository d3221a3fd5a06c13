"""Segments that are missing, not ours, damaged or hostile: typed errors, never a crash."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps import errors, native
from pyps.native.values import Hyper
from pyps.store import Store
from pyps.store.policies import BSP
from pyps.store.segments import collect_garbage, segments

ABI_OFFSET = 12  # header: magic[8], endian u32, abi u32
TENSORS = {"w": np.arange(5000.0), "b": np.zeros(3)}
FIXED = settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(18, 60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def whole(shm: Path) -> bytes:
    """The bytes of a good segment; it is gone again."""
    Store.create("good", TENSORS, batches=[1], max_participants=2, chunk_params=1024, keep=True).close()
    data = (shm / "pyps-good").read_bytes()
    native.unlink("good")
    return data


def opened(shm: Path, data: bytes, mode: int = 0o600) -> None:
    """Open these bytes as a segment, and use it if that works."""
    path = shm / "pyps-bad"
    path.write_bytes(data)
    path.chmod(mode)
    try:
        with Store.open("bad") as store:
            store.join()
            store.pull()
            store.snapshot(timeout=0.2)
            store.start(timeout=0.2)
            staging = store.stage(timeout=0.2)
            staging.flat.fill(0.0)
            store.push(staging, 1, [Hyper(lr=0.1)] * store.layout.groups, timeout=0.2)
    finally:
        path.unlink()


def test_the_copy_itself_is_good(shm: Path, whole: bytes) -> None:
    opened(shm, whole)


@pytest.mark.parametrize("size", [0, 1, 7, 64, 4095, 4096, 8192])
def test_truncated(shm: Path, whole: bytes, size: int) -> None:
    with pytest.raises((errors.SegmentCorrupt, errors.NotReady)):
        opened(shm, whole[:size])


def test_one_byte_short_or_long(shm: Path, whole: bytes) -> None:
    for data in (whole[:-1], whole + b"\0"):
        with pytest.raises(errors.SegmentCorrupt):
            opened(shm, data)


def test_another_abi_and_byte_order(shm: Path, whole: bytes) -> None:
    abi = struct.unpack_from("<I", whole, ABI_OFFSET)[0]
    assert abi == native.abi_version()
    for offset, value in ((ABI_OFFSET, struct.pack("<I", abi + 1)), (8, whole[8:12][::-1])):
        with pytest.raises(errors.OtherABI):
            opened(shm, whole[:offset] + value + whole[offset + 4 :])


def test_foreign(shm: Path, whole: bytes) -> None:
    with pytest.raises(errors.SegmentCorrupt):
        opened(shm, b"PNG\r\n\x1a\n\0" + whole[8:])


@FIXED
@given(st.binary(max_size=9000))
def test_random_bytes(shm: Path, data: bytes) -> None:
    with pytest.raises(errors.StoreError):
        opened(shm, data)


@pytest.mark.promise("owner, mode, size and offsets are checked at opening")
@FIXED
@given(st.lists(st.tuples(st.integers(0, 2**31), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_damage_anywhere_is_an_error_or_harmless(
    shm: Path, whole: bytes, damage: list[tuple[int, bytes]]
) -> None:
    data = bytearray(whole)
    for place, change in damage:
        # the first 16 KiB hold what is validated; the rest is mostly numbers
        at = place % min(len(data) - 8, 16384 if place % 2 else len(data) - 8)
        data[at : at + len(change)] = change
    with suppress(errors.StoreError):
        opened(shm, bytes(data))


@pytest.mark.promise("segments have mode 0600")
@pytest.mark.parametrize("mode", [0o666, 0o620, 0o604])
def test_wrong_mode(shm: Path, whole: bytes, mode: int) -> None:
    with pytest.raises(errors.NotOurs):
        opened(shm, whole, mode)


@pytest.mark.promise("segments have mode 0600")
def test_a_new_segment_is_its_users_alone(shm: Path) -> None:
    """Whatever files of this user may be otherwise."""
    before = os.umask(0)
    try:
        with Store.create("mine", {"w": np.zeros(8)}, batches=[4]):
            assert (shm / "pyps-mine").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.promise("Another user's segment is refused")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_wrong_owner(shm: Path, whole: bytes) -> None:
    path = shm / "pyps-theirs"
    path.write_bytes(whole)
    path.chmod(0o600)
    os.chown(path, 12345, -1)
    with pytest.raises(errors.NotOurs, match="owner 12345; expected 0"):
        Store.open("theirs")
    os.chown(path, 0, -1)
    shm.chmod(0o755)

    def stranger() -> None:
        os.setuid(12345)
        with pytest.raises(errors.NotOurs, match="another user"):
            Store.open("theirs")
        with pytest.raises(errors.NotOurs, match="another user"):
            native.unlink("theirs", force=True)

    assert in_child(stranger) == 0
    path.unlink()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
    ],
    ids=["symlink", "dangling symlink", "folder", "fifo"],
)
def test_not_a_plain_file(shm: Path, make: Callable[[Path], None]) -> None:
    path = shm / "pyps-odd"
    make(path)
    with pytest.raises(errors.StoreError) as caught:
        Store.open("odd")
    assert isinstance(caught.value, errors.NotOurs | errors.SegmentCorrupt | errors.SystemCallFailed)
    with pytest.raises(errors.StoreError):
        Store.create("odd", TENSORS, batches=[1])
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def test_names_that_are_taken_or_missing(shm: Path) -> None:
    with pytest.raises(errors.SegmentNotFound):
        Store.open("one")
    with pytest.raises(errors.SegmentNotFound):
        native.unlink("one")
    with Store.create("one", TENSORS, batches=[1]):
        with pytest.raises(errors.SegmentExists):
            Store.create("one", TENSORS, batches=[1])
        with pytest.raises(errors.Busy):
            native.unlink("one")
        with pytest.raises(errors.Busy):
            native.probe("one")


FULL = {
    "create": "pyps.Store.create('big', {'w': np.zeros(1 << 23)}, batches=[1])\n",
    "an encoded push": (
        "store = pyps.Store.create('small', {'w': np.zeros(4000)}, batches=[1], max_participants=1)\n"
        "store.join(), store.start()\n"
        "staging = store.stage()\n"
        "filler = open('/mnt/filler', 'wb', buffering=0)\n"
        "with contextlib.suppress(OSError):\n    while filler.write(bytes(4096)):\n        pass\n"
        "os.unlink('/mnt/filler')\n"
        "codes = np.zeros(pyps.store.codec.encoded_vector_bytes(Codec.INT8, store.layout), np.uint8)\n"
        "try:\n    store.push(staging, 1, Hyper(lr=0.1), encoding='int8', gradient=codes)\n"
        "finally:\n    store.close()\n"
    ),
}


@pytest.mark.parametrize("what", FULL)
def test_a_full_file_system_is_said(what: str) -> None:
    """Needs a small tmpfs; user namespaces give one without root where they are allowed."""
    body = "".join(f"    {line}\n" for line in FULL[what].splitlines())
    script = (
        "import contextlib, os\nimport numpy as np, pyps, pyps.store.codec\n"
        "from pyps.native.values import Codec, Hyper\n"
        f"try:\n{body}except pyps.errors.OutOfSpace as error:\n    print(error)\n"
    )
    mount = "mount -t tmpfs -o size=8m none /mnt"
    shell = mount + ' && PYPS_SHM_DIR=/mnt "$0" -c "$1" && ls /mnt'
    command = ["unshare", "-Urm", "sh", "-c", shell, sys.executable, script]
    probe = ["unshare", "-Urm", "sh", "-c", mount]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mount in a user namespace")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--shm-size" in done.stdout, done.stdout
    assert len(done.stdout.splitlines()) == 1, "nothing is left of a segment that did not fit"


# Participants.


def test_ranks_are_given_out_once(shm: Path) -> None:
    with (
        Store.create("ranks", TENSORS, batches=[1, 1], max_participants=3) as store,
        Store.open("ranks") as two,
    ):
        assert store.join(1) == 1
        with pytest.raises(errors.Busy, match="rank 1"):
            two.join(1)
        with pytest.raises(errors.InvalidArgument, match="rank"):
            two.join(2)
        assert two.join() == 0
        with Store.open("ranks") as three:
            with pytest.raises(errors.StoreFull):
                three.join()
            three.join(role="observer")
            with Store.open("ranks") as four, pytest.raises(errors.StoreFull):
                four.join(role="observer")


def test_no_worker_starts_before_all_have_joined(shm: Path) -> None:
    with Store.create("alone", TENSORS, batches=[1, 1]) as store:
        store.join()
        with pytest.raises(errors.TimedOut):
            store.start(timeout=0.05)


def test_a_late_worker_is_fenced_and_comes_back(shm: Path) -> None:
    rules = BSP(round_timeout_seconds=0.2)
    hyper = Hyper(lr=1.0)
    with (
        Store.create("late", {"w": np.zeros(4)}, batches=[1, 1], policy=rules) as late,
        Store.open("late") as fast,
    ):
        late.join(0)
        fast.join(1)
        late.start()
        late_area = late.stage()
        late_area.flat.fill(100.0)
        fast.start()
        staging = fast.stage()
        staging.flat.fill(1.0)
        assert fast.push(staging, 1, hyper, timeout=5.0).sources == 1
        with pytest.raises(errors.Fenced, match="rejoin"):
            late.push(late_area, 1, hyper)
        late.rejoin()
        assert late.snapshot().tensors["w"].tolist() == [-1.0] * 4
        done: list[int] = []

        def other() -> None:
            fast.start(timeout=5.0)
            again = fast.stage()
            again.flat.fill(1.0)
            done.append(fast.push(again, 1, hyper, timeout=5.0).sources)

        thread = threading.Thread(target=other)
        thread.start()
        late.start(timeout=5.0)
        staging = late.stage()
        staging.flat.fill(3.0)
        result = late.push(staging, 1, hyper, timeout=5.0)
        thread.join()
        assert result.version in (2, 3)
        assert done


def in_child(body: Callable[[], None]) -> int:
    """Run in a forked child; 0 if nothing was raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_is_refused_and_does_no_harm(shm: Path) -> None:
    store = Store.create("fork", TENSORS, batches=[1])
    store.join()
    staging = store.stage()
    backend = store.backend

    def child() -> None:
        with pytest.raises(errors.Forked, match="child"):
            store.status()
        with pytest.raises(errors.Forked):
            backend.status()
        assert str(shm) not in Path("/proc/self/maps").read_text(), "the mapping is the parent's alone"
        backend.close()
        store.close()
        with Store.open("fork") as own:
            assert own.status().active == 1

    assert in_child(child) == 0
    staging.flat.fill(0.0)
    store.start()
    assert store.push(staging, 1, Hyper(lr=0.1)).version == 1
    store.close()


def test_a_forked_child_keeps_no_lock_of_its_dead_parent(shm: Path) -> None:
    """It is like a loader process does that outlives its worker."""
    with Store.create("orphan", TENSORS, batches=[2], samples=4) as store:

        def worker() -> None:
            own = Store.open("orphan")
            own.join(0)
            own.start()
            orphan = os.fork()
            if orphan == 0:
                signal.pause()  # until the test ends it
            os.write(says, str(orphan).encode())
            os.kill(os.getpid(), signal.SIGKILL)

        hears, says = os.pipe()
        assert in_child(worker) == -signal.SIGKILL
        orphan = int(os.read(hears, 20))
        os.close(hears), os.close(says)
        try:
            assert store.reap() == 1
            assert store.join(0) == 0
            store.leave()
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_the_creator_removes_its_own_segment_alone(shm: Path) -> None:
    first = Store.create("name", TENSORS, batches=[1])
    native.unlink("name", force=True)
    with Store.create("name", TENSORS, batches=[1]):
        first.close()
        Store.open("name").close()


def test_a_restart_needs_no_fresh_memory(shm: Path) -> None:
    with Store.create("restarts", TENSORS, batches=[2], samples=400) as store:

        def worker() -> None:
            own = Store.open("restarts")
            own.join(0)
            os.kill(os.getpid(), signal.SIGKILL)

        blocks = []
        for _ in range(4):
            assert in_child(worker) == -signal.SIGKILL
            blocks.append((shm / "pyps-restarts").stat().st_blocks)
        assert len(set(blocks)) == 1, "every restart took another slot's memory"
        assert store.reap() == 1


def test_the_rank_of_a_killed_worker_is_inherited(shm: Path) -> None:
    with Store.create("killed", TENSORS, batches=[2], samples=4) as store:

        def child() -> None:
            own = Store.open("killed")
            own.join(0)
            own.start()
            os.kill(os.getpid(), signal.SIGKILL)

        assert in_child(child) == -signal.SIGKILL
        assert store.reap() == 1
        assert store.ranks()[0].returned == 2
        assert store.join(0) == 0
        claim = store.start()
        assert (claim.first, claim.count) == (0, 2)


# Listing and collecting.


def test_gc_takes_only_unused_segments(shm: Path) -> None:
    Store.create("dead", TENSORS, batches=[1], keep=True).close()
    (shm / "pyps-foreign").write_bytes(b"something else")
    (shm / "pyps-foreign").chmod(0o600)
    (shm / "unrelated").write_bytes(b"")
    with Store.create("live", TENSORS, batches=[1]):
        assert {s.name: s.state for s in segments()} == {
            "dead": "free",
            "foreign": "PYPS_ECORRUPT",
            "live": "in use",
        }
        removed, kept = collect_garbage()
        assert [s.name for s in removed] == ["dead"]
        assert [s.name for s in kept] == ["foreign", "live"]
    assert sorted(p.name for p in shm.iterdir()) == ["pyps-foreign", "unrelated"]
    for path in shm.iterdir():
        path.unlink()


def test_a_name_that_no_segment_can_have_is_shown_escaped(shm: Path) -> None:
    for name in (b"pyps-bad\xff", b"pyps-\x1b[31mred"):
        Path(os.fsdecode(os.fsencode(shm) + b"/" + name)).touch(mode=0o600)
    names = {s.name: s.state for s in segments()}
    assert names == {"bad\\udcff": "PYPS_EINVAL", "\\x1b[31mred": "PYPS_EINVAL"}
    assert all(s.detail.isprintable() for s in segments())
    assert [len(found) for found in collect_garbage()] == [0, 2]
    for path in shm.iterdir():
        path.unlink()


def test_a_segment_held_by_another_process_is_in_use(shm: Path) -> None:
    Store.create("held", TENSORS, batches=[1], keep=True).close()
    code = "import pyps,sys; s = pyps.Store.open('held'); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        assert collect_garbage()[0] == []
        holder.communicate()
    assert [s.name for s in collect_garbage()[0]] == ["held"]


def test_a_slot_whose_gradient_waits_for_its_round_is_free_when_it_has_closed(shm: Path) -> None:
    initial = {"w": np.zeros(8, np.float32)}
    with (
        Store.create("slots", initial, batches=[1, 1], policy="bsp", max_participants=2) as first,
        Store.open("slots") as second,
        Store.open("slots") as third,
    ):
        first.join(0)
        second.join(1)
        first.start()
        second.start()
        with pytest.raises(errors.TimedOut):
            first.push(first.stage(), 1, Hyper(lr=1.0), timeout=0.05)
        first.leave()
        with pytest.raises(errors.StoreFull, match="wait for their round; join again when it has closed"):
            third.join(0)
        second.push(second.stage(), 1, Hyper(lr=1.0))
        assert third.join(0) == 0
