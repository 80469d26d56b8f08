"""Compute the size and the hash of weights."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch


def size_bytes(module: torch.nn.Module) -> int:
    """Return the size in bytes of the tensors in a module's state dict."""
    return sum(value.nbytes for value in module.state_dict().values() if isinstance(value, torch.Tensor))


def weights_sha256(state: Mapping[str, Any]) -> str:
    """Return a SHA-256, in hex, of a state dict's tensors, to compare the weights of two runs."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):  # a module's extra state
            continue
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
