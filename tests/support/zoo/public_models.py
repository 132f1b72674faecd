"""Public models that nobody here wrote, each with a task: tiny, random weights, random data.

Every model comes from a package as it is, by its public class and a small configuration; nothing is
downloaded. Dropout and stochastic depth are off in the configuration where `verify` cannot find
them, because they draw other random numbers on every rank. Everything is random by a seed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from support.zoo import torchvision_ops

# three steps of three ranks; a pipeline's 8 micro-batches hold two samples each
SAMPLES, BATCH = 144, 16
VOCABULARY, LENGTH, CLASSES, PIXELS = 32, 12, 8, 32
# for networks that divide height and width by 32: BatchNorm over two samples of one pixel would
# give 1 and -1, whatever they are: gradients would be rounding, and nothing could be compared
WIDE = 64


# -- tasks --


def chance() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def ids(rows: int = SAMPLES, length: int = LENGTH, generator: torch.Generator | None = None) -> Any:
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator or chance())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def language(model: nn.Module) -> mh.Task:
    """Next-token prediction; the model's output is a record with logits."""
    text = ids(length=LENGTH + 1)
    data = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    return mh.Task(model=model, loss=token_loss, train=data, optimizer=adamw, batch=BATCH)


def token_loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def labelled(model: nn.Module, train: dict[str, Tensor]) -> mh.Task:
    """The model computes its loss itself, from a dict of inputs and labels."""
    return mh.Task(model=model, step=own_loss, train=train, optimizer=adamw, batch=BATCH)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def images(pixels: int = PIXELS) -> Tensor:
    return torch.randn(SAMPLES, 3, pixels, pixels, generator=chance())


def classified(model: nn.Module, optimizer: Any = sgd, pixels: int = WIDE) -> mh.Task:
    data = (images(pixels), torch.randint(CLASSES, (SAMPLES,), generator=chance()))
    return mh.Task(model=model, loss=F.cross_entropy, train=data, optimizer=optimizer, batch=BATCH)


def segmented(model: nn.Module) -> mh.Task:
    """A class for every pixel."""
    target = torch.randint(CLASSES, (SAMPLES, PIXELS, PIXELS), generator=chance())
    return mh.Task(
        model=model, loss=pixel_loss, train=(images(), target), optimizer=sgd, batch=BATCH
    )


def pixel_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["out"], target)


def detected(model: nn.Module, pixels: int) -> mh.Task:
    """Two boxes in every image.

    All images have the same boxes, with random labels: the model's loss is a mean over the anchors
    that match a box, so it is a mean over samples only where all samples have as many.
    """
    box = torch.tensor([[0.1, 0.1, 0.5, 0.6], [0.4, 0.3, 0.9, 0.9]]) * pixels
    train = {
        "images": images(pixels),
        "boxes": box.expand(SAMPLES, 2, 4).contiguous(),
        "labels": torch.randint(1, CLASSES, (SAMPLES, 2), generator=chance()),
    }
    return mh.Task(model=model, step=box_loss, train=train, optimizer=sgd, batch=BATCH)


def box_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    targets = [
        {"boxes": boxes, "labels": labels}
        for boxes, labels in zip(batch["boxes"], batch["labels"], strict=True)
    ]
    return sum(model(list(batch["images"]), targets).values())


# -- transformers --


def gpt2() -> mh.Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return language(GPT2LMHeadModel(config))


def llama() -> mh.Task:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return language(LlamaForCausalLM(config))


def bert() -> mh.Task:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (SAMPLES, 1), generator=chance())
    train = {
        "input_ids": ids(),
        "attention_mask": (torch.arange(LENGTH) < lengths).long(),
        "labels": torch.randint(CLASSES, (SAMPLES,), generator=chance()),
    }
    return labelled(BertForSequenceClassification(config), train)


def t5() -> mh.Task:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    random = chance()
    train = {"input_ids": ids(generator=random), "labels": ids(length=7, generator=random)}
    return labelled(T5ForConditionalGeneration(config), train)


def vit() -> mh.Task:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=PIXELS,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    train = {
        "pixel_values": images(),
        "labels": torch.randint(CLASSES, (SAMPLES,), generator=chance()),
    }
    return labelled(ViTForImageClassification(config), train)


