"""Fine-tune a language model on a text, without ever holding its logits.

    python examples/finetune_language_model.py MODEL_FOLDER TEXT_FILE

Without arguments a tiny random model learns this script by heart, letter by letter.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

from softsieve.integrations.transformers import ASOptions, ASTrainer

if len(sys.argv) == 3:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    tokens = AutoTokenizer.from_pretrained(sys.argv[1])(Path(sys.argv[2]).read_text()).input_ids
    length, epochs, rate = 256, 1, 2e-5
else:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
    tokens = list(Path(__file__).read_bytes())
    length, epochs, rate = 32, 30, 5e-3

rows = [tokens[start : start + length] for start in range(0, len(tokens) - length, length)]
data = [{"input_ids": row, "labels": row} for row in rows]
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, num_train_epochs=epochs, per_device_train_batch_size=4, learning_rate=rate,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="epoch",
    )  # fmt: skip
    trainer = ASTrainer(model=model, args=args, train_dataset=data, eval_dataset=data, as_options=ASOptions(delta=0.1))
    trainer.train()
    solved = [entry["solved"] for entry in trainer.state.log_history if "solved" in entry]
    found = trainer.evaluate()
print(f"solved tokens: {solved[0]:.0%} in the first epoch, {solved[-1]:.0%} in the last")
print(f"next token right: {found['eval_token_accuracy']:.0%}, cross-entropy {found['eval_loss']:.2f}")
