"""save_safetensors: weights that Hugging Face's libraries read, tied ones written once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bucketwheel as bw
from tests.frameworks.test_trainer import make_llama
from tests.support.bits import assert_bitwise_equal
from tests.support.late_gathers import delay_gathers
from tests.support.optim_twins import TINY
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout_s(300)  # the first test waits for all imports


class Tied(nn.Module):
    """Of no library; with a buffer, and one in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.register_buffer("counts", torch.arange(5))

    def forward(self, ids: Any) -> Any:
        return self.head(self.embed(ids)).sum() + self.conv(torch.ones(1, 2, 3, 3)).sum()


def trained(model: nn.Module, loss: Any, **options: Any) -> bw.ShardedAdamW:
    opt = bw.ShardedAdamW(model.parameters(), lr=0.01, overlap_param_sync=True, **TINY, **options)
    delay_gathers(opt)  # what is read before it has been waited for is stale
    loss().backward()
    opt.step()
    return opt


def files_in(folder: str) -> dict[str, Any]:
    """What a reader that knows nothing of models finds, by file."""
    from safetensors import safe_open

    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            found[path.name] = {name: file.get_tensor(name) for name in file.keys()}
    return found


def export_llama(rank: int, world: int, folder: str, max_shard_size: Any) -> None:
    from transformers import LlamaForCausalLM

    model = make_llama()
    with trained(model, lambda: model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.sum()) as opt:
        bw.checkpoint.save_safetensors(folder, model, opt, max_shard_size=max_shard_size)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        files = files_in(folder)
        names = [name for file in files.values() for name in file]
        assert sorted(names) == sorted(expected.keys() - {"lm_head.weight"})
        if max_shard_size == 4000:
            index = json.loads(Path(folder, "model.safetensors.index.json").read_text())
            assert len(files) > 2
            assert index["weight_map"] == {name: file for file, has in files.items() for name in has}
        else:
            assert list(files) == ["model.safetensors"]
        read = LlamaForCausalLM.from_pretrained(folder)
        assert_bitwise_equal(dict(read.state_dict()), expected)
        assert read.lm_head.weight is read.model.embed_tokens.weight


@pytest.mark.parametrize("max_shard_size", ["5GB", 4000])
def test_transformers_loads_its_model(ranks: RankPool, tmp_path: Path, max_shard_size: Any) -> None:
    ranks.run(export_llama, str(tmp_path / "out"), max_shard_size, timeout_s=100)


def export_module(rank: int, world: int, folder: str, max_shard_size: Any) -> None:
    from huggingface_hub import load_torch_model
    from safetensors.torch import load_model

    torch.manual_seed(0)
    model = Tied()
    with trained(model, lambda: model(torch.arange(3))) as opt:
        bw.checkpoint.save_safetensors(folder, model, opt, max_shard_size=max_shard_size)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        saved = [name for file in files_in(folder).values() for name in file]
        assert len(saved) == len(expected) - 1 and len({"embed.weight", "head.weight"} & set(saved)) == 1
        torch.manual_seed(1)
        other = Tied()
        if max_shard_size == 300:
            assert "model.safetensors.index.json" in os.listdir(folder)
            load_torch_model(other, folder)
        else:
            load_model(other, f"{folder}/model.safetensors")
        assert_bitwise_equal(dict(other.state_dict()), expected)
        assert other.head.weight is other.embed.weight


@pytest.mark.parametrize("max_shard_size", ["5GB", 300])
def test_any_module_loads_its_weights(ranks: RankPool, tmp_path: Path, max_shard_size: Any) -> None:
    ranks.run(export_module, str(tmp_path / "out"), max_shard_size, timeout_s=100)


def test_one_process_needs_no_optimizer(tmp_path: Path) -> None:
    model = Tied()
    bw.checkpoint.save_safetensors(tmp_path, model)
    assert_bitwise_equal(files_in(str(tmp_path))["model.safetensors"]["counts"], model.counts)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        bw.checkpoint.save_safetensors(tmp_path / "file", model)


def export_into_a_file(rank: int, world: int, folder: str) -> None:
    model = Tied()
    with trained(model, lambda: model(torch.arange(3))) as opt:
        with pytest.raises((FileExistsError, ValueError), match="File exists") as raised:
            bw.checkpoint.save_safetensors(f"{folder}/file", model, opt)
        assert raised.type is (FileExistsError if rank == 0 else ValueError)
        opt.zero_grad()


def test_all_ranks_hear_of_an_error(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ranks.run(export_into_a_file, str(tmp_path), timeout_s=100)


def test_the_extra_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'bucketwheel\[hf\]'"):
        bw.checkpoint.save_safetensors(tmp_path / "out", Tied())
