"""Train a tiny GPT-2 with the Trainer of transformers and sharded optimizer states, save, and resume with the same losses.

torchrun --nproc-per-node 2 examples/hf_trainer.py FOLDER   # without FOLDER: ./hf_trainer_run
"""

import contextlib
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import bucketwheel as bw


class ShardedTrainer(Trainer):
    """Reduces the gradients of all micro-batches of a step together."""

    def training_step(self, *args, **kwargs):
        optimizer = self.optimizer.optimizer  # bucketwheel's, inside of Accelerate's
        with contextlib.nullcontext() if self.accelerator.sync_gradients else optimizer.no_sync():
            return super().training_step(*args, **kwargs)


def train(folder: str, resume: bool) -> list[float]:
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=8,
        save_steps=4,
        logging_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        max_grad_norm=1.0,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = ShardedTrainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": text, "labels": text} for text in torch.randint(64, (256, 16))],
        optimizer_cls_and_kwargs=(bw.ShardedAdamW, {"lr": 3e-3, "full_state_dict": True}),
        callbacks=[bw.trainer_callback()],  # all ranks take part in the save of the optimizer
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4" if resume else None)
    trainer.optimizer.optimizer.close()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "hf_trainer_run"
    losses, resumed = train(folder, resume=False), train(folder, resume=True)  # the latter does the last steps again
    print(f"unbroken {losses[4:]}, resumed {resumed[4:]}", flush=True)
    torch.distributed.destroy_process_group()
