"""Fine-tunes a pre-trained model twice, in float32 and in MXFP8, on the same batches, and packs the second.

The task it learned is reading digits; the task it is given is reading digits turned by 90 degrees. Three starts, since
two runs that differ in the last bit of one product already end a few images apart.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import digits
import matplotlib
import torch
from torch import Tensor, nn

import mxfp8_graph

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH = 64
PRE_TRAINING, FINE_TUNING = 6, 12
"""Epochs."""
STARTS = 3
MAX_DIFFERENCE = 0.5
"""Points of accuracy between float32 and MXFP8, both the mean of all starts."""

Data = tuple[Tensor, Tensor, Tensor, Tensor]
Curves = dict[str, tuple[list[float], list[float]]]
"""Loss of every step and accuracy after every epoch, by number format."""


def accuracy(module: Any, data: Data) -> float:
    """Returns the percentage of test digits that `module` reads right."""
    with torch.no_grad():
        return 100 * (module(data[2]).argmax(1) == data[3]).float().mean().item()


def train(module: Any, data: Data, epochs: int, rate: float) -> tuple[list[float], list[float]]:
    """Returns the loss of every step and the accuracy after every epoch. The batches are the same at every call."""
    images, labels, *_ = data
    shuffle = torch.Generator().manual_seed(0)
    steps = len(images) // BATCH
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * steps)
    losses, accuracies = [], []
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=shuffle)
        for batch in order[: steps * BATCH].reshape(steps, BATCH):
            loss = nn.functional.cross_entropy(module(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        accuracies.append(accuracy(module, data))
    return losses, accuracies


def gradients(module: Any, data: Data) -> dict[str, Tensor]:
    """Returns the gradient of every weight matrix on the first batch."""
    nn.functional.cross_entropy(module(data[0][:BATCH]), data[1][:BATCH]).backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None and p.dim() == 2}
    module.zero_grad()
    return found


def compare_gradients(model: nn.Module, data: Data) -> None:
    """Prints how far MXFP8's gradients are from float32's, layer by layer: E4M3 everywhere, and E5M2 for gradients."""
    exact = gradients(export(model, data).module(), data)
    print("gradients of the first batch, relative L2 distance from float32's:  E4M3  HYBRID")
    recipes = [mxfp8_graph.Recipe(fp8_format=name) for name in ("E4M3", "HYBRID")]
    found = [gradients(mxfp8_graph.rewrite(export(model, data), r, training=True)[0].module(), data) for r in recipes]
    for name, wanted in exact.items():
        distances = [((each[name] - wanted).norm() / wanted.norm()).item() for each in found]
        print(f"         {name:55} {distances[0]:9.3f} {distances[1]:7.3f}")


def export(model: nn.Module, data: Data) -> torch.export.ExportedProgram:
    """Returns the model, copied first: a program shares its parameters with the module it comes from."""
    dynamic = ({0: torch.export.Dim("batch", min=2)},)
    return torch.export.export(copy.deepcopy(model), (data[0][:BATCH],), dynamic_shapes=dynamic)


def plot(path: Path, curves: Curves) -> None:
    """Draws losses and accuracies of both formats."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for (name, (losses, accuracies)), style in zip(curves.items(), ("-", "--"), strict=True):
        left.plot(losses, style, label=name, linewidth=1.2)
        right.plot(range(1, len(accuracies) + 1), accuracies, style, label=name, marker="o", markersize=3)
    left.set(xlabel="step", ylabel="training loss", yscale="log", title="Loss")
    right.set(xlabel="epoch", ylabel="% of test images read", title="Accuracy")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def finetune(start: int, upright: Data, turned: Data) -> tuple[Curves, torch.export.ExportedProgram]:
    """Returns how both went, and the packed program."""
    torch.manual_seed(start)
    model = digits.Reader()
    train(model, upright, PRE_TRAINING, 3e-3)
    before = accuracy(model, upright), accuracy(model, turned)
    print(f"start {start}: pre-trained    {before[0]:5.1f} % of upright digits, {before[1]:.1f} % of turned ones")

    if start == 0:
        compare_gradients(model, turned)
    plain = export(model, turned)
    program, _ = mxfp8_graph.rewrite(export(model, turned), training=True)
    curves = {
        "float32": train(plain.module(), turned, FINE_TUNING, 2e-3),
        "MXFP8": train(program.module(), turned, FINE_TUNING, 2e-3),
    }
    for name, (losses, accuracies) in curves.items():
        print(f"         {name:14} {accuracies[-1]:5.1f} % of turned digits, loss {sum(losses[-5:]) / 5:.3f}")
    packed, report = mxfp8_graph.rewrite(program)  # the weights that were trained
    result = accuracy(packed.module(), turned)
    sizes = f"{report.bytes_before / 1e3:.0f} -> {report.bytes_after / 1e3:.0f} kB"
    print(f"         packed         {result:5.1f} % of turned digits, {len(report.rewritten)} linears, {sizes}")
    curves["MXFP8"][1][-1] = result  # the comparison at the end is of the model that would be shipped
    return curves, packed


def main() -> int:
    """Fine-tunes from every start and returns 1 if the mean accuracies are too far apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where the plot and the program go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the model is too small to gain from more

    upright, turned = digits.load(turned=False), digits.load(turned=True)
    results = [finetune(start, upright, turned) for start in range(STARTS)]
    curves, packed = results[0]
    plot(folder / "finetune.png", curves)
    mxfp8_graph.save(packed, folder / "digits.mxfp8.pt2", overwrite=True)
    print(f"wrote    {folder / 'finetune.png'}, {folder / 'digits.mxfp8.pt2'}")

    means = {name: sum(c[name][1][-1] for c, _ in results) / STARTS for name in curves}
    difference = means["MXFP8"] - means["float32"]
    summary = ", ".join(f"{name} {mean:.2f} %" for name, mean in means.items())
    print(f"means    {summary}: {difference:+.2f} points; at most {MAX_DIFFERENCE} apart is expected")
    return int(abs(difference) > MAX_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
