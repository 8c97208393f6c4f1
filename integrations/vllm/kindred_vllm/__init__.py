"""Kindred's plugin for vLLM: see integrations/vllm/README.md."""

from __future__ import annotations

import os


def register() -> None:
    """Entry point of the group vllm.general_plugins; vLLM calls it in each of its processes, possibly twice.

    Connector and scheduler are named on vLLM's command line and need no registration.
    """
    if os.environ.get("KINDRED_VLLM_EPLB") == "1":
        from kindred_vllm import eplb

        eplb.install()
