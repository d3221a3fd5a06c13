"""The server of tests/helpers/soak.py: python soak_server.py STORE TIMEOUT_SECONDS; ends with its stdin."""

import sys

from pyps.remote.server import Server

with Server(
    sys.argv[1], "tcp://127.0.0.1:*", insecure=True, client_timeout_seconds=float(sys.argv[2])
) as server:
    print(server.address, flush=True)
    sys.stdin.read()
    print(server.counters.repeated, flush=True)
