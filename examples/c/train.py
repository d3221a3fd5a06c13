"""Makes a store, lets trainers that are not Python train in it, and checks what they learned.

    python examples/c/train.py [--trainer ./trainer] [--workers 3] [--policy bsp]

The data is scikit-learn's breast cancer set (569 real tumours, 30 features): standardized, shuffled, a fifth
held out. The trainers are compiled C or C++; rank i has twice the batch of rank i + 1, and the policy is the
store's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

from pyps import Store


def prepare(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write the training part for the trainers; the held-out features and labels."""
    features, labels = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    features, labels = features[order], labels[order]
    count = len(labels) * 4 // 5
    features = (features - features[:count].mean(axis=0)) / features[:count].std(axis=0)
    rows = np.column_stack([labels, features]).astype(np.float32)
    with open(path, "wb") as file:
        file.write(np.array([count, features.shape[1]], np.int32).tobytes())
        file.write(rows[:count].tobytes())
    return rows[count:, 1:], rows[count:, 0]


def main() -> None:
    """Train, and print the held-out accuracy; exit code 1 below 95 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", default=str(Path(__file__).parent / "trainer"))
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--policy", default="bsp")
    parser.add_argument("--samples", type=int, default=20_000)
    options = parser.parse_args()
    batches = [8 << (options.workers - 1 - rank) for rank in range(options.workers)]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.bin"
        held_out, truth = prepare(data)
        initial = {"weights": np.zeros(held_out.shape[1], np.float32), "bias": np.zeros(1, np.float32)}
        with Store.create(
            f"example-{os.getpid()}", initial, batches=batches, policy=options.policy, samples=options.samples
        ) as store:
            commands = [
                [options.trainer, store.name, str(data), str(rank)] for rank in range(options.workers)
            ]
            trainers = [subprocess.Popen(command) for command in commands]
            codes = [trainer.wait() for trainer in trainers]
            if any(codes):
                sys.exit("a trainer failed")
            learned = store.snapshot().tensors
            samples = sum(rank.samples for rank in store.ranks())
    right = ((held_out @ learned["weights"] + learned["bias"] > 0) == truth).mean()
    print(f"{samples} samples under {options.policy}: {right:.1%} of {len(truth)} held-out tumours right")
    sys.exit(0 if right >= 0.95 else 1)


if __name__ == "__main__":
    main()
