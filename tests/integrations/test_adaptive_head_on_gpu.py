"""A language model on a GPU with an adaptive head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from softsieve.integrations.adaptive_head import accelerate_head, restore_head
from softsieve.integrations.hidden_states import inputs_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
transformers = pytest.importorskip("transformers")

WORDS = 20000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generates_what_it_did(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to("cuda", dtype)
    layer = model.get_output_embeddings()
    with torch.no_grad():
        layer.weight.normal_().mul_(1.2 / torch.arange(1, 129, device="cuda") ** 0.5)
        ids = torch.randint(WORDS, (100, 30), generator=torch.Generator().manual_seed(1))
        queries = inputs_of(layer, model, ids).flatten(0, 1)
    prompt = ids[:4, :8].cuda()
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    truth = model.generate(prompt, **options)
    module = accelerate_head(model, queries, delta=0.02, k=2)
    fit: Any = module.head.calibrations[2]
    module.head.calibrations[2] = fit._replace(batch=64)  # what is measured is a matter of the machine
    found = model.generate(prompt, **options)
    assert module.answered == 4 * 39  # the first new token comes with the prompt
    same = (found == truth)[:, 8:].int().cumprod(-1).sum(-1) - 1  # tokens before texts part
    assert same.float().mean() > 15
    assert 0 < module.bytes_read < 4 * 39 * layer.weight.numel() * layer.weight.element_size()
    assert module.exactly < 40
    sampled = model.generate(prompt, max_new_tokens=10, do_sample=True, top_k=20, top_p=0.9)
    assert sampled.shape == (4, 18)
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype).to("cuda").eval()
    restored = accelerate_head(again, index=tmp_path)
    assert restored.head.calibrations == module.head.calibrations
    restore_head(model)
    assert torch.equal(model.generate(prompt, **options), truth)
