"""Settings that every test shares."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

# "ci" draws the same examples on every machine; "full" looks further, and at other ones each time.
settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=25)
settings.register_profile("full", deadline=None, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)
