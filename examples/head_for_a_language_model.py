"""A head for a language model: new tokens from a part of the output layer, with `generate` as it was.

Needs the extra `train` (transformers). The model is tiny and random, so that nothing is downloaded; put
`AutoModelForCausalLM.from_pretrained(...)` in its place, and take the queries from a text with `collect_queries(model,
tokenizer, path)`. Takes some ten seconds: python examples/head_for_a_language_model.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from softsieve.integrations.transformers import accelerate_head, restore_head

WORDS, HIDDEN = 50_000, 256

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=HIDDEN,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=128,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    eos_token_id=None,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():  # like a trained layer: a few directions matter most
    model.lm_head.weight.normal_().mul_(3 * torch.arange(1, HIDDEN + 1) ** -0.5)

# What the layer is asked while the model reads texts like those that it will write. A promise of 95 % (delta) takes
# a few hundred such queries, one of 99 % some 1,400.
texts = torch.randint(WORDS, (16, 64))
with torch.no_grad():
    queries = model.model(texts).last_hidden_state.flatten(0, 1)  # (texts * positions, hidden)

prompt = torch.randint(WORDS, (1, 8))
mask = torch.ones_like(prompt)
exact = model.generate(prompt, attention_mask=mask, max_new_tokens=40, do_sample=False)

layer = accelerate_head(model, queries, delta=0.05)
adaptive = model.generate(prompt, attention_mask=mask, max_new_tokens=40, do_sample=False)

agree = (exact[:, 8:] == adaptive[:, 8:]).float().mean()
print(f"{layer.answered} new tokens, {layer.exactly} of them with the exact product")
print(f"both heads agree on {agree:.0%} of the text")

state = queries[0]
answer = layer.head.topk(state, k=1)
share = int(answer.bytes_read.sum()) / (WORDS * HIDDEN * model.lm_head.weight.element_size())
print(f"one token reads {share:.0%} of the layer; its probability is {float(answer.probs[0]):.3f}")

restore_head(model)  # the model's own layer is back
