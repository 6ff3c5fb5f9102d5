"""A node with a kernel for the processor is nine files: FILES, CHANGES and a test like this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FILES = {
    "nodes/multiple.py": '''
"""MXFP8Multiple: dequantize, times a number."""

from types import MappingProxyType
import numpy as np
from mxfp8_ops.function_body import Body
from mxfp8_ops.node import ELEMENTS, FLOAT, SCALES, Op, Port
from mxfp8_ops.nodes.quantize import dequantize


def multiple(elements: np.ndarray, scales: np.ndarray, *, times: float = 2.0) -> np.ndarray:
    return np.float32(times) * dequantize(elements, scales)


def _body(g: Body) -> None:
    g("Mul", g.values("elements", "scales", g.known("elements")), g.number("times"), out="Y")


MULTIPLE = Op(
    "MXFP8Multiple",
    (Port("elements", ELEMENTS, "[..., K]"), Port("scales", SCALES, "[..., ceil(K / 32)]")),
    (Port("Y", (FLOAT,), "shape of elements"),),
    MappingProxyType({"times": 2.0}),
    "times * MXFP8Dequantize.",
    _body,
)
OPS = (MULTIPLE,)
''',
    "src/cpu/multiple.h": """
#pragma once
#include "kernels/kernels.h"

namespace mxfp8 {

struct MultipleArgs {
  int format;
  const uint8_t* elements;
  const uint8_t* scales;
  int64_t rows, k;
  float times;
  float* y;
};

MXFP8_KERNEL(void, multiple, const MultipleArgs&, int64_t row_begin, int64_t row_end)

void multiple(const Kernels&, const Parallel&, const MultipleArgs&);

}  // namespace mxfp8
""",
    "src/cpu/kernels/quantize/multiple.cpp": """
#include "../../multiple.h"
#include "../common/codec.h"
#include "decode_row.h"

namespace mxfp8::MXFP8_ISA {

void multiple(const MultipleArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t blocks = (args.k + kBlock - 1) / kBlock;
  with_format(args.format, [&](auto format) {
    with_dtype(MXFP8_FLOAT32, [&](auto dtype) {
      for (int64_t row = row_begin; row < row_end; ++row) {
        auto* y = args.y + row * args.k;
        auto* stored = reinterpret_cast<typename decltype(dtype)::Storage*>(y);
        decode_row<decltype(format), decltype(dtype)>(args.elements + row * args.k, args.scales + row * blocks, args.k,
                                                      stored);
        for (int64_t i = 0; i < args.k; ++i) y[i] *= args.times;
      }
    });
  });
}

}  // namespace mxfp8::MXFP8_ISA
""",
    "src/cpu/multiple.cpp": """
#include "multiple.h"

#include "arguments.h"
#include "tasks.h"

namespace mxfp8 {

void multiple(const Kernels& kernels, const Parallel& parallel, const MultipleArgs& args) {
  if (args.rows == 0 || args.k == 0) return;
  for_equal_ranges(parallel, args.rows, args.k,
                   [&](int64_t, int64_t begin, int64_t end) { multiple_kernels[kernels.column](args, begin, end); });
}

}  // namespace mxfp8

using namespace mxfp8;

extern "C" int mxfp8_multiple(int element_format, const uint8_t* elements, const uint8_t* scales, int64_t rows,
                              int64_t k, float times, float* y, int threads) {
  return computed([&] {
    check_element_format("element_format", element_format);
    check_sizes({{"rows", rows}, {"k", k}});
    check_blocks(elements, scales, rows, k, 1);
    check_array(array("y", y, sizeof(float)), {rows, k});
    multiple(kernels_in_use(), checked_threads(threads), {element_format, elements, scales, rows, k, times, y});
  });
}
""",
    "src/ort/multiple.cpp": """
#include "../cpu/multiple.h"
#include "node_kernel.h"

namespace mxfp8::ort {
namespace {

struct Multiple final : Job {
  MultipleArgs args;
  explicit Multiple(const MultipleArgs& m) : args(m) {}

