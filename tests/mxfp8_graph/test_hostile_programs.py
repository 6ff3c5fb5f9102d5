"""Crafted .pt2 files: none runs code, reads a file or takes the memory, and each is refused with what to do."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run
from grids import looped
from hostile_programs import CONSTANTS, PROGRAM, SAMPLES, WEIGHTS, edited, plainly_touching, records, touching, write

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_programs import DYNAMIC, export, values  # noqa: E402

import mxfp8_graph  # noqa: E402
from mxfp8_ops.errors import ContractError  # noqa: E402


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        return {"y": x + self.down(torch.relu(self.up(x))) * scale}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = export(Model(), values(5, 64), scale=torch.ones(1), dynamic={"x": {0: DYNAMIC}, "scale": None})
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    torch.export.save(program, path)
    return path


def nodes(program: Any) -> Any:
    return program["graph_module"]["graph"]["nodes"]


def signature(program: Any) -> Any:
    return program["graph_module"]["module_call_graph"][0]["signature"]


def linear(program: Any) -> Any:
    return next(node for node in nodes(program) if "linear" in node["target"])


def everywhere(value: Any, old: str, new: str) -> Any:
    """Returns JSON with one text replaced wherever it stands."""
    if isinstance(value, dict):
        return {everywhere(key, old, new): everywhere(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [everywhere(item, old, new) for item in value]
    return new if value == old else value


def in_tree(program: Any, spec: str, edit: Callable[[Any], object]) -> None:
    """Edits what says how arguments or results are nested."""
    tree = json.loads(signature(program)[spec])
    edit(tree[1])
    signature(program)[spec] = json.dumps(tree)


def in_expression(program: Any, code: str) -> None:
    sizes = program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
    sizes[0]["as_expr"]["expr_str"] = code


def in_target(program: Any, code: str) -> None:
    """Calls what the program runs: torch's attributes lead everywhere."""
    linear(program)["target"] = "torch.os.system"
    linear(program)["inputs"] = [{"name": "", "arg": {"as_string": f'python -c "{code}"'}, "kind": 1}]


def in_operator(program: Any, code: str) -> None:
    linear(program)["inputs"].append({"name": "op", "arg": {"as_operator": "torch.os.system"}, "kind": 2})


def in_default_factory(program: Any, code: str) -> None:
    context = {"default_factory_module": "payload", "default_factory_name": "x", "dict_context": ["y"]}
    in_tree(program, "out_spec", lambda tree: tree.update(type="collections.defaultdict", context=context))


def in_constant_input(program: Any, code: str) -> None:
    program["graph_module"]["graph"]["inputs"][-1] = {"as_string": f"' or {code} or '"}


ENUM = json.dumps([{"__enum__": True, "fqn": "payload:X", "name": "y"}])
IN_PROGRAM: dict[str, Callable[[Any, str], object]] = {
    "the name of x": lambda program, code: program.update(everywhere(program, "x", f"x={code}")),
    "the name of linear": lambda program, code: program.update(everywhere(program, "linear", f"x={code}")),
    "the name of scale": lambda program, code: program.update(everywhere(program, "scale", f"x={code}")),
    "the name of a parameter": lambda program, code: program.update(
        everywhere(program, "up.weight", f'up", {code}, "')
    ),
    "an expression": in_expression,
    "guards": lambda program, code: program.update(guards_code=[f"{code} is None"]),
    "a target": in_target,
    "an operator": in_operator,
    "a method in place of an op": lambda program, code: linear(program)["inputs"].append(
        {"name": "op", "arg": {"as_operator": "torch.ops.__class__.load_library"}, "kind": 2}
    ),
    "a key in guards": lambda program, code: program.update(guards_code=[f"True or L[''' + {code} + ''']"]),
    "text in guards": lambda program, code: program.update(guards_code=[f"True or int(''' + {code} + ''')"]),
    "text that sympy evaluates": lambda program, code: in_expression(program, "Max('abs' + '.' + '__self__', 1)"),
    "a keyword": lambda program, code: in_tree(
        program, "in_spec", lambda tree: tree["children_spec"][1].update(context=json.dumps([f"scale=({code})"]))
    ),
    "argument names": lambda program, code: signature(program).update(forward_arg_names=[f"x={code}", "scale"]),
    "a default factory": in_default_factory,
    "an enum": lambda program, code: in_tree(program, "out_spec", lambda tree: tree.update(context=ENUM)),
    "a constant input": in_constant_input,
    "an op that reads files": lambda program, code: linear(program).update(target="torch.ops.aten.from_file.default"),
}


