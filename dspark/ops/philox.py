"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011) keyed by what a number is *for*.

Every number has an address, so none depends on batch order, block size, draft length or policy (contract C3):

    key     = (seed low, seed high)
    counter = (token id >> 2, position low 32 bits, stream, salt low 32 bits)
    word    = token id & 3

``position`` is the absolute position of the token being drawn. ``stream`` says what the number decides
(:class:`~dspark.ops.types.Stream`). ``salt`` is 0 except for noise that must differ when one position is drawn again: a
drafter salts with its anchor's position, since a policy may have seen the earlier draw through the confidences of a
round that was rejected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.types import Stream

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10, equal to Random123's and to ``triton.language.philox`` bit for bit.

    Args:
        counter: four int64 tensors that hold 32-bit values; shapes broadcast.
        key: two int64 tensors that hold 32-bit values, broadcast against the counter.

    Returns:
        Four int64 tensors of 32-bit values, of the broadcast shape.

    Graph-safe.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two 32-bit values wraps in int64 without losing a bit, so its halves are read by shift and
        # mask. The low halves stay unmasked: they are only XORed into values that are masked there.
        a = c0 * _MULTIPLIERS[0]
        b = c2 * _MULTIPLIERS[1]
        c0, c2 = ((b >> 32) ^ (c1 ^ k0)) & _MASK, ((a >> 32) ^ (c3 ^ k1)) & _MASK
        c1, c3 = b, a
        k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return c0, c1 & _MASK, c2, c3 & _MASK


def random_words(
    seed: Tensor, position: Tensor, stream: Stream | Tensor, *, salt: Tensor | None = None, block: Tensor | None = None
) -> Words:
    """The four 32-bit words at an address.

    Args:
        seed, position, salt: int64 tensors whose shapes broadcast; any int64 value is legal. ``salt`` None is 0.
        stream: what the words are for; an int64 tensor of streams, which broadcasts too, serves several in one call.
        block: int64, broadcasts too: token id >> 2; None is 0.

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2^32).

    Graph-safe.
    """
    zero = torch.zeros_like(position)
    counter = (
        zero if block is None else block & _MASK,
        position & _MASK,
        stream if isinstance(stream, Tensor) else torch.full_like(position, int(stream)),
        zero if salt is None else salt & _MASK,
    )
    return philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))


def uniform(
    seed: Tensor, position: Tensor, stream: Stream | Tensor, *, salt: Tensor | None = None, block: Tensor | None = None
) -> Tensor:
    """One uniform per address, strictly inside (0, 1).

    A token is drawn from a whole vocabulary with one such number, so it carries 52 bits (words 0 and 1): at the 24 bits
    of a float32 most tokens of a long tail could never come out.

    Args:
        seed, position, salt, stream, block: as for :func:`random_words`.

    Returns:
        float64, of the broadcast shape.

    Graph-safe.
    """
    high, low, _, _ = random_words(seed, position, stream, salt=salt, block=block)
    return _to_uniform(high, low)


def gumbel(seed: Tensor, position: Tensor, vocab_size: int, stream: Stream, *, salt: Tensor | None = None) -> Tensor:
    """Standard Gumbel noise for every token of the vocabulary.

    ``-log(-log1p(-u))``: its large values, among which the winner of a wide vocabulary lies, come from small ``u``,
    where float32 is dense. It lies in [-2.82, 22.19].

    Args:
        seed, position, salt: ``[...]`` int64 of one shape.
        vocab_size: ``V``.
        stream: what the noise decides.

    Returns:
        ``[..., V]`` float32, finite.

    Graph-safe.
    """
    block = torch.arange((vocab_size + 3) // 4, device=position.device)  # [V/4], one call serves four tokens
    words = random_words(
        seed.unsqueeze(-1),
        position.unsqueeze(-1),
        stream,
        salt=None if salt is None else salt.unsqueeze(-1),
        block=block,
    )
    word = torch.stack(words, dim=-1).flatten(-2)[..., :vocab_size]  # [..., V/4, 4] -> [..., V]
    return _to_gumbel(word)


def gumbel_of(seed: Tensor, position: Tensor, tokens: Tensor, stream: Stream, *, salt: Tensor | None = None) -> Tensor:
    """The same noise of some tokens only.

    Args:
        seed, position, stream, salt: as for :func:`gumbel`.
        tokens: ``[n]`` or ``[..., n]`` int64 token ids.

    Returns:
        ``[..., n]`` float32, finite.

    Graph-safe.
    """
    words = random_words(
        seed.unsqueeze(-1),
        position.unsqueeze(-1),
        stream,
        salt=None if salt is None else salt.unsqueeze(-1),
        block=tokens >> 2,
    )
    lane = (tokens & 3).expand(words[0].shape).unsqueeze(-1)
    return _to_gumbel(torch.stack(words, dim=-1).gather(-1, lane).squeeze(-1))


def _to_uniform(high: Tensor, low: Tensor) -> Tensor:
    """The 52 leading bits of two words -> float64 in (0, 1): midpoints, so neither end is reached."""
    return (((high << 20) | (low >> 12)).double() + 0.5) * 2.0**-52


def _to_gumbel(word: Tensor) -> Tensor:
    """Words -> float32 Gumbel; the clamps keep both logarithms finite."""
    u = (word.clamp(min=1).float() * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))
