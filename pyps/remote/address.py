"""Where a store is served: tcp://host:port/name, and what a client has to know to go there.

tcp://10.0.0.1:5555/model?keys=client.key     encrypted with this key file (default: PYPS_KEYS)
tcp://127.0.0.1:5555/model?pull=int8          parameters come back in 8 bits
tcp://10.0.0.1:5555/model?insecure=1          in the clear, on a network that one trusts
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from pyps.errors import InputError
from pyps.native.values import Codec
from pyps.store.codec import as_codec

SCHEME = "tcp://"
OPTIONS = ("keys", "pull", "insecure")
EXPECTED = "tcp://host:port/name, with options such as ?keys=client.key"


def is_address(name: str) -> bool:
    """Whether a store's name says that it is elsewhere."""
    return name.startswith(SCHEME)


def is_loopback(host: str) -> bool:
    """Whether what is sent there stays on this machine; False for `*` and for names other than localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
    """A served store. `pull`: how its parameters come back."""

    host: str
    port: int
    store: str
    keys: str | None = None
    pull: Codec = Codec.F32
    insecure: bool = False

    @property
    def endpoint(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.endpoint}/{self.store}"


def parse_address(text: str) -> Address:
    """Read an address; without ?keys= those of PYPS_KEYS. Raises InputError, also where it would leave this
    machine in the clear without `insecure`.
    """
    wrong = InputError("address", "", repr(text), EXPECTED)
    try:
        parts = urlsplit(text)
        host, port, store = parts.hostname, parts.port, parts.path.removeprefix("/")
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise wrong from None
    if not is_address(text) or not host or not port or not store or "/" in store or parts.fragment:
        raise wrong
    for name in options.keys() - set(OPTIONS):
        raise InputError("address", name, repr(text), f"one of the options {', '.join(OPTIONS)}")
    keys = options.get("keys") or os.environ.get("PYPS_KEYS") or None
    insecure = options.get("insecure", "0") not in ("", "0")
    if keys is None and not insecure and not is_loopback(host):
        expected = "?keys=FILE or PYPS_KEYS, as `pyps serve --keys` made it; or ?insecure=1"
        raise InputError("address", "keys", f"none, for {host}, which is not this machine", expected)
    pull = as_codec(options.get("pull", Codec.F32))
    return Address(host, port, store, None if insecure else keys, pull, insecure)
