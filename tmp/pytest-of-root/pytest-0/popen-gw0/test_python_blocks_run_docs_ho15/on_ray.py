# on_ray.py
import ray
import torch

import pyps
import pyps.ray

KINDS = {"v100": {"GPU": 1, "accelerator_type:V100": 0.001}, "cpu": {"CPU": 4}}


def profile() -> None:
    pyps.ray.profile("mlp", KINDS, "profiles")  # writes profiles/v100.json and profiles/cpu.json


def train() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(512, 16), torch.randn(512, 4)
    model = torch.nn.Linear(16, 4)
    with pyps.join() as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for x, y in worker.batches((inputs, targets)):
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            worker.step(loss)


def main() -> None:
    trainer = pyps.ray.Trainer(train, "plan.json", KINDS, samples=10_000, policy="asp", run_dir="run")
    print(trainer.fit().samples)


if __name__ == "__main__":
    ray.init("auto")
    main()
