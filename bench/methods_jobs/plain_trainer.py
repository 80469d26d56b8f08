"""The transformers Trainer, with its own loop, optimizer, schedule, clipping and logs."""

import tempfile

from common import args, clock, collate, data, device, model, per_rank
from transformers import Trainer, TrainerCallback, TrainingArguments


class Clocked(TrainerCallback):
    """Records when epochs end."""

    def on_epoch_end(self, *_, **__):
        """Record the end of an epoch."""
        clock.epoch_ended()


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=per_rank,
        learning_rate=0.003,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        use_cpu=device.type == "cpu",
    )
    Trainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=[Clocked()]).train()
