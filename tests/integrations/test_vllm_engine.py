"""vLLM itself, with a tiny random model made here. `make test-vllm` runs it, where vLLM is installed.

The first tests are the contract: each names a hook that the plug-in stands on, and fails where a new vLLM moves it.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None or "numba" in sys.modules:
    # vLLM looks through all modules when it starts, and stumbles over numba's compiler, which conftest.py imports.
    pytest.skip("needs vLLM, and no conftest.py: make test-vllm", allow_module_level=True)

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine is in this process, and can be looked at
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

from softsieve.integrations.vllm import counters
from softsieve.integrations.vllm.layer import Adaptive
from softsieve.integrations.vllm.plugin import NEWEST, OLDEST, _numbers
from softsieve.integrations.vllm.requests import Reason

ROWS, COLUMNS = 4000, 64
# What a request can ask for, as of the versions that the plug-in was tried with. A new name here may change logits:
# `requests.need_of` has to know it.
PARAMETERS = {
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "watermarking", "top_p"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs"),
    *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "structured_outputs", "logit_bias"),
    *("allowed_token_ids", "extra_args", "bad_words", "skip_reading_prefix_cache", "thinking_token_budget"),
    *("repetition_detection", "routed_experts_prompt_start", "trace_decode_token_ids"),
}


def test_contract_the_version_is_one_that_was_tried() -> None:
    import vllm

    assert OLDEST <= _numbers(vllm.__version__) <= NEWEST


def test_contract_the_layer_for_logits_can_be_replaced() -> None:
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.plugins import load_general_plugins

    assert issubclass(LogitsProcessor, PluggableLayer)
    assert list(inspect.signature(PluggableLayer.register_oot).parameters) == ["_decorated_layer_cls", "name"]
    load_general_plugins()
    assert op_registry_oot["LogitsProcessor"].__name__ == "AdaptiveLogitsProcessor"


def test_contract_the_layer_is_called_as_it_was() -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    calls = {
        "forward": ["self", "lm_head", "hidden_states", "embedding_bias", "skip_gather"],
        "get_top_tokens": ["self", "lm_head", "hidden_states", "embedding_bias"],
    }
    for name, parameters in calls.items():
        assert list(inspect.signature(getattr(LogitsProcessor, name)).parameters) == parameters
    source = inspect.getsource(LogitsProcessor.__init__)
    for attribute in ("scale", "soft_cap", "org_vocab_size", "logits_as_input", "head_dtype"):
        assert f"self.{attribute} = " in source


def test_contract_rows_are_spread_over_ranks_as_the_index_has_them() -> None:
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding

    from softsieve.integrations.vllm.index_folder import PADDING

    assert embedding.DEFAULT_VOCAB_PADDING_SIZE == PADDING
    assert isinstance(embedding.VocabParallelEmbeddingShardIndices.num_org_elements, property)
    assert isinstance(embedding.VocabParallelEmbeddingShardIndices.num_added_elements, property)
    assert embedding.UnquantizedEmbeddingMethod.__name__ == "UnquantizedEmbeddingMethod"


def test_contract_logits_processors_are_told_of_the_batch_before_its_logits() -> None:
    from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP, build_logitsprocs
    from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
    from vllm.v1.worker import gpu_input_batch, gpu_model_runner

    assert LOGITSPROCS_GROUP == "vllm.logits_processors"
    assert LogitsProcessor.__abstractmethods__ == {"__init__", "apply", "is_argmax_invariant", "update_state"}
    assert {"batch_size", "removed", "added", "moved"} == set(BatchUpdate.__dataclass_fields__)
    assert {way.name for way in MoveDirectionality} == {"UNIDIRECTIONAL", "SWAP"}
    assert "ctor(vllm_config, device, is_pin_memory)" in inspect.getsource(build_logitsprocs)
    assert "update_state(batch_update)" in inspect.getsource(gpu_input_batch.InputBatch.refresh_metadata)
    runner = gpu_model_runner.GPUModelRunner
    assert "refresh_metadata()" in inspect.getsource(runner._update_states)
    source = inspect.getsource(runner.execute_model)
    assert source.index("_update_states(") < source.index("compute_logits(")


def test_contract_the_runner_of_gpus_tells_of_requests_when_they_come() -> None:
    """By its sources: it needs a GPU."""
    import vllm

    worker = Path(vllm.__file__).parent / "v1/worker/gpu"
    sources = {name: (worker / f"{name}.py").read_text() for name in ("model_runner", "sample/sampler")}
    sources["interface"] = (worker / "sample/logits_processor/interface.py").read_text()
    assert "processor.add_request(req_idx, sampling_params)" in sources["sample/sampler"]
    assert "self.sampler.add_request(req_index, new_req_data.sampling_params)" in sources["model_runner"]
    assert "def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:" in sources["interface"]
    assert "self, vllm_config: VllmConfig, req_states: LogitsProcRequestState" in sources["interface"]
    step = sources["model_runner"].split("def execute_model(")[1]
    assert step.index("self.add_requests(") < step.index("def sample_tokens(")  # logits are computed in the second


def test_contract_an_engine_has_a_name() -> None:
    """By which a layer finds the batch of its own engine, where one process works for several."""
    from vllm.config import VllmConfig

    assert VllmConfig().instance_id != VllmConfig().instance_id != ""


def test_contract_requests_ask_for_what_they_did() -> None:
    from vllm import SamplingParams

    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields == PARAMETERS


def test_contract_the_sampler_takes_float32_and_top_k_before_top_p() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.sample.sampler import Sampler

    assert "logits.to(torch.float32)" in inspect.getsource(Sampler.forward)
    logits = torch.tensor([[1.0, 5.0, 4.0, 1.0]])
    kept = topk_topp_sampler.apply_top_k_top_p(logits, torch.tensor([2]), torch.tensor([0.99]))
    assert kept[0].isinf().tolist() == [True, False, False, True]


# -- an engine ---------------------------------------------------------------------------------------------------------


TINY = """
import random, sys
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder, rows, columns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(rows - 3))]
raw = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
PreTrainedTokenizerFast(tokenizer_object=raw, **special).save_pretrained(folder)
torch.manual_seed(0)
size = {"vocab_size": rows, "hidden_size": columns, "num_hidden_layers": 2, "num_attention_heads": 2}
network = LlamaForCausalLM(LlamaConfig(**size, intermediate_size=128, max_position_embeddings=512))
with torch.no_grad():  # rows that have structure
    network.lm_head.weight.copy_(torch.randn(rows, columns) * torch.arange(1, columns + 1) ** -1.0 * 4)
    network.model.embed_tokens.weight.normal_(0, 1)
