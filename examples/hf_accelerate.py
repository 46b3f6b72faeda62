"""Train a tiny GPT-2 with Accelerate and sharded optimizer states, save, and resume with the same losses:

torchrun --nproc-per-node 2 examples/hf_accelerate.py
"""

import contextlib
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import bucketwheel as bw

EPOCHS, MICRO_BATCHES = 2, 2


def train(texts: torch.Tensor, folder: str, resume: bool = False) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, cpu=not torch.cuda.is_available())
    set_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model = accelerator.prepare_model(model, evaluation_mode=True)  # on its device, and without DDP around it
    optimizer = bw.ShardedAdamW(model.parameters(), lr=3e-3, full_state_dict=True)  # for save_state
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    prepared, scheduler, loader = accelerator.prepare(optimizer, scheduler, DataLoader(texts, batch_size=4))
    if resume:
        accelerator.load_state(folder)
    losses = []
    for epoch in range(1 if resume else 0, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accumulates = not accelerator.sync_gradients
                loss = model(input_ids=batch, labels=batch).loss
                with optimizer.no_sync() if accumulates else contextlib.nullcontext():
                    accelerator.backward(loss)
                if not accumulates:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                prepared.step()
                scheduler.step()
                prepared.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            accelerator.save_state(folder)
    optimizer.close()
    return losses


if __name__ == "__main__":
    texts = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    with tempfile.TemporaryDirectory() as own:
        (folder,) = broadcast_object_list([own])  # all ranks use rank 0's
        losses, resumed = train(texts, folder), train(texts, folder, resume=True)
        print(f"rank {accelerator.process_index}: unbroken {losses[-len(resumed) :]}, resumed {resumed}", flush=True)
        accelerator.wait_for_everyone()  # before rank 0 removes the folder
    accelerator.end_training()
