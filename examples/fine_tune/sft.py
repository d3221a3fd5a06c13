"""LoRA on unlike devices, with PEFT and TRL's SFTTrainer: torchrun --nproc-per-node 4 sft.py

The model is a small one made from a config, the text counts up; put your own in their place. The batches
follow the devices, and the gradient of the adapter is that of one process.
"""

from __future__ import annotations

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from pyps.torch.transformers import UnevenTraining

WORDS, CONTEXT = 50, 16
LORA = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")


class UnevenSFTTrainer(UnevenTraining, SFTTrainer):
    """Any Trainer becomes uneven like this."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = WordLevel({str(word): word for word in range(WORDS)}, unk_token="0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="1", pad_token="2")


def texts(count: int = 400) -> Dataset:
    """Token numbers that count up, from 4 to CONTEXT of them."""
    rows = [[(3 * k + place) % WORDS for place in range(4 + k % (CONTEXT - 3))] for k in range(count)]
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])


def network() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=CONTEXT, n_embd=32, n_layer=1, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 2
    return GPT2LMHeadModel(config)


def trainer(folder: str = "out", **options: object) -> UnevenSFTTrainer:
    """options: of UnevenTraining, such as plan= and profile=."""
    arguments = SFTConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=0.05,
        save_strategy="no",
        report_to="none",
        dataset_kwargs={"skip_prepare_dataset": True},  # these are tokens already
    )
    return UnevenSFTTrainer(
        network(),
        arguments,
        train_dataset=texts(),
        processing_class=tokenizer(),
        peft_config=LORA,
        **options,
    )


def main() -> None:
    run = trainer()
    loss = run.train().training_loss
    if run.is_world_process_zero():
        trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
        print(f"loss {loss:.4f}", f"batches {run.run.sampler.split}", f"{trained} parameters trained")


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