network.to(torch.bfloat16).save_pretrained(folder)
lines = (" ".join(random.Random(number).choices(words[3:], k=20)) for number in range(200))
with open(folder + "/text.txt", "w") as file:
    file.write("\\n".join(lines))
"""


def call(*command: str) -> None:
    """Run Python in a process of its own: what transformers imports to make a model is in vLLM's way."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def build(model: Path, *more: str) -> None:
    text, size = str(model / "text.txt"), ["--states", "3000", "--window", "128"]
    command = ["head", "build", "--model", str(model), "--text", text, *size, *more]
    call("-c", "from softsieve.cli import app; app()", *command)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model and its index beside it."""
    folder = tmp_path_factory.mktemp("tiny")
    call("-c", TINY, str(folder), str(ROWS), str(COLUMNS))
    build(folder)
    return folder


def start(model: Path, **own: Any) -> Any:
    from vllm import LLM

    options = {"batch": 8, "strict": True, **own}
    return LLM(
        str(model), dtype="bfloat16", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20,
        additional_config={"softsieve": options}, enable_prefix_caching=False, seed=0, max_logprobs=64,
    )  # fmt: skip


class Engine:
    """An engine with a switch: the adaptive head, or the exact one."""

    def __init__(self, model: Path) -> None:
        self.llm = start(model)
        self.ask([[5, 9]])  # the index is loaded
        self.serving = self.adaptive.serving

    @property
    def adaptive(self) -> Adaptive:
        return self.llm.apply_model(_adaptive)[0]  # type: ignore[no-any-return]

    def ask(self, prompts: list[list[int]], *, exactly: bool = False, **params: Any) -> list[Any]:
        from vllm import SamplingParams

        options = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **params}
        if exactly:
            self.adaptive.serving = None
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(tokens, SamplingParams(**options), use_tqdm=False)
        if exactly:
            self.adaptive.serving = self.serving
        return [one for output in outputs for one in output.outputs]

    def counted(self, prompts: list[list[int]], **params: Any) -> tuple[int, dict[str, int]]:
        """Tokens that the adaptive head answered, and those of the exact one by reason, of a call."""
        own = self.adaptive.counters
        answers, exact = own.values()[0], own.exact()
        self.ask(prompts, **params)
        more = {name: count - exact.get(name, 0) for name, count in own.exact().items()}
        return own.values()[0] - answers, {name: count for name, count in more.items() if count}


def _adaptive(network: Any) -> Any:
    return next(module.adaptive for module in network.modules() if hasattr(module, "adaptive"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(model)


PROMPTS = [[5 + number, 9, 100 + number] for number in range(4)]


def test_greedy_tokens_are_those_of_the_exact_head(engine: Engine) -> None:
    """Teacher-forced: after each prefix of the exact head's text."""
    texts = [one.token_ids for one in engine.ask(PROMPTS, exactly=True, max_tokens=40)]
    own = [one.token_ids for one in engine.ask(PROMPTS, max_tokens=40)]
    same = sum(a == b for one, other in zip(texts, own, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 0.9 * 160  # texts differ from the first other token on
    answers, exact = engine.counted(PROMPTS, max_tokens=40)
    assert exact.pop("prompt") == 4
    assert answers >= 150
    assert set(exact) <= {"drift", "expensive"}


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"temperature": 1.0}, "sampled"),
        ({"temperature": 1.0, "top_p": 0.9}, "sampled"),
        ({"temperature": 1.0, "min_p": 0.1}, "sampled"),
        ({"repetition_penalty": 1.2}, "edited"),
        ({"presence_penalty": 0.5}, "edited"),
        ({"logit_bias": {7: 3.0}}, "edited"),
        ({"allowed_token_ids": [4, 5, 6]}, "edited"),
        ({"min_tokens": 20}, "edited"),
        ({"prompt_logprobs": 2}, "logprobs"),
        ({"temperature": 1.0, "top_k": 65}, "top_k"),
    ],
)
def test_what_needs_every_logit_is_exact(engine: Engine, params: dict[str, Any], reason: str) -> None:
    answers, exact = engine.counted(PROMPTS[:1], seed=3, **params)
    assert answers == 0
    assert exact[reason] >= 19
    same = [engine.ask(PROMPTS[:1], exactly=exactly, seed=3, **params)[0].token_ids for exactly in (False, True)]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
        {"stop_token_ids": [3999]},
        {"logprobs": 20},
        {"temperature": 1.0, "top_k": 5, "n": 2},
    ],
)
def test_what_needs_the_largest_is_adaptive(engine: Engine, params: dict[str, Any]) -> None:
    answers, exact = engine.counted(PROMPTS[:1], **params)
    assert answers >= 0.8 * 19 * params.get("n", 1)
    assert set(exact) <= {"prompt", "drift", "expensive"}


