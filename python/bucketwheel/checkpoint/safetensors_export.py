"""Export of a model's weights as safetensors, as Hugging Face's libraries write and read them.

Parameters are whole on every rank, so one rank writes, and what is written knows nothing of ranks. The libraries do it:
transformers for its models (with the configuration, and the names that its releases agreed on), huggingface_hub for others.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch

from bucketwheel.checkpoint.live import ShardedOptimizer, engine_of
from bucketwheel.errors import failing_together
from bucketwheel.layout.leased_params import home_of


def save_safetensors(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: ShardedOptimizer | None = None,
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes the weights of ``model`` into ``directory``, which is made if need be: as ``model.safetensors``, or above
    ``max_shard_size`` (bytes, or text such as ``"5GB"``) as several files and ``model.safetensors.index.json``.

    Weights that are tied are written once. transformers' ``from_pretrained``, ``safetensors.torch.load_model`` (one file)
    and ``huggingface_hub.load_torch_model`` read it. Files of an earlier export there are replaced, one after the other.

    With ``optimizer`` (`ShardedAdamW`) it is collective: rank 0 writes the parameters as of the last step, the others wait
    for it, and an error there is a ValueError here. Without, this process writes; call it on one rank.

    ImportError without the packages of ``bucketwheel[hf]``. OSError where ``directory`` cannot be written.
    """
    engine = engine_of(optimizer)
    for name, param in model.named_parameters():
        if home_of(param) is not None and type(param) is not torch.nn.Parameter:
            raise ValueError(
                f"save_safetensors: parameter {name!r} is sharded; call it inside `with model.full_params():`, on rank 0"
            )
    with nullcontext() if engine is None else failing_together(engine.expect_done_by_all, "save_safetensors"):
        if engine is None or engine.ranks[0] == 0:
            _write(os.fspath(directory), model, max_shard_size)


def _write(directory: str, model: torch.nn.Module, max_shard_size: int | str) -> None:
    try:
        import safetensors.torch  # noqa: F401
        from huggingface_hub import save_torch_model
    except ImportError as error:
        raise ImportError(f"save_safetensors needs pip install 'bucketwheel[hf]': {error}") from error
    os.makedirs(directory, exist_ok=True)
    if callable(save_pretrained := getattr(model, "save_pretrained", None)):
        save_pretrained(directory, max_shard_size=max_shard_size)
    else:
        save_torch_model(model, directory, max_shard_size=max_shard_size)
