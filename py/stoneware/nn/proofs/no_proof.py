"""The error of all proofs."""

from __future__ import annotations


class NoProof(Exception):
    """The module's code does not prove that it computes the function; the message has the reason."""