def test_more_than_the_crossover_are_exact(engine: Engine) -> None:
    answers, exact = engine.counted([[number, 9] for number in range(5, 14)])
    assert answers == 0
    assert exact["batch"] == 9 * 19


def test_log_probabilities_are_within_the_promise(engine: Engine) -> None:
    own = engine.ask(PROMPTS, logprobs=20, max_tokens=40)
    errors = []
    for prompt, output in zip(PROMPTS, own, strict=True):
        # the exact log-probabilities after the same tokens: those of the whole text as a prompt
        whole = [*prompt, *output.token_ids]
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=64)
        right = engine.llm.generate([{"prompt_token_ids": whole}], params, use_tqdm=False)[0].prompt_logprobs
        for place, shown in enumerate(output.logprobs[1:], len(prompt) + 1):
            exact = {token: one.logprob for token, one in right[place].items()}
            errors.append(max(abs(one.logprob - exact.get(token, -99.0)) for token, one in shown.items()))
    errors.sort()
    assert errors[int(0.97 * len(errors))] <= 0.1054 + 0.07  # -log(1 - eps), and the rounding of bf16


def test_draws_have_the_distribution_of_the_exact_softmax(engine: Engine) -> None:
    """Chi-square of what vLLM's sampler draws from the logits of one state, with top_k, against the exact logits."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    k, draws = 10, 20_000
    exact, own = engine.llm.apply_model(_both_logits)[0]
    best = exact.topk(k)
    expected = best.values[:k].double().softmax(-1) * draws
    kept = apply_top_k_top_p(own.repeat(500, 1), torch.full((500,), k), None).softmax(-1)
    drawn = torch.cat([random_sample(kept.clone(), {}) for _ in range(draws // 500)])
    counts = torch.bincount(drawn.long(), minlength=ROWS)
    assert int(counts[best.indices[:k]].sum()) == draws
    statistic = float(((counts[best.indices[:k]] - expected).square() / expected).sum())
    assert statistic < 27.9  # 9 degrees of freedom: one in a thousand is above


def _both_logits(network: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the exact and of the adaptive head, for a state like those of the index."""
    from softsieve.integrations.vllm.index_folder import read_states
    from softsieve.integrations.vllm.requests import Batch, Entry, Need
    from softsieve.integrations.vllm.tracker import _tracked

    layer = network.logits_processor
    name = layer.adaptive.site.engine
    before = _tracked[name]
    base: Any = type(layer).__mro__[1]
    for state in torch.split(read_states(layer.adaptive.site.place)[0], 1):
        exact = base.forward(layer, network.lm_head, state)
        best = exact[0].topk(11).values
        if best[10] < best[9] and best[0] - best[9] < 4:  # no tie between the 10 and the rest, and all of them likely
            break
    asked = Batch()
    asked.update([], [(0, Entry(Need(10), [1], 0))], [])
    _tracked[name] = asked
    answers = layer.adaptive.counters.values()[0]
    own = layer(network.lm_head, state)
    _tracked[name] = before
    assert layer.adaptive.counters.values()[0] == answers + 1
    return exact[0].float(), own[0]


