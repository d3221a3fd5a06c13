"""LoRA with PEFT: TRL's SFTTrainer over unlike batches, and an adapter through the store."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_script
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "fine_tune"
IN_FLOAT32 = 1e-5  # relative
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # Accelerate sets torch's threads anew
OFFLINE = {"HF_HUB_OFFLINE": "1"}

pytestmark = pytest.mark.thorough


def test_each_step_has_the_gradient_of_one_process(tmp_path: Path) -> None:
    """Ragged texts in micro-batches; as Trainer alone, which divides by all labels that are no padding."""
    pytest.importorskip("peft")
    pytest.importorskip("trl")
    script = ROOT / "tests" / "helpers" / "fine_tune_train.py"
    said = run_script(script, 2, OUT=str(tmp_path), **ONE_THREAD).splitlines()[-1]
    worst, steps = re.fullmatch(r"(\S+) after (\d+) steps of \(22, 10\)", said).groups()  # type: ignore[union-attr]
    assert int(steps) == 26
    assert float(worst) < IN_FLOAT32


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    said = run_script(EXAMPLES / "sft.py", 2, **ONE_THREAD)
    a, b = map(int, re.findall(r"batches \((\d+), (\d+)\)", said)[0])
    assert a + b == 32
    assert "512 parameters trained" in said


def test_prompts_stay_whole_and_the_gradient_is_one_process(tmp_path: Path) -> None:
    """TRL's GRPO, six prompts on one rank and two on the other, four completions each; all kinds of loss."""
    pytest.importorskip("trl")
    script = ROOT / "tests" / "helpers" / "grpo_train.py"
    losses = ["dapo", "grpo", "bnpo", "dr_grpo"]
    said = run_script(script, 2, OUT=str(tmp_path), LOSSES=" ".join(losses), **OFFLINE, **ONE_THREAD)
    found = re.findall(r"^(\w+) (\S+) 4 \[\(24, 8\)\]", said, re.MULTILINE)
    assert [loss for loss, _ in found] == losses
    assert all(float(worst) < IN_FLOAT32 for _, worst in found), found
    refused = re.findall(r"^refused (\w+) UnevenPrompts: .*; expected", said, re.MULTILINE)
    options = ["num_iterations", "steps_per_generation", "scale_rewards", "top_entropy_quantile"]
    assert refused == [*options, "multi_objective_aggregation"], said


def test_the_example_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    said = run_script(EXAMPLES / "grpo.py", 2, **OFFLINE, **ONE_THREAD)
    a, b, reward = re.findall(r"prompts \((\d+), (\d+)\) reward (\S+)", said)[0]
    assert int(a) + int(b) == 8
    assert float(reward) > 0.5  # 0.1 at first


def test_a_loop_of_diffusers() -> None:
    """UnevenAccelerator with six images on one rank and two on the other, in float64."""
    pytest.importorskip("diffusers")
    script = ROOT / "tests" / "helpers" / "diffusion_train.py"
    said = run_script(script, 2, **OFFLINE, **ONE_THREAD)
    (worst,) = re.findall(r"^(\S+) off, batches of \{6\}", said, re.MULTILINE)
    assert float(worst) < 1e-12


def test_a_loop_of_timm() -> None:
    """Six images on one rank and two on the other, in float64; BatchNorm, with and without an activation."""
    pytest.importorskip("timm")
    models = ["test_resnet", "test_efficientnet"]
    said = run_script(ROOT / "tests" / "helpers" / "timm_train.py", 2, MODELS=" ".join(models), **ONE_THREAD)
    found = re.findall(r"^(\w+): (\S+) off, batches of \{6\}", said, re.MULTILINE)
    assert [model for model, _ in found] == models
    assert all(float(worst) < 1e-12 for _, worst in found), found


def test_only_the_adapter_travels(tmp_path: Path) -> None:
    """Into PEFT's file goes what the run's own holds."""
    peft = pytest.importorskip("peft")
    assert "512 of 15392 parameters travel" in through_the_store(EXAMPLES / "adapter.py", tmp_path)
    sys.path.insert(0, str(EXAMPLES))
    from sft import network

    again = dict(peft.PeftModel.from_pretrained(network(), str(tmp_path / "adapter")).named_parameters())
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert sum(values.numel() for values in stored.values()) == 512
    for name, values in stored.items():
        assert torch.equal(again[name], values), name


def test_the_base_may_be_in_four_bits(tmp_path: Path) -> None:
    """QLoRA, on a CPU."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    said = through_the_store(ROOT / "tests" / "helpers" / "qlora_train.py", tmp_path)
    first, last = map(float, re.findall(r"loss (\S+), then (\S+)", said)[0])
    assert last < 0.8 * first


def through_the_store(script: Path, folder: Path) -> str:
    """Return what two workers of speeds 4 and 1 print, with local steps and int8."""
    programs = Path(sys.executable).parent
    for name, speed in (("a", 4), ("b", 1)):
        points = [{"batch": b, "seconds": b * 0.001 / speed} for b in (1, 4, 16)]
        known = {"device": {"name": name}, "model": {"name": "lora"}, "points": points}
        (folder / f"{name}.json").write_text(json.dumps({"schema": "pyps.profile/1", **known}))
    (folder / "cluster.toml").write_text(CLUSTER)
    run = ["pyps", "run", "--plan", "plan.json", "--samples", "400", "--run-dir", "run", str(script)]
    said, whole = "", {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # PEFT needs all of torch
    for words in (["pyps-plan", "cluster.toml", "-o", "plan.json"], run):
        command = [sys.executable, str(programs / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=folder, env=whole, capture_output=True, text=True, timeout=250)
        said = done.stdout
        assert done.returncode == 0, said + done.stderr
    return said


CLUSTER = """
[job]
global_batch = 20
[run]
policy = "bsp"
codec = "int8"
local_steps = 5
[[worker]]
name = "a"
profile = "a.json"
required = true
[[worker]]
name = "b"
profile = "b.json"
required = true
"""