  void visit(Operands* operands) override {
    operands->in(&args.elements, args.rows * args.k);
    operands->in(&args.scales, args.rows * scale_count(args.k));
    operands->out(&args.y, args.rows * args.k * int64_t(sizeof(float)));
  }
  void run(const Kernels& kernels, const Parallel& parallel) const override { multiple(kernels, parallel, args); }
};

void infer(OrtShapeInferContext* context, const Node&, const Attributes&) {
  set_output(context, 0, MXFP8_FLOAT32, input_dims(context, 0));
}

void compute(const NodeKernel& kernel, OrtKernelContext* context) {
  const Tensor elements = input(context, 0), scales = input(context, 1);
  const int64_t axis = normalize_axis(kernel.where, -1, int64_t(elements.dims.size()));
  check_scales(kernel.where, "scales", elements, scales, axis);
  const int64_t k = elements.dims.back(), rows = product(elements.dims.begin(), elements.dims.end() - 1);
  auto* y = static_cast<float*>(output(context, 0, elements.dims));
  Multiple job({elements.dtype, static_cast<const uint8_t*>(elements.data), static_cast<const uint8_t*>(scales.data),
                rows, k, kernel.attributes.times, y});
  kernel.backend->run(context, &job);
}

}  // namespace

const Implemented kMultiple({Op::kMultiple}, {infer, compute, nullptr});

}  // namespace mxfp8::ort
""",
    "cpu/multiple.py": '''
"""MXFP8Multiple on NumPy arrays."""

import numpy as np
from mxfp8_ops import checks, formats, native
from mxfp8_ops.cpu.operands import array, contiguous, empty, thread_count


def multiple(elements, scales, *, times=2.0, threads=0):
    for name, operand in (("elements", elements), ("scales", scales)):
        array("multiple", name, operand)
    checks.check_codes("multiple", elements, scales, -1)
    elements, scales = contiguous("multiple", elements), contiguous("multiple", scales)
    y = empty("multiple", elements.shape, np.float32)
    k = elements.shape[-1]
    status = native.load().mxfp8_multiple(
        formats.element_format("e4m3").onnx_dtype, elements.ctypes.data, scales.ctypes.data,
        elements.size // max(k, 1), k, times, y.ctypes.data, thread_count("multiple", threads),
    )
    native.check("multiple", status)
    return y
''',
}
CHANGES = {
    "contract.py": [
        ("import attention, ", "import attention, multiple, "),
        ("fused_gemm, attention) for op in", "fused_gemm, attention, multiple) for op in"),
    ],
    "src/mxfp8_ops.h": [
        (
            "// Rows of the table b [V, D]",
            "// [rows, K]\n"
            "MXFP8_API int mxfp8_multiple(int element_format, const uint8_t* elements, const uint8_t* scales,\n"
            "    int64_t rows, int64_t k, float times, float* y, int threads);\n\n"
            "// Rows of the table b [V, D]",
        )
    ],
}

# Runs in a process of its own, on the changed package.
CHECK = """
import sys
sys.path[:0] = sys.argv[1:]
import numpy as np
from one_node import one_node_model, run
from mxfp8_ops import contract, cpu, numpy_nodes
from mxfp8_ops.cpu.multiple import multiple
from mxfp8_ops.nodes import multiple as node

pair = numpy_nodes.quantize(np.random.default_rng(0).standard_normal((5, 70)).astype(np.float32))
expected = node.multiple(*pair, times=3.0)
for isa in cpu.available_isas():
    with cpu.forced_isa(isa):
        np.testing.assert_array_equal(multiple(*pair, times=3.0), expected, err_msg=isa)
feeds = {"elements": (pair[0], contract.FLOAT8E4M3FN), "scales": (pair[1], contract.UINT8)}
model = one_node_model("MXFP8Multiple", feeds, {"Y": contract.FLOAT}, 21, {"times": 3.0})
for kernels in (False, True):
    np.testing.assert_array_equal(run(model, feeds, kernels=kernels)[0], expected, err_msg=f"{kernels=}")
print("equal on", len(cpu.available_isas()), "sets and in ONNX Runtime")
"""


@pytest.mark.slow
def test_its_kernels_run_on_every_instruction_set_and_in_onnx_runtime(tmp_path: Path) -> None:
    assert len(FILES) + len(CHANGES) == 8
    shutil.copytree(ROOT / "custom_ops", tmp_path / "custom_ops", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/node_contract.md", tmp_path / "docs")
    package = tmp_path / "custom_ops/mxfp8_ops"
    for name, text in FILES.items():
        (package / name).write_text(text.lstrip(), encoding="utf-8")
    for name, changes in CHANGES.items():
        text = (package / name).read_text(encoding="utf-8")
        for before, after in changes:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        (package / name).write_text(text, encoding="utf-8")

    # Without `site`, an editable install of the package does not come before its copy.
    folders = [str(package.parent), *(folder for folder in sys.path if folder.endswith("site-packages"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=package.parent, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    run(sys.executable, "-S", "generate.py")
    run("cmake", "-S", ".", "-B", "build", "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "--build", "build", "--parallel", "2")
    shutil.copy(tmp_path / "custom_ops/build/libmxfp8_ops.so", package)
    tests = str(ROOT / "tests"), str(ROOT / "tests/mxfp8_ops")
    assert "in ONNX Runtime" in run(sys.executable, "-S", "-c", CHECK, *tests)
