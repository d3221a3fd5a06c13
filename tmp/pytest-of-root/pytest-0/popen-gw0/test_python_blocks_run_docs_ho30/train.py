# train.py
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from pyps.torch.transformers import UnevenTrainer  # was: from transformers import Trainer


def main() -> None:
    texts = torch.arange(4000).reshape(400, 10) % 50
    dataset = [{"input_ids": text, "labels": text} for text in texts]
    config = GPT2Config(vocab_size=50, n_positions=10, n_embd=32, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=5e-3,
        report_to="none",
    )
    trainer = UnevenTrainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset)  # was: Trainer(...)
    loss = trainer.train().training_loss
    if trainer.is_world_process_zero():
        print(f"loss {loss:.4f}", f"batches {trainer.run.sampler.split}")


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
