"""after.py on two hosts with torchrun --nnodes 2, four unlike devices: sudo python examples/ddp/two_hosts.py

The hosts are network namespaces of this machine, joined by a shaped link. On real ones the two commands are
the same, with the first host's address.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "benchmarks"))

from shaped import DEVICE, SERVER, missing, shaped  # noqa: E402 - of the folder above

PORT, DEADLINE_SECONDS = 29572, 180


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc writes it")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    if why := missing():
        sys.exit(f"no network namespaces here: {why}")
    interfaces = {"GLOO_SOCKET_IFNAME": DEVICE, "TP_SOCKET_IFNAME": DEVICE}
    chosen = {"OMP_NUM_THREADS": "1", "PACES": "1,1.4,2,2.9", "EPOCHS": str(options.epochs)}
    environment = {**os.environ, **interfaces, **chosen}
    with shaped(options.rate) as pair:
        agents = []
        for number, host in enumerate((pair.server, pair.client)):
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--nproc-per-node",
                "2",
            ]
            torchrun += ["--node-rank", str(number), "--master-addr", SERVER, "--master-port", str(PORT)]
            torchrun.append(str(HERE / "after.py"))
            print(" ".join(["python", *torchrun[1:]]), flush=True)
            agents.append(subprocess.Popen(pair.command(host, *torchrun), env=environment))
        try:
            codes = [agent.wait(DEADLINE_SECONDS) for agent in agents]
        finally:
            for agent in agents:
                agent.terminate()
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
