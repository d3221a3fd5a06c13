"""Where a store is served, and what a client has to know to go there.

ipc:///dev/shm/sockets-1000/model             a unix socket, for processes of the same user on this machine
tcp://10.0.0.1:5555/model?keys=client.key     encrypted with this key file (default: PYPS_KEYS)
tcp://127.0.0.1:5555/model?pull=int8          parameters come back in 8 bits
tcp://10.0.0.1:5555/model?insecure=1          in the clear, on a network that one trusts
tcp://10.0.0.1:5555,10.0.0.2:5555/model       over several servers, a shard each; the first one decides.
                                              ?keys= then has one file for all, or one each, with commas
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from pyps.errors import InputError
from pyps.native.values import Codec
from pyps.store.codec import as_codec

SCHEME, UNIX = "tcp://", "ipc://"
CLIENT_TIMEOUT_SECONDS = 10.0  # of a server, unless it is given another: a silent client is dead then
OPTIONS = ("keys", "pull", "insecure")
EXPECTED = "tcp://host:port/name or ipc:///folder/name, with options such as ?keys=client.key"
STORE_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")  # as in csrc/store/segment.c


def is_address(name: str) -> bool:
    """Return whether a store's name says that it is elsewhere."""
    return name.startswith((SCHEME, UNIX))


def check_store_name(where: str, name: str) -> None:
    """Raise InputError for a name that no segment can have."""
    if not STORE_NAME.fullmatch(name):
        expected = "1 to 200 letters, digits, '.', '_' or '-'"
        raise InputError(where, "name", repr(name if len(name) <= 60 else f"{name[:60]}..."), expected)


def is_loopback(host: str) -> bool:
    """Return whether what is sent there stays on this machine; False for `*` and for names but localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def needs_ipv6(host: str) -> bool:
    """Return whether a host is reached over IPv6 alone: libzmq resolves a name for one family."""
    try:
        return {found[0] for found in socket.getaddrinfo(host, None)} == {socket.AF_INET6}
    except (OSError, UnicodeError):
        return ":" in host  # libzmq says what is wrong with it


def endpoint_parts(endpoint: str) -> tuple[str, int | None]:
    """Host and port (None: `*`, any free one) of tcp://host:port. Raises InputError."""
    wrong = InputError("bind", "", repr(endpoint), "tcp://host:port, the port 1 to 65535 or *")
    host, _, port = endpoint.removeprefix(SCHEME).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not endpoint.startswith(SCHEME) or not host or "/" in endpoint.removeprefix(SCHEME):
        raise wrong
    if port == "*":
        return host, None
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise wrong
    return host, int(port)


@dataclass(frozen=True)
class Address:
    """A served store. `path`: of its unix socket; without one it is at host and port.

    `pull`: how its parameters come back.
    """

    store: str
    host: str = ""
    port: int = 0
    path: str = ""
    keys: str | None = None
    pull: Codec = Codec.F32
    insecure: bool = False

    @property
    def endpoint(self) -> str:
        if self.path:
            return f"{UNIX}{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}"

    def __str__(self) -> str:
        if self.path:
            return self.endpoint
        return f"{self.endpoint}/{self.store}" + "?insecure=1" * self.insecure


def is_sharded(text: str) -> bool:
    """Return whether an address names several servers."""
    return text.startswith(SCHEME) and "," in text.removeprefix(SCHEME).partition("/")[0]


def parse_servers(text: str) -> tuple[Address, ...]:
    """Read an address of one server or of several: one Address each. Raises InputError as parse_address."""
    if not is_sharded(text):
        return (parse_address(text),)
    hosts, slash, rest = text.removeprefix(SCHEME).partition("/")
    path, _, query = rest.partition("?")
    servers, options = hosts.split(","), [item for item in query.split("&") if item]
    keys = [item for item in options if item.startswith("keys=")]
    given = keys[0].removeprefix("keys=") if keys else os.environ.get("PYPS_KEYS", "")
    files = given.split(",") if given else []
    if len(files) not in (0, 1, len(servers)) or len(set(servers)) < len(servers):
        expected = f"different servers, and one key file for all or one for each of the {len(servers)}"
        raise InputError("address", "", repr(text), expected)
    others = [item for item in options if item not in keys]
    found = []
    for k, server in enumerate(servers):
        own = [f"keys={files[k if len(files) > 1 else 0]}"] if files else []
        tail = "&".join(own + others)
        found.append(parse_address(f"{SCHEME}{server}{slash}{path}" + f"?{tail}" * bool(tail)))
    return tuple(found)


def parse_address(text: str) -> Address:
    """Read an address; without ?keys= those of PYPS_KEYS. Raises InputError, also for TCP
    in the clear without `insecure`.
    """
    wrong = InputError("address", "", repr(text), EXPECTED)
    try:
        parts = urlsplit(text)
        host, port, path = parts.hostname or "", parts.port or 0, parts.path
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise wrong from None
    folder, _, store = path.rpartition("/")
    at_path = text.startswith(UNIX) and bool(folder) and not parts.netloc
    at_port = text.startswith(SCHEME) and bool(host and port) and not folder
    if not (at_path or at_port) or parts.fragment or "%" in path:
        raise wrong
    check_store_name("address", store)
    for name in options.keys() - set(OPTIONS):
        raise InputError("address", name, repr(text), f"one of the options {', '.join(OPTIONS)}")
    pull = as_codec(options.get("pull", Codec.F32))
    if at_path:
        return Address(store, path=path, pull=pull)
    keys = options.get("keys") or os.environ.get("PYPS_KEYS") or None
    insecure = options.get("insecure", "0") not in ("", "0")
    if keys is None and not insecure:
        expected = "?keys=FILE or PYPS_KEYS, as `pyps keys add` made it; or ?insecure=1"
        raise InputError("address", "keys", f"none, for {host}:{port}", expected)
    return Address(store, host, port, keys=None if insecure else keys, pull=pull, insecure=insecure)