def test_the_largest_tokens_of_drafts_are_those_of_the_exact_head(engine: Engine) -> None:
    """`get_top_tokens`, which vLLM's drafts ask for with ``use_local_argmax_reduction``."""
    own, right, answers = engine.llm.apply_model(_both_top_tokens)[0]
    assert answers >= 0.9 * len(own)
    assert (own == right).float().mean() >= 0.95


def _both_top_tokens(network: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tokens of the adaptive and of the exact head for states of the index, and how many the first answered."""
    from softsieve.integrations.vllm.index_folder import read_states

    layer, head = network.logits_processor, network.lm_head
    states = read_states(layer.adaptive.site.place)[0][-64:]
    answers = layer.adaptive.counters.values()[0]
    own = torch.cat([layer.get_top_tokens(head, some) for some in torch.split(states, 4)])
    answers = layer.adaptive.counters.values()[0] - answers
    base: Any = type(layer).__mro__[1]
    return own, base.get_top_tokens(layer, head, states), answers


def test_beams_are_those_of_the_exact_head(engine: Engine) -> None:
    from vllm.sampling_params import BeamSearchParams

    prompt = [{"prompt_token_ids": PROMPTS[0]}]
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    own = engine.llm.beam_search(prompt, params)[0].sequences
    engine.adaptive.serving = None
    right = engine.llm.beam_search(prompt, params)[0].sequences
    engine.adaptive.serving = engine.serving
    assert [one.tokens for one in own] == [one.tokens for one in right]


# -- engines of their own ----------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    own = options.pop("softsieve", {{}})
    llm = LLM(sys.argv[1], dtype="bfloat16", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20,
              additional_config={{"softsieve": own}}, **options)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [{{"prompt_token_ids": prompt}} for prompt in {prompts}]
    texts = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    print("TEXTS", json.dumps([list(text) for text in texts]))
    from softsieve.integrations.vllm import counters
    import os
    print("COUNTED", json.dumps(counters.total(os.environ[counters.FOLDER])))
"""


def run(model: Path, tmp_path: Path, *, environ: dict[str, str] | None = None, **options: Any) -> Any:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(prompts=PROMPTS))
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", counters.FOLDER: "", **(environ or {})}
    return subprocess.run(
        [sys.executable, str(script), str(model), json.dumps(options)],
        capture_output=True, text=True, env={**os.environ, **more}, timeout=300, check=False,
    )  # fmt: skip


