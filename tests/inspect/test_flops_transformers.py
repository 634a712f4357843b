"""FLOPs of randomly initialized models from the transformers library match values worked out by hand.

Layers L, batch B, positions T, width E, feed-forward F, vocabulary V. The unmasked product counts: causal
kernels may do half. Embeddings make the first layer's input need its gradient, so that backward is twice
forward.
"""

from __future__ import annotations

import pytest
import torch

from lightning_modelprof.inspect.flops.count import count_flops

transformers = pytest.importorskip("transformers", reason="needs the transformers library")

L, B, T, E, F, V = 2, 2, 32, 64, 128, 300
HEADS = 4
PROJECTIONS = 4 * B * T * E**2  # query, key, value and output
CORE = 2 * B * T**2 * E  # scores and weighted sum
FEED_FORWARD = 2 * B * T * E * F


def words():
    return torch.randint(0, V, (B, T))


def loss_of(output):
    return output.loss


def check(model, forward, backward, recompute, **inputs):
    count = count_flops(model, loss_fn=loss_of, **inputs)
    assert count.macs["forward"] == forward
    assert count.macs["backward"] == backward
    assert count.macs.get("recompute", 0) == recompute
    assert (count.errors, count.uncounted) == ((), {})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flops_of_bert(attention, dropout):
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=E,
        num_hidden_layers=L,
        num_attention_heads=HEADS,
        intermediate_size=F,
        attention_probs_dropout_prob=dropout,
        attn_implementation=attention,
    )
    model = transformers.BertForSequenceClassification(config)
    # Pooler and classifier use only the first position.
    forward = L * (PROJECTIONS + CORE + FEED_FORWARD) + B * E * E + B * E * 2
    # The CPU's fused kernel doesn't support dropout; with dropout or eager attention nothing is recomputed.
    fused = attention == "sdpa" and not dropout
    recompute = L * CORE // 2 if fused else 0
    check(
        model,
        forward,
        2 * forward,
        recompute,
        input_ids=words(),
        attention_mask=torch.ones(B, T, dtype=torch.long),
        labels=torch.tensor([0, 1]),
    )


def test_flops_of_gpt2():
    config = transformers.GPT2Config(vocab_size=V, n_positions=64, n_embd=E, n_layer=L, n_head=HEADS)
    # The feed-forward part is four times as wide as the rest. Dropout is 0.1, so no fused kernel runs.
    forward = L * (PROJECTIONS + CORE + 8 * B * T * E**2) + B * T * E * V
    ids = words()
    check(transformers.GPT2LMHeadModel(config), forward, 2 * forward, 0, input_ids=ids, labels=ids)


def test_flops_of_llama():
    key_heads = 2
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=E,
        intermediate_size=F,
        num_hidden_layers=L,
        num_attention_heads=HEADS,
        num_key_value_heads=key_heads,
        max_position_embeddings=64,
    )
    depth = E // HEADS
    # Keys and values have two heads instead of four; the feed-forward part has three products.
    layer = B * T * E * (E + 2 * key_heads * depth) + B * T * E**2 + CORE + 3 * B * T * E * F
    # Before transformers 5 rotary angles are a product of half a head's depth of frequencies with T
    # positions, without gradient; since then they are multiplied element by element.
    rotary = depth // 2 * T if int(transformers.__version__.split(".")[0]) < 5 else 0
    forward = L * layer + B * T * E * V
    ids = words()
    check(
        transformers.LlamaForCausalLM(config),
        forward + rotary,
        2 * forward,
        L * CORE // 2,
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        labels=ids,
    )


def test_flops_of_vit():
    config = transformers.ViTConfig(
        hidden_size=E,
        num_hidden_layers=L,
        num_attention_heads=HEADS,
        intermediate_size=F,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    positions = (32 // 8) ** 2 + 1  # patches and the class token
    patches = B * 4 * 4 * E * 3 * 8 * 8
    core = 2 * B * positions**2 * E
    layer = 4 * B * positions * E**2 + core + 2 * B * positions * E * F
    forward = patches + L * layer + B * E * 10
    check(
        transformers.ViTForImageClassification(config),
        forward,
        2 * forward - patches,  # the image needs no gradient
        L * core // 2,
        pixel_values=torch.randn(B, 3, 32, 32),
        labels=torch.tensor([1, 2]),
    )
