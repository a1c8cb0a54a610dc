"""MEMSWAP_LIGHTNING: adds the callback to every Trainer of Lightning, without a line of code.

Lightning calls `callbacks_factory` whenever a Trainer is made, in every program of an environment
in which memswap is installed. So this imports nothing until the variable is set.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memswap.integrations.options import from_text

if TYPE_CHECKING:
    from lightning.pytorch import Callback

VARIABLE = "MEMSWAP_LIGHTNING"


def callbacks_factory() -> list[Callback]:
    """The callbacks that the environment asks for: the entry point that Lightning loads.

    Raises:
        ValueError: MEMSWAP_LIGHTNING is neither a switch nor options.
    """
    options = from_text(os.environ.get(VARIABLE, ""), VARIABLE)
    if options is None:
        return []
    from memswap.integrations.lightning import MemswapCallback

    return [MemswapCallback(**options)]
