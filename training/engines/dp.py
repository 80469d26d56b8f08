"""DataParallel: one process that splits each batch over the GPUs it sees."""

import logging

import torch

from nodekit.training.engines import single

log = logging.getLogger("nodekit.training")


class Engine(single.Engine):
    """DataParallel; slower than `ddp`: one interpreter drives all GPUs, and copies the model to them in every step."""

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        log.warning(
            "dp drives all GPUs from one interpreter and copies the model to them in every step: --engine ddp with a "
            "rank for each GPU is faster"
        )
        return torch.nn.DataParallel(module)
