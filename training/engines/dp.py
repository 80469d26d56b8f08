"""One process that splits each batch over the GPUs it sees (DataParallel)."""

import torch

from nodekit.training.engines import single


class Engine(single.Engine):
    """Slower than `ddp`: one interpreter drives all GPUs, and the model is copied to them anew in every step."""

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Without GPUs it calls the module itself."""
        return torch.nn.DataParallel(module)
