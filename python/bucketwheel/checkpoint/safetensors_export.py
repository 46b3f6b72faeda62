"""Export of a model's weights as safetensors, as Hugging Face's libraries write and read them.

All ranks have the complete parameters, so one rank writes. The libraries write the files: transformers for its own models
(with the configuration and the names of its releases), huggingface_hub for other models."""

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
    """Writes the weights of a model as safetensors. Local; collective over the optimizer's ranks if you pass ``optimizer``.

    The file is ``model.safetensors``, or several files and ``model.safetensors.index.json`` if the weights are larger than
    ``max_shard_size``. Tied weights are written once. transformers' ``from_pretrained``, ``safetensors.torch.load_model`` (one
    file) and ``huggingface_hub.load_torch_model`` read the folder. Files of an earlier export are replaced one by one.

    Args:
        directory: The folder, which is made if needed.
        model: The module. If `bw.shard` has sharded its parameters, call the function inside ``with model.full_params():``.
        optimizer: A `ShardedAdamW`. With it rank 0 writes the parameters as of the last step, and the other ranks wait.
            Without it this process writes; call the function on one rank only.
        max_shard_size: The largest size of a file, in bytes or as a text such as ``"5GB"``.

    Raises:
        ImportError: A package of ``bucketwheel[hf]`` is not installed.
        OSError: The folder cannot be written.
        ValueError: A parameter is sharded and not gathered, or rank 0 raised an error. The message has its text."""
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
