"""The server of tests/helpers/soak.py: python soak_server.py STORE TIMEOUT_SECONDS KEYS BYTES.

So many bytes are free for segments. It ends with its stdin.
"""

import sys
from types import SimpleNamespace
from unittest import mock

from pyps.remote.server import Server

name, timeout, keys, free = sys.argv[1:]
room = SimpleNamespace(f_bavail=int(free), f_frsize=1)
with Server(name, "tcp://127.0.0.1:*", keys=keys, client_timeout_seconds=float(timeout)) as server:
    with mock.patch("pyps.remote.bounds.os.statvfs", return_value=room):
        print(server.address, flush=True)
        sys.stdin.read()
    print(server.counters.repeated, flush=True)
