"""Hidden states that vLLM itself produces: what its output layer is given while it goes on with pieces of a text.

An engine wants a process for itself, so `collect` starts one: ``python -m softsieve.integrations.vllm.engine_states``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from softsieve.errors import InputError

TOKENS, STATES = "tokens", "states"  # tensors of the files between the processes


def collect(
    model: str, tokens: Tensor, *, count: int, window: int, first: int | None, dtype: torch.dtype, seed: int = 0
) -> Tensor:
    """Hidden states (count, d) of the tokens that an engine writes, as it samples by default, in random order.

    It is given pieces of a text of half a window each, and fills the windows up. All of them grow at the same time, so
    in their own order the last states would be those of the ends of windows alone.

    Args:
        tokens: of the text, ``count`` or more.
        first: the token that every piece begins with.

    Raises:
        InputError: when vLLM is not installed, or does not run the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "tokens.safetensors"), Path(folder, "states.safetensors")
        save_file({TOKENS: tokens.contiguous()}, question)
        options = {
            "model": model, "count": count, "window": window, "first": first, "seed": seed,
            "dtype": str(dtype).removeprefix("torch."),
        }  # fmt: skip
        command = [sys.executable, "-m", __name__, str(question), str(answer), json.dumps(options)]
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the model is in that process
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode or not answer.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise InputError(f"{model}: vLLM does not run it: {lines[-1] if lines else 'no reason is given'}")
        return load_file(answer)[STATES]


def pieces(tokens: Tensor, *, count: int, window: int, first: int | None) -> tuple[list[list[int]], int]:
    """Prompts of half a window, and how many tokens are to be written after each, so that there are ``count``.

    Example:
        >>> pieces(torch.arange(10, 20), count=7, window=6, first=1)
        ([[1, 10, 11], [1, 12, 13], [1, 14, 15]], 3)
    """
    written = window // 2
    own = max(1, window - written - (first is not None))
    lead = [] if first is None else [first]
    starts = range(0, -(-count // written) * own, own)
    prompts = [lead + tokens[start : start + own].tolist() for start in starts if start < len(tokens)]
    return prompts, written


def _write(model: str, tokens: Tensor, *, count: int, window: int, first: int | None, dtype: str, seed: int) -> Tensor:
    """What `collect` asks for, in the process of the engine."""
    from vllm import LLM

    prompts, written = pieces(tokens, count=count, window=window, first=first)
    engine = LLM(
        model, dtype=dtype, enforce_eager=True, max_model_len=window + 1, enable_prefix_caching=False, seed=seed,
        additional_config={"softsieve": {"enabled": False}}, kv_cache_memory_bytes=1 << 30,
    )  # fmt: skip
    states: list[Tensor] = []

    def listen(network: Any) -> None:
        network.logits_processor.register_forward_pre_hook(lambda _, inputs: states.append(inputs[1].clone()))

    engine.apply_model(listen)
    params = engine.get_default_sampling_params()
    params.max_tokens, params.ignore_eos, params.detokenize = written, True, False
    engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    rows = torch.cat(states)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]]


if __name__ == "__main__":
    question, answer, options = sys.argv[1:]
    states = _write(tokens=load_file(question)[TOKENS], **json.loads(options))
    save_file({STATES: states.contiguous()}, answer)
