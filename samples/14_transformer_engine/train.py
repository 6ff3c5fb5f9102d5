"""Trains a small transformer of TransformerEngine's layers three times, and writes the two that are in MXFP8 as ONNX.

The task is scikit-learn's handwritten digits; a row of pixels is a token. The runs are: float32; MXFP8 with float32
weights; MXFP8 with weights in MXFP8 only. All three have the same first weights and the same batches.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import mxfp8_graph
from mxfp8_graph import te
from mxfp8_graph.te import recipe
from mxfp8_ops import ort

SIZE, WIDTH, HEADS, BATCH, STEPS = 8, 64, 4, 32, 250
RUNS = {"float32": (False, False), "MXFP8": (True, False), "MXFP8 only": (True, True)}
"""Name -> whether products are in MXFP8, whether weights are stored in MXFP8 only."""
MAX_DIFFERENCE = 0.05
"""Relative, of the mean losses in MXFP8 and in float32."""
# fuse=False is for the ONNX files. A fused attention rounds q, k and v to bfloat16, but the attention of the model is
# in float32, and the outputs are compared.
MXFP8 = recipe.MXFP8BlockScaling(fuse=False)


class Block(nn.Module):
    """Attention and a feed-forward network, both behind a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = te.Linear(WIDTH, 3 * WIDTH), te.Linear(WIDTH, WIDTH)
        self.up, self.down = te.Linear(WIDTH, 4 * WIDTH), te.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, tokens, width]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Reader(nn.Module):
    """[batch, 8, 8] pixels -> [batch, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        # Layers of torch.nn: the paper keeps the embedding and the output projection in high precision. `rewrite` packs
        # the layers of te, and no others.
        self.embed, self.head = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, 10)
        self.places = nn.Parameter(torch.zeros(SIZE, WIDTH))
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        """Returns [batch, 10]."""
        return self.head(self.norm(self.blocks(self.embed(images) + self.places).mean(1)))


def weights(model: nn.Module) -> dict[str, Any]:
    """Returns the weights of the layers of `te` by name."""
    return {f"{name}.weight": each.weight for name, each in model.named_modules() if isinstance(each, te.Linear)}


def train(images: Tensor, labels: Tensor, *, mxfp8: bool, only: bool) -> tuple[Reader, float]:
    """Returns the trained model and the mean loss; see `RUNS`."""
    torch.manual_seed(0)
    # The initial values are kept, so that the optimizer begins with the float32 weights of the other runs.
    with te.quantized_model_init(enabled=only, recipe=MXFP8, preserve_high_precision_init_val=True):
        model = Reader()
    optimizer = torch.optim.AdamW(te.master_weights(model), lr=2e-3)
    for weight in weights(model).values() if only else ():
        weight.clear_high_precision_init_val()  # the optimizer has copies
    total = 0.0
    for _ in range(STEPS):
        batch = torch.randint(len(images), (BATCH,))
        with te.autocast(enabled=mxfp8, recipe=MXFP8):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return model.eval(), total / STEPS


def export(model: Reader, images: Tensor, path: Path) -> list[str]:
    """Writes the model as ONNX, compares the bytes and the outputs, and returns what is wrong."""
    with torch.no_grad(), te.autocast(recipe=MXFP8):
        program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
        expected = model(images)
    packed, report = mxfp8_graph.rewrite(program, MXFP8)
    quantizer = te.MXFP8Quantizer(columnwise=False)  # a product of inference reads rows only
    codes = {name: quantizer(weight).state_dict() for name, weight in weights(model).items()}
    wanted = {f"{name}_{kind}": code for name, kinds in codes.items() for kind, code in kinds.items()}
    found = {name: tensor for name, tensor in packed.state_dict.items() if "_mxfp8" in name}
    same_bytes = found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)

    # If weights are in MXFP8 only, torch.export gives a rewritten program, and `rewrite` is not needed.
    source = program if report.already_rewritten else packed
    mxfp8_graph.to_onnx(source, path, overwrite=True, input_names=["images"], output_names=["logits"])
    logits = torch.from_numpy(ort.session(path).run(["logits"], {"images": images.numpy()})[0])
    same_classes = torch.equal(logits.argmax(1), expected.argmax(1))
    difference, greatest = (logits - expected).abs().max(), expected.abs().max()
    print(f"{path}: already rewritten {report.already_rewritten}, same bytes {same_bytes}, same classes {same_classes}")
    print(f"  greatest difference of a logit {difference:.1e}, greatest logit {greatest:.1f}")
    checks = {"packed bytes": same_bytes, "predicted classes": same_classes}
    return [f"{path}: the {what} differ from the model's" for what, same in checks.items() if not same]


def main() -> None:
    """Trains, exports and compares; the exit status is 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where the ONNX files go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the model is too small to gain from more
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    x, test_x = (images.float().view(-1, SIZE, SIZE) / 16).split(1200)
    y, test_y = labels.split(1200)

    models, means, wrong = {}, {}, []
    for name, (mxfp8, only) in RUNS.items():
        model, mean = models[name], means[name] = train(x, y, mxfp8=mxfp8, only=only)
        with torch.no_grad(), te.autocast(enabled=mxfp8, recipe=MXFP8):
            accuracy = (model(test_x).argmax(1) == test_y).float().mean()
        size = sum(weight.nbytes for weight in weights(model).values())
        print(f"{name:10}  mean loss {mean:.4f}, {accuracy:.1%} of test images, te weights of {size} bytes")
        if not abs(mean / means["float32"] - 1) <= MAX_DIFFERENCE:  # a NaN is wrong too
            wrong.append(f"{name}: the mean loss is more than {MAX_DIFFERENCE:.0%} from float32's")
    wrong += export(models["MXFP8"], test_x, folder / "digits.onnx")
    wrong += export(models["MXFP8 only"], test_x, folder / "digits.only.onnx")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
