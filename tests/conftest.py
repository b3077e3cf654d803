"""Settings that every test shares."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

# Kernels run in Triton's interpreter, which is chosen when a kernel is decorated, so before anything imports one.
# With DSPARK_TEST_DEVICE=cuda they run on a GPU instead, and the tests of tests/gpu do.
if os.environ.get("DSPARK_TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

# "ci" draws the same examples on every machine; "full" looks further, and at other ones each time.
settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=25)
settings.register_profile("full", deadline=None, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)
