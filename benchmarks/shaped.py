"""Two network namespaces and a link of a known rate between them: veth, shaped by tc tbf both ways."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

DEVICE = "pyps0"
SERVER, CLIENT = "10.231.77.1", "10.231.77.2"


@dataclass(frozen=True)
class Shaped:
    """`server` and `client` are the namespaces; the server's address is SERVER."""

    server: str
    client: str

    def command(self, where: str, *words: str) -> list[str]:
        """What runs a command in one of the two."""
        return ["ip", "netns", "exec", where, *words]

    def wire_bytes(self) -> tuple[int, int]:
        """What the client's end has received and sent, with every header."""
        folder = f"/sys/class/net/{DEVICE}/statistics"
        words = ("cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes")
        received, sent = _run(*self.command(self.client, *words)).split()
        return int(received), int(sent)

    def switch(self, up: bool) -> None:
        """Cut the link, or mend it."""
        _run("ip", "-n", self.client, "link", "set", DEVICE, "up" if up else "down")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _shape(device: str, rate: str) -> tuple[str, ...]:
    tbf = ("tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
    return ("tc", "qdisc", "add", "dev", device, "root", *tbf)


def missing() -> str:
    """Why there can be no namespaces here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"no `{program}` (iproute2)"
    name = f"pyps-p-{uuid.uuid4().hex[:8]}"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "netns", "exec", name, *_shape("lo", "1gbit"))
        finally:
            _run("ip", "netns", "del", name)
        return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd[:4])}: {error.stderr.strip()}"


@contextmanager
def shaped(rate: str) -> Iterator[Shaped]:
    """The two namespaces, gone at the end. rate: as tc writes it, such as 100mbit."""
    mark = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    pair = Shaped(f"pyps-s-{mark}", f"pyps-c-{mark}")
    made: list[str] = []
    try:
        for name in (pair.server, pair.client):
            _run("ip", "netns", "add", name)
            made.append(name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        ends = (DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", pair.client)
        _run("ip", "-n", pair.server, "link", "add", *ends)
        for name, address in ((pair.server, SERVER), (pair.client, CLIENT)):
            _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
            _run("ip", "netns", "exec", name, *_shape(DEVICE, rate))
        yield pair
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
