"""Fine-tune with the Trainer of transformers: AS-Softmax, larger steps and skipped rows by one argument.

Needs the extra `train` (transformers, accelerate). The encoder is tiny and random, so that nothing is downloaded; put
`AutoModelForSequenceClassification.from_pretrained(...)` in its place. Takes some ten seconds:
python examples/finetune_with_trainer.py
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from softsieve import ASSpeed
from softsieve.integrations.transformers import ASOptions, ASTrainer

CLASSES, WORDS, LENGTH = 5, 200, 12

# "Texts" of random words, three of which belong to the class.
torch.manual_seed(0)
labels = torch.arange(400) % CLASSES
texts = torch.randint(CLASSES, WORDS, (400, LENGTH))
texts[:, :3] = labels[:, None]
rows = [{"input_ids": text, "labels": int(label)} for text, label in zip(texts, labels, strict=True)]

config = BertConfig(
    vocab_size=WORDS,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=LENGTH,
    num_labels=CLASSES,
)
model = BertForSequenceClassification(config)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=6,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    options = ASOptions(delta=0.1, speed=ASSpeed(max_steps=2), skip={})
    trainer = ASTrainer(
        model=model, args=arguments, train_dataset=rows[:320], eval_dataset=rows[320:], as_options=options
    )
    trainer.train()
    prediction = trainer.predict(rows[320:])

accuracy = (torch.from_numpy(prediction.predictions).argmax(-1) == labels[320:]).float().mean()
print(f"{trainer.state.global_step} optimizer steps (a plain Trainer makes 240), test accuracy {accuracy:.1%}")
