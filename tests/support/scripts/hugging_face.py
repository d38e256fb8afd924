"""Train a tiny causal language model, or its LoRA adapters, with the Trainer of Hugging Face
transformers.
"""

import random
import sys
import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

pause = float(sys.argv[1]) if sys.argv[1:] else 0.0


class Crops(Dataset):
    text = torch.tensor(
        list(b"Sing, goddess, the anger of Peleus' son Achilles and its devastation. " * 8)
    )

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = self.text[index * 8 : index * 8 + 16]
        return {"input_ids": ids, "labels": ids}


class Pause(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(pause)


random.seed(8)
torch.manual_seed(8)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=256,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
)
if "--lora" in sys.argv:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
args = TrainingArguments(
    output_dir="output",
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    warmup_steps=4,
    logging_steps=6,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=Crops(), callbacks=[Pause()])
trainer.train()
torch.save(model.state_dict(), "final.pt")
