"""A LoRA adapter on hosts behind a slow link, through the store: only the adapter travels.

    pyps serve lora --bind tcp://host0:5555 --keys keys     # on one host
    pyps-plan cluster.toml -o plan.json                     # [run] codec = "int8", local_steps = 10
    pyps run --plan plan.json --samples 2000 --connect ADDRESS --ranks 0 adapter.py     # on each host

Rank 0 prints how much of the model travels, and the loss, and writes the adapter as PEFT does, into adapter/.
"""

from __future__ import annotations

import torch
from peft import get_peft_model
from sft import CONTEXT, LORA, WORDS, network

import pyps


def main() -> None:
    torch.set_num_threads(1)
    text = (torch.arange(400)[:, None] * 3 + torch.arange(CONTEXT)) % WORDS
    model = get_peft_model(network(), LORA)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    with pyps.join() as worker:
        worker.attach(model, optimizer)
        for (rows,) in worker.batches((text,)):
            loss = model(input_ids=rows, labels=rows).loss
            worker.backward(loss)
            worker.step(loss)
        if worker.rank == 0:
            travels = sum(p.numel() for p in model.parameters() if p.requires_grad)
            every = sum(p.numel() for p in model.parameters())
            print(f"{travels} of {every} parameters travel; loss {loss:.4f}")
            model.save_pretrained("adapter")


if __name__ == "__main__":
    main()
