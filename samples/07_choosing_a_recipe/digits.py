"""Writes a model that reads scikit-learn's handwritten digits, and has the functions that `mxfp8-graph compare` calls.

`samples` yields inputs, and `accuracy` is a metric that knows the labels, which are not in the output of a model.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
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


def samples() -> Iterator[dict[str, np.ndarray]]:
    """Yields all test images as one sample, so that `accuracy` has one value for all of them."""
    yield {"images": data()[1]}


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
    """Trains, writes digits.onnx, and ten test images as digits.jsonl."""
    train_images, test_images, train_labels, test_labels = data()
    classifier = MLPClassifier((128, 128), max_iter=60, random_state=0, tol=0).fit(train_images, train_labels)
    write(Path("digits.onnx"), classifier)
    lines = (json.dumps({"images": image[None].tolist()}) for image in itertools.islice(test_images, 10))
    Path("digits.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"digits.onnx reads {100 * classifier.score(test_images, test_labels):.2f} % of the test images right")


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # that training stops before it has converged
    main()
