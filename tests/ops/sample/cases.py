"""Calls of the ops over rows of logits, small and as a server makes them."""

from __future__ import annotations

from typing import Any

import torch

from dspark.ops.types import Processors, Rows, Sampling, Stream
from dspark.testing.registry import NVIDIA_TARGETS, Budget, budgets
from tests.ops.case import Case


class Logits:
    """Sizes of a batch; calls of every op on it: one row of each request, or its verified rows."""

    def __init__(self, requests: int, nodes: int, vocab_size: int, dtype: torch.dtype) -> None:
        self.requests, self.nodes, self.vocab_size, self.dtype = requests, nodes, vocab_size, dtype

    def logits(self, device: str, rows: int) -> torch.Tensor:
        generator = None if device == "meta" else torch.Generator(device).manual_seed(0)
        return torch.randn(rows, self.vocab_size, generator=generator, device=device).to(self.dtype)

    def sampling(self, device: str, truncated: bool = False) -> Sampling:
        number, integer = torch.ones(self.requests, device=device), torch.arange(self.requests, device=device)
        return Sampling(number, integer * 3, number, number * 0.01, integer, any_truncation=truncated)

    def sample(self, device: str) -> tuple[Any, ...]:
        position = torch.arange(self.requests, device=device)
        logits = self.logits(device, self.requests)
        return logits, self.sampling(device), position, None, Stream.TARGET, None, None

    def sample_drafts(self, device: str) -> tuple[Any, ...]:
        """Rows of some requests, a padded one among them, truncated and salted."""
        row = torch.arange(self.nodes, device=device)
        logits, request = self.logits(device, self.nodes), (row - 1) % self.requests * (row > 0) - (row == 0).long()
        return logits, self.sampling(device, truncated=True), row, request, Stream.DRAFT, row * 5, None

    def truncate(self, device: str) -> tuple[Any, ...]:
        return self.logits(device, self.requests), self.sampling(device, truncated=True), None, None

    def rows(self, device: str) -> Rows:
        num_rows = self.requests * self.nodes
        return Rows(
            tokens=torch.arange(num_rows, device=device) % self.vocab_size,
            query_start=torch.arange(0, num_rows + 1, self.nodes, device=device),
            position=torch.arange(self.requests, device=device),
            max_query_len=self.nodes,
        )

    def process(self, device: str) -> tuple[Any, ...]:
        """With everything on."""
        counts = torch.ones(self.requests, self.vocab_size, dtype=torch.int32, device=device)
        number, integer = torch.ones(self.requests, device=device), torch.arange(self.requests, device=device)
        ids = torch.arange(self.requests * 4, device=device).view(self.requests, 4)
        num_rows, words = self.requests * self.nodes, -(-self.vocab_size // 32)
        processors = Processors(
            output_counts=counts,
            prompt_mask=counts > 0,
            repetition_penalty=number * 1.25,
            presence_penalty=number,
            frequency_penalty=number,
            min_new_tokens=integer,
            num_emitted=integer.clone(),
            eos_tokens=ids[:, :2].contiguous(),
            banned_tokens=ids,
            allowed_mask=torch.full((num_rows, words), -5, dtype=torch.int32, device=device),
        )
        return self.logits(device, num_rows), self.rows(device), processors, None

    def process_nothing(self, device: str) -> tuple[Any, ...]:
        return self.logits(device, self.requests * self.nodes), self.rows(device), Processors(), None


_SMALL = Logits(requests=3, nodes=2, vocab_size=40, dtype=torch.float32)
_SERVER = Logits(requests=64, nodes=8, vocab_size=151_936, dtype=torch.bfloat16)
SMALL = [
    Case("sample", "", _SMALL.sample),
    Case("sample", "drafts", _SMALL.sample_drafts),
    Case("truncate", "", _SMALL.truncate),
    Case("process_logits", "", _SMALL.process),
    Case("process_logits", "nothing on", _SMALL.process_nothing),
]
SHIPPED = [
    Case("sample", "", _SERVER.sample),
    Case("truncate", "", _SERVER.truncate),
    Case("process_logits", "", _SERVER.process),
]
"""Calls that between them launch every kernel in every configuration of note."""

BUDGETS = {
    "process_logits_kernel": budgets(Budget(144, 16_384), amd=Budget(128, 16_384)),
    "row_statistics_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "sample_kernel": budgets(Budget(128, 16_384), amd=Budget(128, 16_384)),
    "threshold_kernel": budgets(Budget(176, 16_384), amd=Budget(128, 16_384)),
}
"""The most that one program of a kernel may use, whatever its configuration."""

_WIDE = dict.fromkeys(NVIDIA_TARGETS, (r"^LDG\.E(\.\w+)*\.128$",)) | {"gfx942": (r"load_dwordx4$",)}
CLAIMS = dict.fromkeys(("process_logits_kernel", "row_statistics_kernel"), _WIDE)
"""What a kernel is meant to compile to; those that stream rows of logits read 16 bytes at a time."""
