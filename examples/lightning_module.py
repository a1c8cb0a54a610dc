"""Train with Lightning: one callback, which finds the layers inside the module.

    pip install lightning
    python examples/lightning_module.py

In a program of your own not even that is needed: MEMSWAP_LIGHTNING="budget=70%" python train.py
"""

import argparse
import tempfile
from pathlib import Path

import lightning
import torch
from torch import nn

from memswap.integrations.lightning import MemswapCallback


class Reader(lightning.LightningModule):
    """Predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
        self.body = nn.TransformerEncoder(layer, 6)
        self.head = nn.Linear(128, 256)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        tokens, following = batch[:, :-1], batch[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=self.device)
        states = self.body(self.embed(tokens), mask=mask, is_causal=True)
        loss = nn.functional.cross_entropy(self.head(states).flatten(0, 1), following.flatten())
        if index % 4 == 0:
            print(f"step {index + 1}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    lightning.seed_everything(0)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    windows = text[: 48 * 257].long().view(48, 257)
    callback = MemswapCallback()  # all there is to add, and `callbacks=` below; or budget="70%"
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=1,
            precision="bf16-mixed",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )
        # When it ends, Lightning's log has callback.report().
        trainer.fit(Reader(), torch.utils.data.DataLoader(windows, batch_size=4))


if __name__ == "__main__":
    main()
