# on_shards.py
import ray
from on_ray import KINDS, train

import pyps.ray

if __name__ == "__main__":
    ray.init("auto")
    options = {"servers": 2, "server_resources": {"CPU": 1}, "max_restarts": 20}
    trainer = pyps.ray.Trainer(
        train, "plan.json", KINDS, samples=10_000, policy="asp", run_dir="run", **options
    )
    print(trainer.fit().undone)
