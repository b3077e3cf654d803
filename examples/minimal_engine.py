"""A serving engine of one's own on dspark's ops: its scheduler, cache and loop are here, and ``dspark.Decoder`` is not.

The networks are plain modules that leave a hole for attention; the ops fill it. Jobs sit in *lanes*, each with pages of
its own, and the shortest waiting prompt goes first. Whatever the jobs do, a round has the same shapes and reads nothing
from the device: absent rows and empty lanes are padding that the ops skip.

Run it: ``python examples/minimal_engine.py``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark import ops
from dspark.models import tiny_pair
from dspark.models.config import ModelConfig
from dspark.models.draft_network import DSparkNetwork
from dspark.models.tiny import held_out_prompts, load_tokenizer
from dspark.models.transformer import Attend, CausalLM

PAGE = 16


def new_cache(config: ModelConfig, num_pages: int) -> list[ops.PagedKV]:
    """Pages of every layer."""
    shape = (num_pages, PAGE, config.num_key_value_heads, config.head_dim)
    return [ops.PagedKV(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_hidden_layers)]


def attention(cache: list[ops.PagedKV], rows: ops.QueryBatch) -> Attend:
    """What fills the hole in a network: store the rows' keys and values, then attend."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ops.append_kv(k, v, cache[layer], rows.slots)
        return ops.verify_attention(q, cache[layer], rows)

    return attend


