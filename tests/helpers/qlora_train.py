"""A worker of tests/torch/test_fine_tune.py: LoRA on a base that bitsandbytes keeps in four bits."""

from __future__ import annotations

import tempfile

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import pyps

WORDS, CONTEXT = 64, 16


def base() -> torch.nn.Module:
    """The same on every host, as from a file of its own."""
    config = LlamaConfig(vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config.num_attention_heads = config.num_key_value_heads = 2
    config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=four_bits, device_map="cpu", dtype=torch.float32
        )
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def main() -> None:
    torch.set_num_threads(1)
    text = (torch.arange(400)[:, None] * 3 + torch.arange(CONTEXT)) % WORDS
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = get_peft_model(base(), lora).train()  # in eval mode bitsandbytes repacks weights, for inference
    assert any(type(part).__name__ == "Linear4bit" for part in model.modules())
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    losses = []
    with pyps.join() as worker:
        worker.attach(model, optimizer)
        for (rows,) in worker.batches((text,)):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            worker.step(loss)
            losses.append(float(loss.detach()))
    if worker.rank == 0:
        print(f"loss {losses[0]:.4f}, then {losses[-1]:.4f}")


main()
