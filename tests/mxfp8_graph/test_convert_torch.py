"""What torch and torchao export, in every dialect and back: same bytes, same outputs."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import oracle
import pytest
from grids import looped
from test_convert import DIALECTS, LOSSES, codes_of, relative

import mxfp8_graph
from mxfp8_graph.policy.recipe import Recipe
from mxfp8_graph.running.inputs import make_inputs
from mxfp8_graph.running.runner import open_runnable
from mxfp8_graph.running.sessions import Session
from mxfp8_ops import numpy_nodes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
logging.getLogger("torchao").setLevel(logging.ERROR)

from onnx_exports import packed, program  # noqa: E402
from torch import nn  # noqa: E402

RECIPE = Recipe(name="outputs too", output_projections=True)


def there_and_back(model: Any, to: str) -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, int]]:
    there, report = mxfp8_graph.convert(model, to, allow=LOSSES.get(to, ()))
    back, _ = mxfp8_graph.convert(there, "mxfp8")
    return there, back, dict(report.losses)


def run(model: onnx.ModelProto | Path, x: np.ndarray, *, kernels: bool = True) -> np.ndarray:
    session = Session(model, kernels=kernels)
    name = (onnx.load(model, load_external_data=False) if isinstance(model, Path) else model).graph.input[0].name
    return next(iter(session.run({name: x}).values())).astype(np.float32)


# --- torchao ---------------------------------------------------------------------------------------------------------


class Between(nn.Module):
    """Two linears in bfloat16, as torchao wants them, between float32 values."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(160, 96, dtype=torch.bfloat16)
        self.down = nn.Linear(96, 224, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Any) -> Any:
        h = torch.relu(self.up(x.bfloat16()).float())
        return self.down(h.bfloat16()).float()


@pytest.fixture(scope="module")
def torchao() -> Any:
    """Returns a module whose weights torchao has packed, and which quantizes activations."""
    mx_formats = pytest.importorskip("torchao.prototype.mx_formats")
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    torch.manual_seed(0)
    module = Between().eval()
    quantize_(module, mx_formats.MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED))
    return module


X = torch.randn(5, 160, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def torchao_in_onnx(torchao: Any, tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    exported, _ = mxfp8_graph.rewrite(program(torchao, X, batch=False), RECIPE)
    return onnx.load(mxfp8_graph.to_onnx(exported, tmp_path_factory.mktemp("torchao") / "m.onnx"))


@looped("to", DIALECTS)
def test_torchaos_weights_in_every_dialect(torchao: Any, torchao_in_onnx: onnx.ModelProto, to: str) -> None:
    there, back, losses = there_and_back(torchao_in_onnx, to)
    weights = mxfp8_graph.unpack(back)
    for name in ("up", "down"):
        theirs = getattr(torchao, name).weight
        np.testing.assert_array_equal(weights[f"{name}.weight"].elements, theirs.qdata.view(torch.uint8).numpy())
        values = theirs.dequantize(torch.float32).numpy()
        ours = weights[f"{name}.weight"]
        np.testing.assert_array_equal(numpy_nodes.dequantize(ours.elements, ours.scales), values)
    with torch.no_grad():
        expected = torchao(X).numpy()
    # Two results rounded to bfloat16 (2^-9 each), of which the first moves E4M3 roundings of the second's input; and
    # without quantized activations, what their rounding (2^-4 at most, relative to a value) changes.
    limit = 0.05 if losses else 0.01
    assert relative(run(back, X.numpy()), expected) < limit
    if to in {"qdq", "standard"}:
        assert relative(run(there, X.numpy(), kernels=False), expected) < limit


# --- Rewritten programs ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of a transformer: attention, and a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.norm, self.gate, self.up, self.down = nn.RMSNorm(64), *(nn.Linear(64, 96) for _ in "gu"), nn.Linear(96, 64)

    def forward(self, x: Any) -> Any:
        q, k, v = (each(x).unflatten(-1, (4, 16)).transpose(1, 2) for each in (self.q, self.k, self.v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@looped("recipe", ["mxfp8", "mxfp8-weight-only"])
def test_rewritten_programs_in_every_dialect(recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 64)
    block = Block()
    rewritten = onnx.load(mxfp8_graph.to_onnx(packed(block, x, recipe=recipe), tmp_path / f"{recipe}.onnx"))
    expected = run(rewritten, x.numpy())
    for to in DIALECTS:
        there, back, losses = there_and_back(rewritten, to)
        assert codes_of(back) == codes_of(rewritten), to
        limit = 0.05 if losses else 1e-2
        assert relative(run(back, x.numpy()), expected) < limit, to
        if to in {"qdq", "standard"}:
            assert relative(run(there, x.numpy(), kernels=False), expected) < limit, to
        with torch.no_grad():
            assert relative(run(back, x.numpy()), block(x).numpy()) < 0.05, to


# --- A decoder -------------------------------------------------------------------------------------------------------


def llama(folder: Path, **sizes: int) -> Path:
    """Writes a Llama of random weights with its cache as inputs and outputs, by torch's exporter."""
    transformers = pytest.importorskip("transformers")
    layers, heads, size = sizes["num_hidden_layers"], sizes["num_key_value_heads"], sizes["head_dim"]

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()

        def forward(self, ids: Any, *past: Any) -> tuple[Any, ...]:
            cache = transformers.DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
            result = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            return (result.logits, *(t for layer in result.past_key_values.layers for t in (layer.keys, layer.values)))

    past = tuple(torch.randn(1, heads, 6, size) for _ in range(2 * layers))
    shapes = ({1: "tokens"}, *({2: "past"},) * len(past))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(
            Cached(),
            (torch.ones(1, 4, dtype=torch.int64), *past),
            dynamo=True,
            verbose=False,
            opset_version=23,
            dynamic_shapes=(shapes[0], shapes[1:]),
        )
    exported.save(folder / "llama.onnx", external_data=True)
    return folder / "llama.onnx"


def check_decoder(path: Path, folder: Path) -> None:
    """Checks each dialect and back: bytes, nodes, outputs."""
    rewritten, _ = mxfp8_graph.rewrite(path, output=folder / "rewritten.onnx")
    kinds = oracle.kinds(onnx.load(rewritten, load_external_data=False))
    codes = codes_of(rewritten)
    feeds = make_inputs(open_runnable(rewritten)[0])
    expected = Session(rewritten, kernels=True).run(feeds)
    for to in DIALECTS:
        there, report = mxfp8_graph.convert(rewritten, to, output=folder / f"{to}.onnx", allow=LOSSES.get(to, ()))
        back, _ = mxfp8_graph.convert(there, "mxfp8", output=folder / f"{to}.back.onnx")
        assert codes_of(back) == codes
        actual = Session(back, kernels=True).run(feeds)
        if not report.losses:
            assert oracle.kinds(onnx.load(back, load_external_data=False)) == kinds
        for name, values in expected.items():
            if report.losses:  # what quantizing activations changes, layer after layer
                assert relative(actual[name], values) < 0.15, (to, name)
            else:
                np.testing.assert_array_equal(actual[name], values, err_msg=f"{to} {name}")


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "layers", "vocabulary"), [(SMALL, 2, 99), (LARGE, 12, 8192)], ids=["small", "150 million parameters"]
)
def test_a_decoder_comes_back_as_it_was(sizes: Any, layers: int, vocabulary: int, tmp_path: Path) -> None:
    check_decoder(llama(tmp_path, **sizes, num_hidden_layers=layers, vocab_size=vocabulary), tmp_path)
