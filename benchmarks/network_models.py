"""Gradients of the models of arXiv 2006.10103, in the order of the backward pass, from their published shapes.

The times are not measured: a step of batch 32 in fp32 on one V100 is taken as 1/11, 1/6.5 and 1/7 s (about 350, 210 and
225 images/s, as vendors publish), two thirds of it backward, divided over layers by their operations.
"""

import numpy as np
from network_fusion import Step

SECONDS = {"ResNet50": 1 / 11, "ResNet101": 1 / 6.5, "VGG16": 1 / 7}
Layer = tuple[int, float]
"""Parameters, and multiplications for one image."""


def step_of(model: str) -> Step:
    """A step on one V100, by assumption."""
    layers = vgg16() if model == "VGG16" else resnet({"ResNet50": (3, 4, 6, 3), "ResNet101": (3, 4, 23, 3)}[model])
    sizes, work = np.array(layers, float).T[:, ::-1]
    batch = SECONDS[model]
    ready = batch / 3 + np.cumsum(work) / work.sum() * batch * 2 / 3
    ready[-1] = min(ready[-1], batch)
    return Step(np.minimum(ready, batch), 4 * sizes, batch, batch)


def vgg16() -> list[Layer]:
    """13 convolutions of 3 x 3 and 3 dense layers, with biases; 138,357,544 parameters."""
    layers, channels, side = list[Layer](), 3, 224
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append((9 * channels * width + width, 9.0 * channels * width * side**2))
            channels = width
        side //= 2
    return layers + [(n * m + m, float(n * m)) for n, m in ((512 * 49, 4096), (4096, 4096), (4096, 1000))]


def resnet(blocks: tuple[int, int, int, int]) -> list[Layer]:
    """Bottleneck blocks, batch norms with their convolutions; 25,557,032 parameters in ResNet50, 44,549,160 in 101."""
    layers = [(49 * 3 * 64 + 2 * 64, 49.0 * 3 * 64 * 112**2)]
    channels = 64
    for stage, count in enumerate(blocks):
        width, side = 64 * 2**stage, 56 // 2**stage
        for i in range(count):
            shapes = [(1, channels, width), (9, width, width), (1, width, 4 * width)]
            shapes += [(1, channels, 4 * width)] if i == 0 else []
            layers += [(k * a * b + 2 * b, float(k * a * b * side**2)) for k, a, b in shapes]
            channels = 4 * width
    return [*layers, (2048 * 1000 + 1000, 2048.0 * 1000)]
