"""Recurrent layers, attention and Hugging Face models for ``flops.py``, with hand-derived truths.

Letters: batch B, target length T, source length S, width E, feed-forward width W, layers L.
"""

from __future__ import annotations

from typing import Any

import torch
from flop_case import Case, loss_of
from torch import nn

B, T, E, W, L = 2, 32, 64, 128, 2
VOCABULARY = 300


class Recurrent(nn.Module):
    """Two layers of width 64, then a linear layer on the last step's output."""

    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool) -> None:
        super().__init__()
        self.layers = kind(32, 64, 2, batch_first=True, bidirectional=bidirectional)
        self.last = nn.Linear(128 if bidirectional else 64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x)[0][:, -1])


def recurrent(kind: type[nn.RNNBase], gates: int, directions: int) -> Case:
    # 4 sequences of 20 steps. At each step, every gate of width 64 multiplies the input and the state: 32 and
    # 64 in the first layer, all directions' 64 and 64 in the second.
    step = directions * gates * 64
    first_input = 4 * 20 * step * 32
    forward = first_input + 4 * 20 * step * (64 + directions * 64 + 64) + 4 * directions * 64 * 5
    # No gradients are needed for the batch, or for the states before the first step of the two layers.
    backward = 2 * forward - first_input - 2 * 4 * step * 64
    model, x = Recurrent(kind, bidirectional=directions == 2), torch.randn(4, 20, 32)
    return Case(model=model, args=(x,), forward_macs=forward, backward_macs=backward)


def attention_core(length: int = T) -> int:
    """Scores and weighted sum of one layer: two products of length E for each of the B T T pairs."""
    return 2 * B * length * length * E


class SelfAttention(nn.Module):
    """Attention; requesting the weights disables torch's fused kernel."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 4, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


def self_attention(need_weights: bool) -> Case:
    # Query, key, value and output are E x E each. The batch needs no gradient from the first three.
    in_projections = 3 * B * T * E * E
    forward = in_projections + B * T * E * E + attention_core()
    return Case(
        model=SelfAttention(need_weights),
        args=(torch.randn(B, T, E),),
        forward_macs=forward,
        backward_macs=2 * forward - in_projections,
    )


def encoder_layer_macs(length: int = T) -> int:
    """Four projections, attention, and a feed-forward part with products of E x W and W x E."""
    return 4 * B * length * E * E + attention_core(length) + 2 * B * length * E * W


def transformer_encoder() -> Case:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, 4, W, batch_first=True), L)
    forward = L * encoder_layer_macs()
    # The first layer's query, key and value read the batch.
    backward = 2 * forward - 3 * B * T * E * E
    return Case(model=model, args=(torch.randn(B, T, E),), forward_macs=forward, backward_macs=backward)


def transformer() -> Case:
    # One layer each, source of 24, target of 16. In the decoder's second attention, queries and outputs come
    # from the target, keys and values from the source, and there are T S pairs.
    source, target = 24, 16
    crossing = 2 * B * target * E * E + 2 * B * source * E * E + 2 * B * target * source * E
    forward = encoder_layer_macs(source) + encoder_layer_macs(target) + crossing
    # Query, key and value read both batches, which need no gradient.
    backward = 2 * forward - 3 * B * (source + target) * E * E
    return Case(
        model=nn.Transformer(E, 4, 1, 1, W, batch_first=True),
        args=(torch.randn(B, source, E), torch.randn(B, target, E)),
        forward_macs=forward,
        backward_macs=backward,
    )


class EinsumAttention(nn.Module):
    """Attention written with einsum instead of matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 32, 8) * 0.1)
        self.out = nn.Parameter(torch.randn(4, 8, 32) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = torch.einsum("bte,nhed->nbhtd", x, self.weight).unbind(0)
        weights = torch.einsum("bhtd,bhsd->bhts", query, key).softmax(-1)
        return torch.einsum("bhtd,hde->bte", torch.einsum("bhts,bhsd->bhtd", weights, value), self.out)


def einsum() -> Case:
    # 4 sequences of 16, width 32: the in-projections, scores and weighted sum, the out-projection.
    in_projections = 3 * 4 * 16 * 32 * 32
    forward = in_projections + 2 * 4 * 16 * 16 * 32 + 4 * 16 * 32 * 32
    return Case(
        model=EinsumAttention(),
        args=(torch.randn(4, 16, 32),),
        forward_macs=forward,
        backward_macs=2 * forward - in_projections,
    )


def words() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (B, T))


def hugging_face(model: nn.Module, forward: int, backward: int | None = None, **inputs: Any) -> Case:
    """Behind an embedding, every layer's input needs a gradient, so backward is exactly twice forward."""
    backward = 2 * forward if backward is None else backward
    return Case(model=model, kwargs=inputs, forward_macs=forward, backward_macs=backward, loss=loss_of)


def bert(attention: str) -> Case:
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=E,
        num_hidden_layers=L,
        num_attention_heads=4,
        intermediate_size=W,
        attn_implementation=attention,
    )
    # Encoder layers; the pooler and the classifier of 2 classes see one position.
    forward = L * encoder_layer_macs() + B * E * E + B * E * 2
    ids, labels = words(), torch.tensor([0, 1])
    model = BertForSequenceClassification(config).train()
    return hugging_face(model, forward, input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=E, n_layer=L, n_head=4)
    # The feed-forward part has width 4 E, so a layer has 4 + 8 products of E x E. Then the language head.
    forward = L * (12 * B * T * E * E + attention_core()) + B * T * E * VOCABULARY
    ids = words()
    return hugging_face(GPT2LMHeadModel(config).train(), forward, input_ids=ids, labels=ids)


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=E,
        intermediate_size=W,
        num_hidden_layers=L,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    # Half as many key and value heads, so each projects E to E / 2. The feed-forward part has three products.
    # Excluded: the angles of the rotary embedding, 8 frequencies by T positions, 0.004% of the total.
    projections = 2 * B * T * E * E + 2 * B * T * E * (E // 2)
    layer = projections + attention_core() + 3 * B * T * E * W
    forward = L * layer + B * T * E * VOCABULARY
    ids, model = words(), LlamaForCausalLM(config).train()
    return hugging_face(model, forward, input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415

    config = ViTConfig(
        hidden_size=E,
        num_hidden_layers=L,
        num_attention_heads=4,
        intermediate_size=W,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    # 16 patches of 8 x 8 x 3, and one position for the class. The images need no gradient.
    patches = B * 16 * E * (8 * 8 * 3)
    forward = patches + L * encoder_layer_macs(17) + B * E * 10
    images, labels = torch.randn(B, 3, 32, 32), torch.tensor([1, 2])
    model = ViTForImageClassification(config).train()
    return hugging_face(model, forward, 2 * forward - patches, pixel_values=images, labels=labels)


SEQUENCE_MODELS = {
    "lstm": lambda: recurrent(nn.LSTM, gates=4, directions=1),
    "gru, two directions": lambda: recurrent(nn.GRU, gates=3, directions=2),
    "attention with weights": lambda: self_attention(need_weights=True),
    "fused attention": lambda: self_attention(need_weights=False),
    "transformer encoder": transformer_encoder,
    "transformer": transformer,
    "bert": lambda: bert("sdpa"),
    "bert, eager attention": lambda: bert("eager"),
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "einsum attention": einsum,
}
