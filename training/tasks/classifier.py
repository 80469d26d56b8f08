"""The base of tasks that classify images: batches of (images, labels), and a model that returns a score per label."""

from typing import cast

import torch
from torch import nn
from torch.nn import functional

Sample = tuple[torch.Tensor, torch.Tensor]


class Classifier:
    """Loss, scores and targets of a task that classifies images."""

    def predict(self, model: nn.Module, batch: Sample) -> torch.Tensor:
        """Return the scores before softmax, ``(num, len(labels))``."""
        return cast(torch.Tensor, model(batch[0]))

    def targets(self, batch: Sample) -> torch.Tensor:
        """Return the right indices into ``labels``, int64 ``(num,)``."""
        return batch[1]

    def loss(self, model: nn.Module, batch: Sample) -> torch.Tensor:
        """Return the cross-entropy, the mean over the batch."""
        return functional.cross_entropy(self.predict(model, batch), batch[1])