# -- timm --


def timm_resnet() -> mh.Task:
    from timm.models.resnet import BasicBlock, ResNet

    return classified(
        ResNet(BasicBlock, (1, 1, 1, 1), CLASSES, stem_width=16, channels=(16, 16, 32, 64))
    )


def timm_convnext() -> mh.Task:
    from timm.models import ConvNeXt

    return classified(
        ConvNeXt(num_classes=CLASSES, depths=(1, 1, 2, 1), dims=(16, 16, 32, 32)), adamw
    )


def timm_swin() -> mh.Task:
    from timm.models import SwinTransformer

    model = SwinTransformer(
        img_size=PIXELS,
        patch_size=2,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(4, 8),
        num_classes=CLASSES,
        drop_path_rate=0.0,
    )
    return classified(model, adamw, PIXELS)


# -- torchvision --


def resnet() -> Any:
    """Its narrowest: the four widths are fixed in the class."""
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def tv_resnet() -> mh.Task:
    return classified(resnet())


def tv_mobilenet() -> mh.Task:
    from torchvision.models import mobilenet_v2

    return classified(mobilenet_v2(num_classes=CLASSES, width_mult=0.25, dropout=0.0))


def features(layers: dict[str, str]) -> nn.Module:
    from torchvision.models._utils import IntermediateLayerGetter

    return IntermediateLayerGetter(resnet(), layers)


def tv_fcn() -> mh.Task:
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    return segmented(FCN(features({"layer2": "out"}), FCNHead(128, CLASSES)))


def tv_deeplab() -> mh.Task:
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3

    return segmented(DeepLabV3(features({"layer2": "out"}), DeepLabHead(128, CLASSES)))


def tv_lraspp() -> mh.Task:
    from torchvision.models.segmentation import LRASPP

    backbone = features({"layer1": "low", "layer3": "high"})
    return segmented(LRASPP(backbone, 64, 256, CLASSES))


def tv_retinanet() -> mh.Task:
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.retinanet import RetinaNet

    backbone = nn.Sequential(*list(resnet().children())[:6])
    backbone.out_channels = 128
    anchors = AnchorGenerator(((8, 16, 32),), ((0.5, 1.0, 2.0),))
    model = RetinaNet(backbone, CLASSES, min_size=PIXELS, max_size=PIXELS, anchor_generator=anchors)
    return detected(model, PIXELS)


def tv_ssd() -> mh.Task:
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
    from torchvision.models.detection.ssd import SSD

    backbone = features({"layer2": "0", "layer3": "1"})
    anchors = DefaultBoxGenerator([[2], [2]], scales=[0.2, 0.5, 0.9])
    return detected(SSD(backbone, anchors, (PIXELS, PIXELS), CLASSES), PIXELS)


# -- the table --

MODELS: dict[str, tuple[str, Callable[[], mh.Task]]] = {
    "GPT-2": ("transformers", gpt2),
    "Llama": ("transformers", llama),
    "BERT": ("transformers", bert),
    "T5": ("transformers", t5),
    "ViT": ("transformers", vit),
    "timm ResNet": ("timm", timm_resnet),
    "timm ConvNeXt": ("timm", timm_convnext),
    "timm Swin": ("timm", timm_swin),
    "torchvision ResNet": ("torchvision", tv_resnet),
    "torchvision MobileNetV2": ("torchvision", tv_mobilenet),
    "torchvision FCN": ("torchvision", tv_fcn),
    "torchvision DeepLabV3": ("torchvision", tv_deeplab),
    "torchvision LRASPP": ("torchvision", tv_lraspp),
    "torchvision RetinaNet": ("torchvision", tv_retinanet),
    "torchvision SSD": ("torchvision", tv_ssd),
}


def installed(name: str) -> bool:
    return importlib.util.find_spec(MODELS[name][0]) is not None


def task_of(name: str) -> mh.Task:
    torchvision_ops.declare_missing()  # transformers and timm import torchvision too
    torch.manual_seed(0)
    return MODELS[name][1]()


def maker(name: str) -> Callable[[], mh.Task]:
    """What makes the task, to be sent to other processes."""
    return functools.partial(task_of, name)