@looped("place", IN_PROGRAM)
def test_text_of_a_program_is_no_code(
    place: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "payload.py").write_text(f"open({str(proof)!r}, 'w')\nx = list\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = edited(source, tmp_path / "bad.pt2", lambda program: IN_PROGRAM[place](program, f"open({str(proof)!r},'w')"))
    with pytest.raises(ContractError, match=r"in its program .*trust_pickle=True, which lets it run code"):
        mxfp8_graph.load(path)
    assert not proof.exists()


def weights_as_pickle(content: dict[str, bytes], proof: Path) -> None:
    config = json.loads(content[WEIGHTS])
    config["config"]["up.bias"] |= {"use_pickle": True, "path_name": "bad"}
    content |= {WEIGHTS: json.dumps(config).encode(), "data/weights/bad": touching(proof)}


def constants_of(name: str) -> Callable[[dict[str, bytes], Path], None]:
    def edit(content: dict[str, bytes], proof: Path) -> None:
        meta = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
        content[CONSTANTS] = json.dumps({"config": {"c": meta}}).encode()
        content[f"data/constants/{name}"] = (touching if name.startswith("tensor") else plainly_touching)(proof)

    return edit


IN_PICKLES: dict[str, Callable[[dict[str, bytes], Path], None]] = {
    "samples": lambda content, proof: content.update({SAMPLES: touching(proof)}),
    "plain samples": lambda content, proof: content.update({SAMPLES: plainly_touching(proof)}),
    "weights": weights_as_pickle,
    "old weights": lambda content, proof: content.update({"data/weights/model.pt": touching(proof)}),
    "old constants": lambda content, proof: content.update({"data/constants/model.pt": touching(proof)}),
    "constants": constants_of("tensor_0"),
    "custom objects": constants_of("custom_obj_0"),
    "opaque objects": constants_of("opaque_obj_0"),
}


@looped("place", IN_PICKLES)
def test_pickles_run_nothing(place: str, source: Path, tmp_path: Path) -> None:
    proof, content = tmp_path / "proof", records(source)
    IN_PICKLES[place](content, proof)
    path = write(tmp_path / "bad.pt2", content)
    with pytest.raises(ContractError, match=r"bad\.pt2: .*trust_pickle=True"):
        mxfp8_graph.load(path)
    assert not proof.exists()


def test_every_reader_refuses_pickles_and_a_trusted_file_runs_code(source: Path, tmp_path: Path) -> None:
    proof, content = tmp_path / "proof", records(source)
    IN_PICKLES["samples"](content, proof)
    path = str(write(tmp_path / "bad.pt2", content))
    for read in (mxfp8_graph.unpack, lambda path: mxfp8_graph.to_onnx(path, tmp_path / "m.onnx")):
        with pytest.raises(ContractError, match=r"bad\.pt2: .*trust_pickle=True"):
            read(path)
    for command in (("rewrite", path, "--dry-run"), ("run", path), ("verify", path, path)):
        result = run(*command)
        assert result.exit_code == 2, result.output
        assert "pass --trust-pickle, which lets it run code" in result.output
    assert not proof.exists()
    run("rewrite", path, "--dry-run", "--trust-pickle")
    assert proof.exists()


def test_compiled_libraries_are_not_loaded_and_the_environment_stays(source: Path, tmp_path: Path) -> None:
    libraries = {"data/aotinductor/model/x.so": b"\x7fELF", "data/aotinductor/model/x_metadata.json": b"{}"}
    before = dict(os.environ)
    program = mxfp8_graph.load(write(tmp_path / "compiled.pt2", records(source) | libraries))
    assert "up.weight" in program.state_dict
    assert dict(os.environ) == before


@looped(
    "name, data, message",
    [
        ("data/weights/padding", bytes(300 * 2**20), "bytes that unpack to"),
        (PROGRAM, b" " * 200 * 2**20, "bytes that unpack to"),
        (PROGRAM, b"[" * 1_000_000, "is nested too deeply"),
        (PROGRAM, b"[]", "cannot read the program"),
        (PROGRAM, b"\xff", "is not JSON"),
        (WEIGHTS, b'{"config": []}', "cannot read the program"),
        ("extra/mxfp8_graph.json", b"[]", "is of another kind"),
        ("extra/mxfp8_graph.json", b'{"mxfp8_graph.modules": [1]}', "is of another kind"),
        ("extra/mxfp8_graph.json", b'{"mxfp8_graph.contract_version": "x"}', "node contract 'x'"),
        ("extra/mxfp8_graph.json", b'{"mxfp8_graph.contract_version": [1]}', "node contract"),
        ("../outside", b"x", "a record named"),
        ("archive_version", b"9", "archive_version b'9'; expected b'0'"),
        (SAMPLES, b"PK\x03\x04", "damaged"),
        ("data/weights/weight_0", b"123", "does not divide"),
        ("data/weights/weight_0", b"", "expected as many as its shape takes"),
    ],
)
def test_archives_that_are_not_programs(name: str, data: bytes, message: str, source: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.pt2", records(source) | {name: data}, compress=True)
    with pytest.raises(ContractError, match=message) as caught:
        mxfp8_graph.load(path)
    assert str(path) in str(caught.value)


def test_records_of_the_same_name(source: Path, tmp_path: Path) -> None:
    write(tmp_path / "bad.pt2", records(source))
    with zipfile.ZipFile(tmp_path / "bad.pt2", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(f"model/{PROGRAM}", b"{}")
    with pytest.raises(ContractError, match=r"\d+ records under \d+ names"):
        mxfp8_graph.load(tmp_path / "bad.pt2")


LONG = [
    *("Pow(9, Pow(9, 9))", "9**9**9", "LShift(1, 10**9)", "factorial(10**9)", "Max('9**9**9', 1)", "a counter"),
    *("Integer(2) ** Rational(1, 1e-9)", "Max('ZZ', 1)", "Tuple('ZZ')[0].pow(10, 10000000000)"),
    *("(1,) * 3000000000", "ExprCondPair(1, True) * 3000000000", "'a' * 9000000000"),
    *("Float('0.1', precision=3000000000)", "Float('0.1', 3000000000)"),
]


@looped("expression", LONG)
def test_numbers_that_torch_would_compute_without_end(expression: str, source: Path, tmp_path: Path) -> None:
    def edit(program: Any) -> None:
        if expression == "a counter":
            program["range_constraints"]["u99999999999"] = {"min_val": 0, "max_val": 1}
        else:
            in_expression(program, expression)

    message = "torch counts up to it, one by one" if expression == "a counter" else "in its program"
    with pytest.raises(ContractError, match=message):
        mxfp8_graph.load(edited(source, tmp_path / "bad.pt2", edit))


def test_tensors_that_are_not_what_the_graph_says(source: Path, tmp_path: Path) -> None:
    def edit(config: Any) -> None:
        layout = config["config"]["up.weight"]["tensor_meta"]
        layout["sizes"], layout["strides"] = [{"as_int": 64}, {"as_int": 96}], [{"as_int": 96}, {"as_int": 1}]

    path = edited(source, tmp_path / "bad.pt2", edit, WEIGHTS)
    with pytest.raises(
        ContractError, match=r"'up.weight' is torch.float32 \[64, 96\]; expected torch.float32 \[96, 64\]"
    ):
        mxfp8_graph.load(path)


def test_modules_that_a_file_names_are_not_imported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "payload.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = {"mxfp8_graph.modules": ["payload", "torch.payload", "transformers.payload", "transformers..payload"]}
    content = records(source) | {"extra/mxfp8_graph.json": json.dumps(entries).encode()}
    mxfp8_graph.load(write(tmp_path / "model.pt2", content))
    assert not (tmp_path / "proof").exists()
