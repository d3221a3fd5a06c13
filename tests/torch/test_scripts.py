"""The scripts of docs/how-to/train-ddp.md and examples/ddp run between ranks, and do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import shaped
import torch
from ranks import run_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "how-to"
EXAMPLES = ROOT / "examples" / "ddp"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # Accelerate sets torch's threads anew
NO_HOSTS = shaped.missing()


def scripts_of(name: str, folder: Path) -> Path:
    """The folder, with a page's scripts."""
    page = (PAGES / name).read_text(encoding="utf-8")
    for text in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if name := re.match(r"# ([\w.]+)\n", text):
            (folder / name[1]).write_text(text)
    return folder


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return scripts_of("train-ddp.md", tmp_path)


def test_the_script_of_the_page(page: Path) -> None:
    said = run_script(page / "train.py", 2)
    assert float(re.findall(r"loss ([\d.]+)", said)[0]) < 0.5
    a, b = map(int, re.findall(r"batches \((\d+), (\d+)\)", said)[0])
    assert a + b == 64


def test_the_check_of_the_page(page: Path) -> None:
    before, after = run_script(page / "check.py", 2).splitlines()
    assert "ranks count equally" in before
    assert after.startswith("batches 48/16: 0.00% off")


def test_fsdp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = scripts_of("train-fsdp.md", tmp_path) / "train.py"
    said = run_script(script, 2)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 2
    assert max(losses) < 1.0  # 16 before training; which is less depends on the splits, so on the machine
    a, b = map(int, re.findall(r"batches \((\d+), (\d+)\)", said)[0])
    assert a + b == 64
    script.write_text(script.read_text().replace("sampler.epoch, 2)", "sampler.epoch, 3)"))
    again = re.findall(r"loss ([\d.]+)", run_script(script, 2))  # from its checkpoint: the third epoch
    assert len(again) == 1
    assert float(again[0]) < 1.0


def test_unlike_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = scripts_of("unlike-memory.md", tmp_path) / "full.py"
    text = script.read_text()
    assert text.count("range(3)") == 1
    script.write_text(text.replace("range(3)", "range(1)"))  # epochs
    said = run_script(script, 2)
    found = re.findall(r"loss ([\d.]+), (\d+) numbers here", said)
    assert float(found[0][0]) < 0.6  # 2 before training
    whole = sum(value.numel() for value in torch.load("model.pt", weights_only=True).values())
    assert int(found[0][1]) / whole == pytest.approx(0.7, rel=0.001)


@pytest.mark.thorough
def test_lora_with_unlike_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    said = run_script(scripts_of("unlike-memory.md", tmp_path) / "lora.py", 2)
    assert float(re.findall(r"loss ([\d.]+)", said)[0]) < 4.1  # log(64) is 4.16
    assert (tmp_path / "adapter.safetensors").stat().st_size > 1000


@pytest.mark.parametrize("script", ["before.py", "after.py", "text.py", "lengths.py"])
def test_the_examples(script: str) -> None:
    reported = json.loads(run_script(EXAMPLES / script, 2, EPOCHS="1").splitlines()[-1])
    assert len(reported["seconds"]) >= 5
    if script in ("text.py", "lengths.py"):
        assert reported["last_loss"] < 0.8 * reported["first_loss"]


@pytest.mark.thorough
@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "there are namespaces")
def test_two_hosts(quick_start: None) -> None:
    command = [sys.executable, str(EXAMPLES / "two_hosts.py"), "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout.splitlines()[-1])
    assert len(reported["batches"]) == 4
    assert sum(reported["batches"]) == 256


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    said = run_script(scripts_of("train-libraries.md", tmp_path) / "with_accelerate.py", 2, **ONE_THREAD)
    assert float(re.findall(r"loss ([\d.]+)", said)[0]) < 0.5
    a, b = map(int, re.findall(r"batches \((\d+), (\d+)\)", said)[0])
    assert a + b == 128


@pytest.mark.thorough
def test_the_example_with_accelerate() -> None:
    pytest.importorskip("accelerate")
    reported = json.loads(
        run_script(EXAMPLES / "with_accelerate.py", 2, EPOCHS="1", **ONE_THREAD).splitlines()[-1]
    )
    first, last = reported["batches"]
    assert first + last == 96
    assert last <= 16


@pytest.mark.thorough
def test_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    said = run_script(scripts_of("train-libraries.md", tmp_path) / "with_transformers.py", 2, **ONE_THREAD)
    assert float(re.findall(r"loss ([\d.]+)", said)[0]) < 3.9
    a, b = map(int, re.findall(r"batches \((\d+), (\d+)\)", said)[0])
    assert a + b == 32


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["page", "examples"])
def test_lightning(quick_start: None, tmp_path: Path, where: str) -> None:
    pytest.importorskip("lightning")
    folder = EXAMPLES if where == "examples" else scripts_of("train-libraries.md", tmp_path)
    command = [sys.executable, str(folder / "with_lightning.py")]
    environment = {**os.environ, "EPOCHS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert re.search(r"accuracy|loss 0\.[0-2]\d+ batches \(\d+, \d+\)", done.stdout), done.stderr
