"""trainer_callback: lets the Trainer of transformers save the full state of a sharded optimizer."""

from __future__ import annotations

import importlib
from typing import Any


def trainer_callback() -> Any:
    """Returns a `transformers.TrainerCallback` with which Trainer saves full optimizer states. Local.

    Pass it as ``Trainer(..., callbacks=[bw.trainer_callback()])``, and make the optimizer with ``full_state_dict=True``.
    Trainer calls ``optimizer.state_dict()`` only on the ranks that save, and the call is collective. The callback makes the
    same call on the other ranks, at the event ``on_save``. With ``save_only_model=True`` it does nothing. See
    docs/frameworks.md, "Trainer of transformers".

    Raises:
        ImportError: transformers is not installed."""
    base: Any = importlib.import_module("transformers").TrainerCallback

    class FullStateDict(base):
        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if not args.should_save and not args.save_only_model:
                given["optimizer"].state_dict()

    return FullStateDict()