def printed(done: Any, name: str) -> Any:
    found = re.search(rf"^{name} (.*)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found[1])


def test_an_engine_in_its_own_process_counts_for_the_first_one(model: Path, engine: Engine, tmp_path: Path) -> None:
    done = run(model, tmp_path, softsieve={"batch": 8, "strict": True})
    right = [list(one.token_ids) for one in engine.ask(PROMPTS, exactly=True)]
    texts = printed(done, "TEXTS")
    same = sum(a == b for one, other in zip(texts, right, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 72
    answers, read, prompts, *_ = printed(done, "COUNTED")
    assert answers >= 60
    assert read > 0
    assert prompts >= 4  # and the tokens that shared a step with one: prompts arrive while the engine works
    assert answers + prompts == sum(map(len, texts))


TWO = """
import sys
from vllm import LLM, SamplingParams

def engine(**own):
    return LLM(sys.argv[1], dtype="bfloat16", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=64 << 20,
               additional_config={"softsieve": own})

def ask(engine, temperature):
    params = SamplingParams(temperature=temperature, top_k=0, max_tokens=20, ignore_eos=True)
    engine.generate([{"prompt_token_ids": [5, 9]}], params, use_tqdm=False)

if __name__ == "__main__":
    first, second = engine(batch=8, strict=True), engine(enabled=False)
    ask(second, 0.0)  # a greedy request, the last that this engine has
    ask(first, 1.0)
    adaptive = first.apply_model(lambda network: network.logits_processor.adaptive)[0]
    drawn = adaptive.counters.values()[0]
    ask(first, 0.0)
    print("ADAPTIVE", [drawn, adaptive.counters.values()[0]])
"""


def test_engines_of_one_process_have_batches_of_their_own(model: Path, tmp_path: Path) -> None:
    """What is drawn from all tokens is not answered as the other engine's greedy request is."""
    script = tmp_path / "script.py"
    script.write_text(TWO)
    done = subprocess.run(
        [sys.executable, str(script), str(model)], capture_output=True, text=True, timeout=300, check=False
    )
    drawn, greedy = printed(done, "ADAPTIVE")
    assert drawn == 0
    assert greedy >= 15


def test_two_ranks_answer_as_one_does(model: Path, engine: Engine, tmp_path: Path) -> None:
    build(model, "--out", str(tmp_path / "two"), "--ranks", "2")
    own = {"batch": 8, "strict": True, "index": str(tmp_path / "two")}
    # one core each, shared with the scheduler, for machines of two
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    done = run(model, tmp_path, environ=environ, softsieve=own, tensor_parallel_size=2)
    right = [list(one.token_ids) for one in engine.ask(PROMPTS, exactly=True)]
    texts = printed(done, "TEXTS")
    same = sum(a == b for one, other in zip(texts, right, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 72
    assert printed(done, "COUNTED")[0] >= 60


def test_a_draft_model_takes_the_adaptive_head(model: Path, engine: Engine, tmp_path: Path) -> None:
    """Drafted by the same model, and checked by the exact head, which takes another one's batch for unknown."""
    speculative = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    done = run(model, tmp_path, softsieve={"batch": 8, "strict": True}, speculative_config=speculative)
    assert printed(done, "TEXTS") == [list(one.token_ids) for one in engine.ask(PROMPTS, exactly=True)]
    answers, _, *exact = printed(done, "COUNTED")
    assert answers >= 40
    assert dict(zip(Reason, exact, strict=True))[Reason.UNKNOWN] > 0


def test_states_are_those_that_an_engine_gives_its_output_layer(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from softsieve.integrations.vllm import engine_states

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.arange(3, 43)
    states = engine_states.collect(str(model), tokens, count=30, window=16, first=1, dtype=torch.float32)
    assert states.shape == (30, COLUMNS)
    prompts, _ = engine_states.pieces(tokens, count=30, window=16, first=1)
    with torch.no_grad():  # the last states of the prompts are among them
        right = torch.stack([network.model(torch.tensor([one])).last_hidden_state[0, -1] for one in prompts])
    assert (torch.cdist(right, states).amin(-1) < 1e-2).sum() >= len(prompts) // 2


def test_strict_engines_refuse_to_work_without_their_index(model: Path, tmp_path: Path) -> None:
    done = run(model, tmp_path, softsieve={"strict": True, "index": str(tmp_path / "nowhere")})
    assert done.returncode != 0
    assert "nowhere: expected an index, found none" in done.stdout + done.stderr


def test_others_say_so_in_a_line_and_are_exact(model: Path, engine: Engine, tmp_path: Path) -> None:
    done = run(model, tmp_path, environ={"SOFTSIEVE_INDEX": str(tmp_path / "nowhere")})
    assert printed(done, "TEXTS") == [list(one.token_ids) for one in engine.ask(PROMPTS, exactly=True)]
    assert printed(done, "COUNTED")[0] == 0
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "the exact head answers" in line]
    assert len(lines) == 1


def test_the_server_shows_the_counters(model: Path, tmp_path: Path) -> None:
    import socket
    import time

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = json.dumps({"softsieve": {"batch": 8, "strict": True}})
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256",
        "--kv-cache-memory-bytes", str(64 << 20), "--additional-config", own,
    ]  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", counters.FOLDER: ""},
        )
        try:
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5)
                    break
                except OSError:
                    assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
                    time.sleep(1)
            body = {"model": str(model), "prompt": [5, 9, 100], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            asked = urllib.request.Request(
                f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            answer = json.load(urllib.request.urlopen(asked, timeout=120))
            assert answer["usage"]["completion_tokens"] == 20
            metrics = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
        finally:
            server.terminate()
            server.wait(60)
    shown = dict(re.findall(r"^(softsieve_\S+) (\S+)$", metrics, re.MULTILINE))
    assert float(shown["softsieve_answers_total"]) >= 15
    assert float(shown["softsieve_bytes_read_total"]) > 0
    assert float(shown['softsieve_exact_total{reason="prompt"}']) == 1
