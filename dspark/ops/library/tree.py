"""A tree as the library's ops take it."""

from __future__ import annotations
