"""Small models to shard, with their units and losses: of our own, and of transformers' configs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.ln(x))))


class Gpt(nn.Module):
    """Tied embeddings; blocks of several widths where ``widths`` says so."""

    def __init__(self, d: int = 16, blocks: int = 4, vocab: int = 11) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(blocks))
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


@dataclass(frozen=True)
class Case:
    """``make`` returns a new model with the same values each time; ``loss`` of a model and a step's seed."""

    make: Callable[[], nn.Module]
    units: tuple[type, ...]
    loss: Callable[[Any, int], Tensor]


def tokens_of(seed: int, vocab: int = 11, shape: tuple[int, ...] = (2, 5)) -> Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def lm_loss(model: nn.Module, seed: int) -> Tensor:
    tokens = tokens_of(seed)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def _hf_loss(model: nn.Module, seed: int) -> Tensor:
    tokens = tokens_of(seed, 32)
    return model(input_ids=tokens, labels=tokens).loss


@functools.cache
def cases() -> dict[str, Case]:
    """By name."""
    import transformers as tf
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.mamba.modeling_mamba import MambaBlock
    from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
    from transformers.models.t5.modeling_t5 import T5Block

    gpt2 = tf.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    bert = tf.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    t5 = tf.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0, decoder_start_token_id=0
    )
    mamba = tf.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=3, expand=2, use_cache=False)
    moe = tf.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
    )  # fmt: skip
    made = {
        "gpt2": (lambda: tf.GPT2LMHeadModel(gpt2), GPT2Block),
        "bert": (lambda: tf.BertForMaskedLM(bert), BertLayer),
        "t5": (lambda: tf.T5ForConditionalGeneration(t5), T5Block),
        "mamba": (lambda: tf.MambaForCausalLM(mamba), MambaBlock),
        "moe": (lambda: tf.MixtralForCausalLM(moe), MixtralDecoderLayer),
    }
    found = {"gpt": Case(lambda: _seeded(Gpt), (Block,), lm_loss)}
    for name, (make, unit) in made.items():
        found[name] = Case(functools.partial(_seeded, make), (unit,), _hf_loss)
    return found