@dataclass
class Job:
    """A request: what it asks for, and its output so far."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    output: list[int] = field(default_factory=list)


class Engine:
    """Serve jobs with a target and its drafter.

    Args:
        target, drafter: the networks.
        num_lanes: jobs that run at once.
        max_len: most tokens of a job, prompt included.
        seconds_per_round: ``[num_lanes * (1 + block) + 1]``, what a round costs at each number of verified rows.
    """

    def __init__(
        self, target: CausalLM, drafter: DSparkNetwork, num_lanes: int, max_len: int, seconds_per_round: Tensor
    ) -> None:
        self.target, self.drafter, self.speed = target, drafter, 1 / seconds_per_round
        self.block, self.features = drafter.config.block_size, drafter.config.target_layer_ids
        self.pages = -(-(max_len + self.block) // PAGE)
        self.target_cache = new_cache(target.config, num_lanes * self.pages)
        self.draft_cache = new_cache(drafter.config.model, num_lanes * self.pages)
        self.jobs: list[Job | None] = [None] * num_lanes
        self.waiting: list[Job] = []
        zero = torch.zeros(num_lanes, dtype=torch.int64)
        self.context_len, self.anchor = zero.clone(), zero - 1  # an anchor of -1 is an empty lane
        self.sampling = ops.Sampling(zero.float(), zero, zero + 1.0, zero.float(), zero.clone(), any_truncation=False)

    def rows(self, lengths: Tensor, num_rows: int, longest: int, block: bool = False) -> ops.QueryBatch:
        """``lengths[r]`` rows after each lane's committed tokens, and padding up to ``num_rows``."""
        start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        row = torch.arange(num_rows)
        lane = torch.searchsorted(start[1:], row, right=True).clamp(max=len(lengths) - 1)
        position = self.context_len[lane] + row - start[lane]
        slot = torch.where(row < start[-1], lane * self.pages * PAGE + position, -1)
        table = torch.arange(len(lengths) * self.pages).view(len(lengths), self.pages)
        sees = torch.full_like(row, (1 << self.block) - 1) if block else None  # all rows of a block see each other
        return ops.QueryBatch(start, self.context_len, table, position, slot, sees, longest)

    def extend(self, features: Tensor, rows: ops.QueryBatch, slots: Tensor) -> None:
        """Give the drafter the target's features of committed rows; those of others have slot -1."""
        keys_values = self.drafter.context_kv(self.drafter.context(features), rows.positions)
        for kv, (k, v) in zip(self.draft_cache, keys_values, strict=True):
            ops.append_kv(k, v, kv, slots)

    def admit(self) -> None:
        """Fill empty lanes, the shortest prompt first; a prompt's forward pass gives the first token."""
        self.waiting.sort(key=lambda job: len(job.prompt))
        for lane, occupant in enumerate(self.jobs):
            if occupant is not None or not self.waiting:
                continue
            job = self.jobs[lane] = self.waiting.pop(0)
            n, here = len(job.prompt), torch.tensor([lane])
            self.context_len[lane], self.sampling.temperature[lane] = 0, job.temperature
            self.sampling.seed[lane] = job.seed
            rows = self.rows(torch.zeros_like(self.anchor).index_fill(0, here, n), n, n)
            hidden, features = self.target(
                torch.tensor(job.prompt), rows.positions, attention(self.target_cache, rows), self.features
            )
            self.extend(features, rows, rows.slots)
            # The token after the prompt has the prompt's length for its position, which addresses its random numbers.
            first = ops.sample(self.target.logits(hidden[-1:]), self.sampling, torch.tensor([n]), request=here)
            self.context_len[lane], self.anchor[lane] = n, first[0]
            self.deliver(lane, first.tolist())

    def decode_round(self) -> ops.Verdict:
        """Draft, schedule, verify, accept and commit, in all lanes at once."""
        lanes, block, running = len(self.jobs), self.block, self.anchor >= 0
        # A block is the anchor and masks. Every lane has one; an empty lane's is written nowhere.
        rows = self.rows(torch.full((lanes,), block), lanes * block, block, block=True)
        rows.slots.view(lanes, block).masked_fill_(~running[:, None], -1)
        masks = torch.full((lanes, block - 1), self.drafter.config.mask_token_id)
        tokens = torch.cat([self.anchor.clamp(min=0)[:, None], masks], dim=1).flatten()
        hidden = self.drafter.block(tokens, rows.positions, attention(self.draft_cache, rows))
        hidden = hidden.view(lanes, block, -1)
        draft = ops.draft_walk(
            self.drafter.lm_head(hidden),
            self.anchor,
            head=self.drafter.sequential_head(),
            hidden=hidden,
            confidence_head=self.drafter.confidence(),
            sampling=self.sampling,
            position=self.context_len,
            stream=ops.Stream.TARGET,
            return_logits=False,
        )
        assert draft.confidence is not None  # this drafter has a confidence head
        verified = ops.schedule_prefix(draft.confidence, self.speed, mode="early_stop")

        num_rows = lanes * (1 + block)
        rows = self.rows(torch.where(running, 1 + verified, 0), num_rows, 1 + block)
        lane = torch.searchsorted(rows.query_start[1:], torch.arange(num_rows), right=True).clamp(max=lanes - 1)
        node = (torch.arange(num_rows) - rows.query_start[lane]).clamp(max=block)
        tokens = torch.cat([self.anchor[:, None], draft.tokens], dim=1)[lane, node]
        hidden, features = self.target(
            tokens.clamp(min=0), rows.positions, attention(self.target_cache, rows), self.features
        )
        verdict = ops.accept(
            self.target.logits(hidden),
            ops.Rows(tokens, rows.query_start, self.context_len, 1 + block),
            rule="coupled",
            sampling=self.sampling,
        )
        # Rejected rows need no roll-back: what comes next overwrites them before anything can see them.
        self.extend(features, rows, torch.where(node < verdict.num_emitted[lane], rows.slots, -1))
        self.context_len += verdict.num_emitted
        last = verdict.tokens.gather(1, (verdict.num_emitted - 1).clamp(min=0)[:, None])[:, 0]
        self.anchor = torch.where(running, last, -1)
        return verdict

    def deliver(self, lane: int, tokens: list[int]) -> None:
        """Hand a job its tokens; one that is complete leaves its lane."""
        job = self.jobs[lane]
        assert job is not None
        job.output += tokens[: job.max_tokens - len(job.output)]
        if len(job.output) == job.max_tokens:
            self.jobs[lane], self.anchor[lane], self.context_len[lane] = None, -1, 0

    @torch.inference_mode()
    def run(self, jobs: list[Job]) -> int:
        """Serve jobs to their end; returns how many rounds it took."""
        self.waiting, rounds = list(jobs), 0
        while self.waiting or any(self.jobs):
            self.admit()
            if any(self.jobs):
                verdict, rounds = self.decode_round(), rounds + 1
                counts = verdict.num_emitted.tolist()
                for lane, tokens in enumerate(verdict.tokens.tolist()):
                    if counts[lane]:
                        self.deliver(lane, tokens[: counts[lane]])
        return rounds


def main() -> None:
    target, drafter = tiny_pair()
    tokenizer = load_tokenizer()
    jobs = [Job(tokenizer.encode(p.text).ids, 60, 0.7, seed) for seed, p in enumerate(held_out_prompts()[:6])]
    seconds = 1.0 + 0.02 * torch.arange(4 * (1 + drafter.block_size) + 1)  # measure your own
    rounds = Engine(target.network, drafter.network, 4, 400, seconds).run(jobs)
    emitted = sum(len(job.output) for job in jobs)
    sys.stdout.write(
        f"{emitted} tokens of {len(jobs)} requests in {rounds} rounds\n\n{tokenizer.decode(jobs[0].output)}\n"
    )


if __name__ == "__main__":
    main()
