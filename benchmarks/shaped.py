"""Network namespaces and links of a known rate between them: veth, shaped by tc tbf both ways."""

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
        """Return what runs a command in one of the two."""
        return ["ip", "netns", "exec", where, *words]

    def wire_bytes(self) -> tuple[int, int]:
        """Return what the client's end has received and sent, with every header."""
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


@dataclass(frozen=True)
class Star:
    """Hosts on one switch, each by its own link; their names, and their addresses in order."""

    hosts: tuple[str, ...]
    addresses: tuple[str, ...]

    def command(self, host: int, *words: str) -> list[str]:
        """Return what runs a command on a host."""
        return ["ip", "netns", "exec", self.hosts[host], *words]


@contextmanager
def star(rate: str, count: int) -> Iterator[Star]:
    """`count` namespaces on a bridge, gone at the end; each link has this rate both ways, as tc writes it."""
    mark = uuid.uuid4().hex[:6]
    switch = f"pyps-b-{mark}"
    found = Star(
        tuple(f"pyps-h{k}-{mark}" for k in range(count)), tuple(f"10.231.78.{k + 1}" for k in range(count))
    )
    made: list[str] = []
    try:
        for name in (switch, *found.hosts):
            _run("ip", "netns", "add", name)
            made.append(name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for k, (host, address) in enumerate(zip(found.hosts, found.addresses, strict=True)):
            ends = (DEVICE, "type", "veth", "peer", "name", f"port{k}", "netns", switch)
            _run("ip", "-n", host, "link", "add", *ends)
            _run("ip", "-n", switch, "link", "set", f"port{k}", "master", "bridge", "up")
            _run("ip", "-n", host, "address", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", host, "link", "set", DEVICE, "up")
            _run(*found.command(k, *_shape(DEVICE, rate)))
            _run("ip", "netns", "exec", switch, *_shape(f"port{k}", rate))
        yield found
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
