"""Options: what a training's configuration says about memswap, as plain values or as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Options that become a policy, and options that `manage` takes as they are.
OF_POLICY = ("action", "min_bytes", "include", "exclude")
OF_MANAGE = ("budget", "prefetch_bytes", "group")

#: What a training takes beside them.
OF_TRAINING = ("optimizer",)

#: What a switch says that has no options.
ON = ("1", "true", "on", "yes")
OFF = ("", "0", "false", "off", "no")


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a managed training, from the values of a configuration file.

    Args:
        config: ``budget``, ``prefetch_bytes`` and ``group`` as `manage` takes them; ``action``
            (``"swap"``, ``"encode"``, ``"encode_swap"``, ``"recompute"`` or ``"keep"``),
            ``min_bytes``, ``include`` and ``exclude`` as :class:`memswap.Policy` takes them;
            ``optimizer``: a switch (true, ``"on"``), or ``"swap"``, ``"encode"`` or
            ``"encode_swap"``.

    Raises:
        TypeError: they are not by name.
        ValueError: another option, or a value that `Policy` refuses.
    """
    if not isinstance(config, Mapping):
        raise TypeError(
            f"memswap: found {type(config).__name__} as configuration, expected options by name "
            'such as {"budget": "70%", "action": "swap"}'
        )
    known = (*OF_MANAGE, *OF_POLICY, *OF_TRAINING)
    if unknown := [name for name in config if name not in known]:
        raise ValueError(f"memswap: found the option {unknown[0]!r}, expected {', '.join(known)}")
    policy = {name: config[name] for name in OF_POLICY if name in config}
    options = {name: config[name] for name in OF_MANAGE if name in config}
    if "optimizer" in config:
        options["optimizer"] = _switched(config["optimizer"])
    if policy:
        from memswap.planning.policy import Policy  # with torch: a switch that is off needs none

        options["policy"] = Policy(**policy)
    return options


def _switched(value: Any) -> Any:
    """A switch that is a word, as a bool; anything else as it is."""
    word = value.lower() if isinstance(value, str) else value
    return True if word in ON else False if word in OFF else value


def from_text(text: str, where: str) -> dict[str, Any] | None:
    """The same from one line, such as ``"budget=70%, action=swap"``; None: switched off.

    ``"1"`` switches on without options; ``"0"`` and an empty text switch off.

    Args:
        text: the line.
        where: who said it, for the message.

    Raises:
        ValueError: text that is neither.
    """
    text = text.strip()
    if text.lower() in OFF:
        return None
    if text.lower() in ON:
        return {}
    config = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(
                f"{where}: found {part.strip()!r}, expected 1, 0, or options such as "
                "'budget=70%, action=swap'"
            )
        config[name.strip()] = value.strip()
    return from_config(config)
