"""Words of Triton's own Philox, computed in its interpreter.

Run as a script with TRITON_INTERPRET=1 (the variable is read when a kernel is decorated, so it needs a process of its
own): reads a ``[5, n]`` int64 array of (seed, token id >> 2, position, stream, salt) from the file named first
and writes the four words ``[4, n]`` as int64 to the file named second.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def philox_kernel(address_ptr, words_ptr, stride_address_field, stride_words_word, n, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    offs = tl.arange(0, BLOCK)
    mask = offs < n
    seed = tl.load(address_ptr + 0 * stride_address_field + offs, mask=mask, other=0)  # [BLOCK]
    c0 = tl.load(address_ptr + 1 * stride_address_field + offs, mask=mask, other=0).to(tl.uint32)
    c1 = tl.load(address_ptr + 2 * stride_address_field + offs, mask=mask, other=0).to(tl.uint32)
    c2 = tl.load(address_ptr + 3 * stride_address_field + offs, mask=mask, other=0).to(tl.uint32)
    c3 = tl.load(address_ptr + 4 * stride_address_field + offs, mask=mask, other=0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3)
    tl.store(words_ptr + 0 * stride_words_word + offs, w0.to(tl.int64), mask=mask)
    tl.store(words_ptr + 1 * stride_words_word + offs, w1.to(tl.int64), mask=mask)
    tl.store(words_ptr + 2 * stride_words_word + offs, w2.to(tl.int64), mask=mask)
    tl.store(words_ptr + 3 * stride_words_word + offs, w3.to(tl.int64), mask=mask)


def main(source: str, destination: str) -> None:
    address = torch.from_numpy(np.load(source))
    n = address.shape[1]
    words = torch.full((4, n), -1, dtype=torch.int64)
    philox_kernel[(1,)](address, words, address.stride(0), words.stride(0), n, BLOCK=triton.next_power_of_2(n))
    np.save(destination, words.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
