"""Worker: a Llama of random float16 weights in vLLM.

    python worker_vllm.py SHAPE DEVICE

SHAPE is a `shapes.Shape` as JSON. Runs as a script: only works.py and worker_loop.py beside it.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import vllm
from worker_loop import answer_works
from works import parse_work, random_prompt

CONTEXT = 1024


def hugging_face_config(shape: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of a Llama with these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["intermediate_size"],
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        "head_dim": shape["head_dim"],
        "vocab_size": shape["vocab_size"],
        "rope_theta": shape["rope_theta"],
        "tie_word_embeddings": shape["is_tied"],
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float16",
    }


class Works:
    def __init__(self, shape: dict[str, Any], folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(hugging_face_config(shape)))
        self._vocab_size = shape["vocab_size"]
        self._model = vllm.LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="float16",
            max_model_len=CONTEXT, enable_prefix_caching=False,
        )  # fmt: skip

    def run(self, name: str, seed: int) -> tuple[int, float]:
        """(tokens, seconds). Decoding is what more tokens take than the first one does."""
        work = parse_work(name)
        prompts = [
            {"prompt_token_ids": random_prompt(work, self._vocab_size, seed * work.streams + i)}
            for i in range(work.streams)
        ]
        first = self._seconds(prompts, 1)
        if not work.timed_tokens:
            return work.prompt_tokens, first
        return work.streams * work.timed_tokens, self._seconds(
            prompts, 1 + work.timed_tokens
        ) - first

    def _seconds(self, prompts: list[Any], num_tokens: int) -> float:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        self._model.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        works = Works(json.loads(sys.argv[1]), Path(temporary))
        answer_works({"vllm": vllm.__version__}, works.run)
