"""Public module of the callback: ``Trainer(callbacks=[ModelProfCallback(active=10)])``."""

from lightning_modelprof.lightning.callback import ModelProfCallback

__all__ = ["ModelProfCallback"]
