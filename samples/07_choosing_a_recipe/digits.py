"""Writes a model that reads scikit-learn's handwritten digits, its inputs, and has a metric for `mxfp8-graph compare`.

`accuracy` knows the labels, which are not in the output of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier


def data() -> list[np.ndarray]:
    """Returns (training images, test images, training labels, test labels); images as [count, 64] float32."""
    images, labels = load_digits(return_X_y=True)
    return train_test_split(images.astype(np.float32) / 16, labels, test_size=0.5, random_state=0, stratify=labels)


def accuracy(original: Mapping[str, np.ndarray], rewritten: Mapping[str, np.ndarray]) -> float:
    """Returns how many of the test images the rewritten model reads right, in percent."""
    return float(100 * np.mean(rewritten["scores"].argmax(-1) == data()[3]))


accuracy.higher_is_better = True


def write(path: Path, classifier: MLPClassifier) -> None:
    """Writes the trained classifier as ONNX."""
    nodes, tensors, current = [], [], "images"
    layers = list(zip(classifier.coefs_, classifier.intercepts_, strict=True))
    for number, (weight, bias) in enumerate(layers):
        last = number == len(layers) - 1
        tensors.append(numpy_helper.from_array(weight.astype(np.float32), f"weight{number}"))
        tensors.append(numpy_helper.from_array(bias.astype(np.float32), f"bias{number}"))
        result = "scores" if last else f"sum{number}"
        nodes.append(
            helper.make_node("Gemm", [current, f"weight{number}", f"bias{number}"], [result], f"layer{number}")
        )
        if not last:
            current = f"hidden{number}"
            nodes.append(helper.make_node("Relu", [result], [current]))
    images = helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["batch", 64])
    scores = helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, ["batch", 10])
    graph = helper.make_graph(nodes, "digits", [images], [scores], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def main() -> None:
    """Trains, writes digits.onnx, and the test images: all as one sample in all.npz, ten as samples in ten/."""
    train_images, test_images, train_labels, test_labels = data()
    classifier = MLPClassifier((128, 128), max_iter=60, random_state=0, tol=0).fit(train_images, train_labels)
    write(Path("digits.onnx"), classifier)
    np.savez("all.npz", images=test_images)
    Path("ten").mkdir(exist_ok=True)
    for number, image in enumerate(test_images[:10]):
        np.savez(f"ten/{number}.npz", images=image[None])
    print(f"digits.onnx reads {100 * classifier.score(test_images, test_labels):.2f} % of the test images right")


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # that training stops before it has converged
    main()
