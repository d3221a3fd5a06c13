"""Memory in proportion to each device: optimizer states and parameters that ranks hold by unlike shares."""

from pyps.sharding.held import bytes_held
from pyps.sharding.modules import gathered, shard
from pyps.sharding.optimizer import shard_optimizer
from pyps.sharding.state_dicts import load_state_dict, part_state_dict, whole_state_dict

__all__ = [
    "bytes_held",
    "gathered",
    "load_state_dict",
    "part_state_dict",
    "shard",
    "shard_optimizer",
    "whole_state_dict",
]
