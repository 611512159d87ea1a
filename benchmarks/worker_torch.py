"""Worker: a Llama of random float16 weights in PyTorch, its decoding step as a CUDA graph.

    python worker_torch.py SHAPE DEVICE

SHAPE is a `shapes.Shape` as JSON. Runs as a script: only works.py and worker_loop.py beside it.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from worker_loop import answer_works
from works import Work, parse_work

EPSILON = 1e-5
CONTEXT = 1024
"""Most tokens of a sequence, and all that a decoding step looks at."""


class Llama:
    """The forward pass over a cache that holds `batch` sequences of equal length."""

    def __init__(self, shape: dict[str, Any], device: str, batch: int) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.float16 if device == "cuda" else torch.float32
        hidden, wide, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
        self.heads, self.kv_heads, self.dim = shape["num_heads"], shape["num_kv_heads"], dim
        queries, keys = self.heads * dim, self.kv_heads * dim
        self.layers = [
            {
                "qkv": self._random(queries + 2 * keys, hidden),
                "out": self._random(hidden, queries),
                "gate_up": self._random(2 * wide, hidden),
                "down": self._random(hidden, wide),
            }
            for _ in range(shape["num_layers"])
        ]
        self.norm = torch.ones(hidden, device=device, dtype=self.dtype)
        self.embedding = self._random(shape["vocab_size"], hidden)
        self.head = (
            self.embedding if shape["is_tied"] else self._random(shape["vocab_size"], hidden)
        )
        cache = (shape["num_layers"], 2, batch, self.kv_heads, CONTEXT, dim)
        self.cache = torch.zeros(cache, device=device, dtype=self.dtype)
        powers = torch.arange(0, dim, 2, device=device) / dim
        angles = torch.outer(torch.arange(CONTEXT, device=device), shape["rope_theta"] ** -powers)
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _random(self, out: int, inputs: int) -> torch.Tensor:
        weight = torch.empty(out, inputs, device=self.device, dtype=self.dtype)
        return weight.normal_(std=inputs**-0.5)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """ids [batch, tokens] at positions [tokens] → the next ids [batch]."""
        x = F.embedding(ids, self.embedding)
        batch, tokens = ids.shape
        mask = torch.arange(CONTEXT, device=self.device) <= positions[:, None]
        for i, layer in enumerate(self.layers):
            y = F.rms_norm(x, self.norm.shape, self.norm, EPSILON) @ layer["qkv"].T
            parts = y.view(batch, tokens, -1, self.dim).transpose(1, 2)
            q, k, v = torch.split(parts, [self.heads, self.kv_heads, self.kv_heads], dim=1)
            self.cache[i, 0, :batch].index_copy_(2, positions, self._rotate(k, positions))
            self.cache[i, 1, :batch].index_copy_(2, positions, v)
            y = F.scaled_dot_product_attention(
                self._rotate(q, positions), self.cache[i, 0, :batch], self.cache[i, 1, :batch],
                attn_mask=mask, enable_gqa=True,
            )  # fmt: skip
            x = x + y.transpose(1, 2).reshape(batch, tokens, -1) @ layer["out"].T
            y = F.rms_norm(x, self.norm.shape, self.norm, EPSILON) @ layer["gate_up"].T
            gate, up = y.chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ layer["down"].T
        x = F.rms_norm(x[:, -1], self.norm.shape, self.norm, EPSILON)
        return (x @ self.head.T).argmax(-1)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[positions], self.sin[positions]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Works:
    def __init__(self, shape: dict[str, Any], device: str) -> None:
        self._shape, self._device = shape, device
        self._model: Llama | None = None
        self._batch = 0

    def run(self, name: str, seed: int) -> tuple[int, float]:
        """(tokens, seconds); of `peak`, operations."""
        with torch.inference_mode():
            return self._peak() if name == "peak" else self._run(parse_work(name))

    def _run(self, work: Work) -> tuple[int, float]:
        if self._model is None or work.streams > self._batch:
            self._model = None  # its memory first
            self._model, self._batch = Llama(self._shape, self._device, work.streams), work.streams
        model, device = self._model, self._device
        ids = torch.randint(model.shape["vocab_size"], (work.streams, work.prompt_tokens)).to(
            device
        )
        positions = torch.arange(work.prompt_tokens, device=device)
        if not work.timed_tokens:
            return work.prompt_tokens, self._timed(lambda: model.forward(ids, positions))
        last, position = model.forward(ids, positions)[:, None], positions[-1:].clone()

        def step() -> None:
            position.add_(1)
            last.copy_(model.forward(last, position)[:, None])

        replay = self._graph(step)

        def decode() -> None:
            for _ in range(work.timed_tokens):
                replay()

        return work.streams * work.timed_tokens, self._timed(decode)

    def _graph(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step without the time that starting its kernels takes."""
        step()
        if self._device != "cuda":
            return step
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def _timed(self, call: Callable[[], Any]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _peak(self) -> tuple[int, float]:
        size, repeats = (8192, 10) if self._device == "cuda" else (256, 2)
        dtype = torch.float16 if self._device == "cuda" else torch.float32
        a, b = (torch.randn(size, size, device=self._device).to(dtype) for _ in "ab")
        a @ b
        return 2 * size**3 * repeats, self._timed(lambda: [a @ b for _ in range(repeats)])


if __name__ == "__main__":
    works = Works(json.loads(sys.argv[1]), sys.argv[2])
    answer_works({"torch": torch.__version__}, works.run)
