# check.py
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pyps.torch import check_gradient, weighted_hook


def loss(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    batch = 48 if dist.get_rank() == 0 else 16
    torch.manual_seed(dist.get_rank())
    x = torch.randn(batch, 4)
    before = check_gradient(model, loss, (x, x[:, :1] + dist.get_rank()))
    weighted_hook(model)
    after = check_gradient(model, loss, (x, x[:, :1] + dist.get_rank()))
    if dist.get_rank() == 0:
        print(before, after, sep="\n")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
