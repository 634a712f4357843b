"""Refuse settings that don't fit the trainer or the machine before training starts."""

from __future__ import annotations

from typing import Any

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.errors import ConfigError, did_you_mean, quoted, warn
from lightning_modelprof.inspect.modules.modules import plain_path
from lightning_modelprof.measure.stored import modules_of, named_modules


def measuring_callback(callback: Any, trainer: Any, callback_type: type[Any]) -> Any:
    """Return the first of our callbacks on the trainer; others with the same arguments do nothing.

    There are several if one comes from a ``lightning.pytorch.callbacks_factory`` entry point: Lightning puts
    it into the list it's given, so a list that's used again has it twice. One that the environment requests
    does nothing if the program has its own.

    Args:
        callback: one of ours; it isn't among the trainer's if one of these passes its hooks on to it.

    Raises:
        ConfigError: when another one has different arguments.
    """
    ours = [one for one in trainer.callbacks if isinstance(one, callback_type)]
    if not any(one is callback for one in ours):
        ours.append(callback)
    ours = [one for one in ours if not one.is_from_environment] or ours[:1]
    # Compare plain values, with functions by name, as each call of a factory makes new functions.
    if any(one.config.as_plain() != ours[0].config.as_plain() for one in ours):
        raise ConfigError(
            f"Trainer(callbacks=...): expected one ModelProfCallback, got {len(ours)} with different"
            " arguments. Remove all but one. One may come from a lightning.pytorch.callbacks_factory entry"
            " point."
        )
    return ours[0]


def ignore_repeats(callback: Any, trainer: Any, callback_type: type[Any]) -> bool:
    """Warn about more of our callbacks on the trainer, and make sure that one's hooks are called only once.

    Returns:
        Whether there are others.

    Lightning may be iterating over the list right now, so only entries after the first are removed.
    """
    callbacks = trainer.callbacks
    places = [place for place, one in enumerate(callbacks) if isinstance(one, callback_type)]
    own = [place for place in places if callbacks[place] is callback]
    count = len(places) + (not own)
    if count == 1:
        return False
    for place in reversed(own[1:]):
        del callbacks[place]
    if trainer.is_global_zero:
        warn(
            f"the Trainer has {count} ModelProfCallbacks and uses only one."
            " Pass one, in a new list per Trainer"
        )
    return True


def check_ignored(config: ProfileConfig, pl_module: Any) -> None:
    """Refuse names in ``ignore_modules`` that aren't classes or paths of modules.

    A LightningModule that makes its modules in ``configure_model`` has none yet; then the report names them.

    Raises:
        ConfigError: with the nearest existing name.
    """
    classes = [kind for kind in type(pl_module).__mro__ if "configure_model" in vars(kind)]
    if not config.inspect.ignore_modules or classes[0].__name__ != "ModelHooks":
        return
    names = {plain_path(path) for path, _ in named_modules(pl_module) if path}
    names |= {type(module).__name__ for module in modules_of(pl_module)}
    for name in config.inspect.ignore_modules:
        if name not in names:
            raise ConfigError(
                "ModelProfCallback: inspect: ignore_modules: expected class names or module paths in"
                f" {type(pl_module).__name__}, got {quoted(name)}.{did_you_mean(name, names)}"
            )
