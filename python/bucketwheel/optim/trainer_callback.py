"""trainer_callback: what the Trainer of transformers needs to save the whole state of a sharded optimizer."""

from __future__ import annotations

import importlib
from typing import Any


def trainer_callback() -> Any:
    """A `transformers.TrainerCallback`: ``Trainer(..., callbacks=[bw.trainer_callback()])``.

    Trainer asks for ``optimizer.state_dict()`` only on ranks that save. With ``full_state_dict=True`` that is collective; so
    the others call it at ``on_save``, which is the first event after it. Does nothing with ``save_only_model=True``.
    """
    base: Any = importlib.import_module("transformers").TrainerCallback

    class FullStateDict(base):
        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if not args.should_save and not args.save_only_model:
                given["optimizer"].state_dict()

    return FullStateDict()
