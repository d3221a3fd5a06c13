"""Uneven batches under torchft, where replicas die and come back without a restart:

    torchft_lighthouse --min_replicas 1
    TORCHFT_LIGHTHOUSE=http://host0:29510 python with_torchft.py      # on each host

Each step's samples are shared among the replicas of its quorum, by their speed; their sum stays.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import digits, network
from torch.nn.functional import cross_entropy
from torchft import Manager, Optimizer, ProcessGroupGloo

from pyps.torch.torchft import ReplicaData, UnevenReplica

GLOBAL_BATCH, TIMEOUT = 96, timedelta(seconds=15)


def manager_of() -> Manager:
    """This replica's manager, of one process."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"{socket.gethostname()}-{os.getpid()}-",
    )
    manager.local_store = store  # it lives as long as the manager
    return manager


def train(epochs: int, observe: Callable[[dict[str, Any]], None], **options: Any) -> None:
    """`observe` gets what each committed step was. options: of UnevenReplica."""
    torch.manual_seed(0)
    train_set, _ = digits()
    model, manager = network(), manager_of()
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.05))
    replica = UnevenReplica(manager, model, ReplicaData(train_set, GLOBAL_BATCH), **options)
    manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
    manager.register_state_dict_fn("optimizer", optimizer.load_state_dict, optimizer.state_dict)
    while replica.epoch < epochs:
        optimizer.zero_grad()  # the step's quorum
        epoch, position = replica.epoch, replica.position
        images, labels = replica.batch()
        loss = cross_entropy(replica.model(images), labels)
        replica.backward(loss)
        optimizer.step()
        if replica.step():
            observe({"epoch": epoch, "position": position, "split": replica.split, "loss": loss.item()})
    manager.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(2, lambda step: print(step["epoch"], step["position"], step["split"], f"{step['loss']:.4f}"))
