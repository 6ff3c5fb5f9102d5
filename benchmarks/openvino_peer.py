"""OpenVINO as a peer; see peers.py. Needs `pip install openvino nncf`, in this environment or another.

Settings: "model", an ONNX file; "precision", "f32" or "bf16", that of its sums; "weights", their format by NNCF
("as they are", "int8" with a scale per output channel, "mxfp8" with one per 32 values); "threads"; optionally
"calibration", an .npz per input, with which NNCF quantizes weights and activations to int8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
from peers import Feeds, serve


class OpenVino:
    """A model compiled for the processor."""

    version = openvino.__version__

    def __init__(self, settings: dict[str, Any]) -> None:
        core = openvino.Core()
        model = core.read_model(settings["model"])
        if settings["weights"] != "as they are":
            import nncf

            mode = {"int8": "INT8_SYM", "mxfp8": "MXFP8_E4M3"}[settings["weights"]]
            extra: dict[str, Any] = {}
            if settings["weights"] == "mxfp8":  # a convolution has no single axis to put blocks on
                convolutions = nncf.IgnoredScope(types=["Convolution"], validate=False)
                extra = {"group_size": 32, "all_layers": False, "ignored_scope": convolutions}
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode[mode], **extra)
        if "calibration" in settings:
            import nncf

            samples = [dict(np.load(path)) for path in settings["calibration"]]
            preset = nncf.QuantizationPreset.MIXED  # NNCF's advice where activations are not Relu
            model = nncf.quantize(model, nncf.Dataset(samples), subset_size=len(samples), preset=preset)
        wanted = {"INFERENCE_PRECISION_HINT": settings["precision"], "INFERENCE_NUM_THREADS": settings["threads"]}
        self._request = core.compile_model(model, "CPU", wanted).create_infer_request()
        self._names = {name for port in model.inputs for name in port.names}
        self._feeds: Feeds = {}

    def feed(self, feeds: Feeds) -> None:
        """Takes the inputs."""
        self._feeds = {name: value for name, value in feeds.items() if name in self._names}

    def run(self) -> None:
        """Infers once, without copies of inputs or outputs."""
        self._request.infer(self._feeds, share_inputs=True, share_outputs=True)

    def output(self) -> np.ndarray:
        """Returns the first output."""
        return np.array(self._request.get_output_tensor(0).data)


if __name__ == "__main__":
    serve(OpenVino)
