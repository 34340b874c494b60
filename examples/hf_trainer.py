"""Hugging Face's Trainer on ranks that do not wait for each other: one line more, a small GPT-2, no download.

    torchrun --nproc-per-node 2 examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py --plain    # Trainer's own DDP, to compare with

Needs pip install 'paceline[huggingface]'.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import paceline.huggingface

VOCABULARY, LENGTH = 64, 32


def sentences(size, seed):
    """A language of 64 words: after each word comes one of two, with chances 3/4 and 1/4."""
    follows = torch.randint(VOCABULARY, (VOCABULARY, 2), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(VOCABULARY, (size,), generator=generator)]
    for _ in range(LENGTH - 1):
        rare = torch.rand(size, generator=generator) < 0.25
        words.append(follows[words[-1], rare.long()])
    return [{"input_ids": row, "labels": row} for row in torch.stack(words, 1)]


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--plain", action="store_true", help="without paceline")
options = parser.parse_args()

torch.manual_seed(0)
sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
arguments = TrainingArguments(
    "runs/hf-trainer", max_steps=options.steps, per_device_train_batch_size=8, learning_rate=5e-3, warmup_steps=10,
    eval_strategy="steps", eval_steps=max(options.steps // 4, 1), save_strategy="no", logging_strategy="no",
    report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=sentences(2000, seed=1), eval_dataset=sentences(256, seed=2))
averaging = None
if not options.plain:
    averaging = paceline.huggingface.average(trainer, "hpsgd", codec="qsgd levels=7")
trainer.train()

if trainer.is_world_process_zero():
    losses = [f"{entry['eval_loss']:.3f}" for entry in trainer.state.log_history if "eval_loss" in entry]
    print("loss on new sentences:", ", ".join(losses))
    if averaging is not None and averaging.sync is not None:
        figures, raw = averaging.figures(), 4 * model.num_parameters() * options.steps
        print(f"{figures['averages']:.0f} averages; rank 0 sent {figures['sent_bytes'] / 1e6:.1f} MB,", end=" ")
        print(f"and its {options.steps} gradients have {raw / 1e6:.1f} MB")
