"""Hugging Face's Llama from its configuration, tiny, with fewer heads for keys and values."""

import torch
from torch.nn import functional as F

import manyhands as mh


def loss(output, targets):
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def task():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    text = torch.randint(31, (48, 13), generator=torch.Generator().manual_seed(1))
    return mh.Task(
        model=LlamaForCausalLM(small),
        loss=loss,
        train=(text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        batch=8,
    )
