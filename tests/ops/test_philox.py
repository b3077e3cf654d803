"""Random numbers: the right integers, the right laws, and no dependence on anything but the address."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from dspark.ops.philox import _to_gumbel, _to_uniform, gumbel, philox4x32, random_words, uniform
from dspark.ops.types import Stream
from tests.tolerances import CHI_SQUARE, SIGMAS

MAX_GUMBEL = 22.2
ONES = 0xFFFFFFFF

# Random123, kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_known_answers_of_random123(name: str) -> None:
    counter, key, expected = KNOWN_ANSWERS[name]
    c0, c1, c2, c3 = (torch.tensor(c) for c in counter)
    words = philox4x32((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert tuple(w.item() for w in words) == expected


def test_counter_and_key_broadcast() -> None:
    words = philox4x32(
        (int64(*range(5)), int64(7, 8, 9)[:, None], int64(1), int64(2)), (int64(3), int64(4, 5, 6)[:, None])
    )
    for i, j in itertools.product(range(3), range(5)):
        one = philox4x32((int64(j), int64(7 + i), int64(1), int64(2)), (int64(3), int64(4 + i)))
        assert [w[i, j].item() for w in words] == [w.item() for w in one]


def test_an_address_fills_counter_and_key_as_the_contract_says() -> None:
    seed, position, salt = 0x0123456789ABCDEF, (3 << 32) + 5, (9 << 32) + 6
    words = random_words(int64(seed), int64(position), Stream.RESIDUAL, salt=int64(salt), block=int64(11))
    counter = (int64(11), int64(5), int64(int(Stream.RESIDUAL)), int64(6))
    assert words == philox4x32(counter, (int64(0x89ABCDEF), int64(0x01234567)))


def test_equals_tritons_philox(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (5, 4096)
    address = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
    address[:, :4] = int64(0, -1, 2**63 - 1, -(2**63))
    address[1:, 4:] &= 0x3FFFF  # most addresses of the size that occurs; seeds stay 64 bit
    source, destination = tmp_path / "address.npy", tmp_path / "words.npy"
    np.save(source, address.numpy())
    script = Path(__file__).with_name("triton_philox.py")
    subprocess.run(
        [sys.executable, str(script), str(source), str(destination)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
        timeout=300,
    )
    seed, block, position, stream, salt = address
    words = random_words(seed, position, stream & ONES, salt=salt, block=block)
    np.testing.assert_array_equal(torch.stack(words).numpy(), np.load(destination))


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 8, 9])
def test_a_token_reads_its_own_word(vocab_size: int) -> None:
    seed, position, salt = int64(5, -6), int64(100, 2**33 + 1), int64(0, 12)
    noise = gumbel(seed, position, vocab_size, Stream.DRAFT, salt=salt)
    assert noise.shape == (2, vocab_size)
    for token in range(vocab_size):
        words = random_words(seed, position, Stream.DRAFT, salt=salt, block=int64(token >> 2))
        u = words[token & 3].double() * 2.0**-32
        torch.testing.assert_close(noise[:, token].double(), -torch.log(-torch.log1p(-u)), rtol=1e-6, atol=1e-6)


def test_uniform_reads_words_0_and_1() -> None:
    seed, position = int64(1, 2, 3), int64(4, 5, 6)
    high, low, _, _ = random_words(seed, position, Stream.ACCEPT)
    expected = high.double() * 2.0**-32 + low.double() * 2.0**-64
    torch.testing.assert_close(uniform(seed, position, Stream.ACCEPT), expected, rtol=0, atol=2.0**-52)


def test_gumbel_is_finite_and_bounded_for_every_kind_of_word() -> None:
    edges = [0, 1, 2, 3, 127, 2**23, 2**24 - 1, 2**24 + 1, 2**31, ONES - 256, ONES - 128, ONES - 1, ONES]
    noise = _to_gumbel(int64(*edges))
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    assert noise.max() <= MAX_GUMBEL
    assert noise.max() > MAX_GUMBEL - 0.1
    assert noise.min() >= -2.82
    assert (noise.diff() <= 0).all()


def test_uniform_never_reaches_an_end() -> None:
    words = int64(0, 1, ONES - 1, ONES)
    u = _to_uniform(words[:, None], words)
    assert u.dtype == torch.float64
    assert (u > 0).all()
    assert (u < 1).all()
    assert (u.double() != u.float().double()).any(), "more than the 24 bits of a float32"


def test_laws_of_gumbel_and_uniform() -> None:
    noise = gumbel(torch.arange(100), torch.arange(100) + 7, 4001, Stream.TARGET).flatten()
    assert stats.kstest(noise.double().numpy(), "gumbel_r").pvalue > CHI_SQUARE
    u = uniform(torch.arange(400)[:, None], torch.arange(500), Stream.ACCEPT).flatten()
    assert stats.kstest(u.numpy(), "uniform").pvalue > CHI_SQUARE


def test_p08_streams_salts_positions_and_seeds_are_independent() -> None:
    vocab_size, rows = 2000, 100
    seed, position = torch.full((rows,), 3), torch.arange(rows)

    def noise(stream: Stream, *, salt: int | None = None, shift: int = 0, key: int = 0) -> Tensor:
        salts = None if salt is None else torch.full((rows,), salt)
        return gumbel(seed + key, position + shift, vocab_size, stream, salt=salts).flatten()

    variants = [noise(s) for s in Stream]
    variants += [noise(Stream.DRAFT, salt=salt) for salt in (1, 2, 1000)]
    variants += [noise(Stream.TARGET, shift=rows), noise(Stream.TARGET, key=1), noise(Stream.TARGET, key=1 << 32)]
    correlation = torch.corrcoef(torch.stack(variants).double())
    off_diagonal = correlation[~torch.eye(len(variants), dtype=torch.bool)]
    assert off_diagonal.abs().max() < SIGMAS / (rows * vocab_size) ** 0.5
    assert torch.equal(noise(Stream.DRAFT), noise(Stream.DRAFT, salt=0)), "no salt is salt 0"


def test_p08_uniforms_of_one_token_are_independent() -> None:
    position = torch.arange(200_000)
    seed = torch.full_like(position, 9)
    u = torch.stack([uniform(seed, position, s) for s in Stream])
    both = torch.cat([u[:, :-1], u[:, 1:]])  # of a position and of its neighbour
    correlation = torch.corrcoef(both)
    off_diagonal = correlation[~torch.eye(len(both), dtype=torch.bool)]
    assert off_diagonal.abs().max() < SIGMAS / position.numel() ** 0.5


def test_several_streams_in_one_call_are_the_same_numbers() -> None:
    seed, position = int64(1, 2, 3), int64(4, 5, 6)
    together = uniform(seed, position, torch.arange(len(Stream))[:, None])
    assert torch.equal(together, torch.stack([uniform(seed, position, s) for s in Stream]))


def test_p20_noise_does_not_depend_on_the_batch_or_the_vocabulary_size() -> None:
    generator = torch.Generator().manual_seed(1)
    rows, vocab_size = 37, 1027
    seed = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    position = torch.randint(0, 10_000, (rows,), generator=generator)
    noise = gumbel(seed, position, vocab_size, Stream.TARGET)
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(gumbel(seed[order], position[order], vocab_size, Stream.TARGET), noise[order])
    for row in range(rows):
        part = slice(row, row + 1)
        assert torch.equal(gumbel(seed[part], position[part], vocab_size, Stream.TARGET), noise[part])
    for smaller in (1, 6, 15, 16, 17, 63, 1024):
        assert torch.equal(gumbel(seed, position, smaller, Stream.TARGET), noise[:, :smaller])


def test_graph_safe_reads_no_values() -> None:
    ids = torch.empty(3, dtype=torch.int64, device="meta")
    assert gumbel(ids, ids, 10, Stream.DRAFT, salt=ids).shape == (3, 10)
    assert uniform(ids, ids, Stream.ACCEPT).shape == (3,)
