"""Hugging Face's GPT-2 from its configuration, tiny, as it stands."""

import torch
from torch.nn import functional as F

import manyhands as mh


def loss(output, targets):
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def task():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = GPT2Config(
        vocab_size=31,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    text = torch.randint(31, (48, 13), generator=torch.Generator().manual_seed(1))
    return mh.Task(
        model=GPT2LMHeadModel(small),
        loss=loss,
        train=(text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        batch=8,
    )
