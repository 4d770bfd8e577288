"""A causal language model of `transformers`, from a folder of pretrained weights."""

from pathlib import Path

import heterps


def build(folder: str) -> heterps.HuggingFace:
    """Its blocks are layers; `folder` is relative to this file."""
    return heterps.hugging_face(Path(__file__).parent / folder, "CausalLM")
