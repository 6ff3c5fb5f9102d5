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


def rename(old: str) -> Callable[[Any, str], None]:
    return lambda program, code: program.update(everywhere(program, old, f"x={code}"))


def in_expression(program: Any, code: str) -> None:
    sizes = program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
    sizes[0]["as_expr"]["expr_str"] = code


def in_guards(program: Any, code: str) -> None:
    program["guards_code"] = [f"{code} is None"]


def in_target(program: Any, code: str) -> None:
    """Calls what the program runs: torch's attributes lead everywhere."""
    linear(program)["target"] = "torch.os.system"
    linear(program)["inputs"] = [{"name": "", "arg": {"as_string": f'python -c "{code}"'}, "kind": 1}]


def in_operator(program: Any, code: str) -> None:
    linear(program)["inputs"].append({"name": "op", "arg": {"as_operator": "torch.os.system"}, "kind": 2})


def in_keyword(program: Any, code: str) -> None:
    tree = json.loads(signature(program)["in_spec"])
    tree[1]["children_spec"][1]["context"] = json.dumps([f"scale=({code})"])
    signature(program)["in_spec"] = json.dumps(tree)


def in_argument_names(program: Any, code: str) -> None:
    signature(program)["forward_arg_names"] = [f"x={code}", "scale"]


def in_parameter_name(program: Any, code: str) -> None:
    program.update(everywhere(program, "up.weight", f'up", {code}, "'))


def in_default_factory(program: Any, code: str) -> None:
    context = {"default_factory_module": "payload", "default_factory_name": "x", "dict_context": ["y"]}
    tree = json.loads(signature(program)["out_spec"])
    tree[1] |= {"type": "collections.defaultdict", "context": context}
    signature(program)["out_spec"] = json.dumps(tree)


def in_enum(program: Any, code: str) -> None:
    tree = json.loads(signature(program)["out_spec"])
    tree[1]["context"] = json.dumps([{"__enum__": True, "fqn": "payload:X", "name": "y"}])
    signature(program)["out_spec"] = json.dumps(tree)


def in_constant_input(program: Any, code: str) -> None:
    program["graph_module"]["graph"]["inputs"][-1] = {"as_string": f"' or {code} or '"}


def in_file_op(program: Any, code: str) -> None:
    linear(program)["target"] = "torch.ops.aten.from_file.default"


IN_PROGRAM = (
    rename("x"),
    rename("linear"),
    rename("scale"),
    in_expression,
    in_guards,
    in_target,
    in_operator,
    in_keyword,
    in_argument_names,
    in_parameter_name,
    in_default_factory,
    in_enum,
    in_constant_input,
    in_file_op,
)


@pytest.mark.parametrize("place", IN_PROGRAM, ids=lambda place: place.__name__)
def test_text_of_a_program_is_no_code(
    place: Callable[[Any, str], None], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "payload.py").write_text(f"open({str(proof)!r}, 'w')\nx = list\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = edited(source, tmp_path / "bad.pt2", lambda program: place(program, f"open({str(proof)!r},'w')"))
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


@pytest.mark.parametrize(
    "command", [("rewrite", "--dry-run"), ("run",), ("verify",), ("unpack",), ("to_onnx",)], ids=str
)
@pytest.mark.parametrize("place", IN_PICKLES)
def test_pickles_run_nothing(place: str, command: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    proof, content = tmp_path / "proof", records(source)
    IN_PICKLES[place](content, proof)
    path = write(tmp_path / "bad.pt2", content)
    if command[0] in {"unpack", "to_onnx"}:
        with pytest.raises(ContractError, match=r"bad\.pt2: .*trust_pickle=True"):
            mxfp8_graph.unpack(path) if command[0] == "unpack" else mxfp8_graph.to_onnx(path, tmp_path / "m.onnx")
    else:
        result = run(command[0], str(path), *([str(path)] if command[0] == "verify" else []), *command[1:])
        assert result.exit_code == 2, result.output
        assert "pass --trust-pickle, which lets it run code" in result.output
    assert not proof.exists()


def test_who_trusts_a_file_lets_it_run_code(source: Path, tmp_path: Path) -> None:
    proof, content = tmp_path / "proof", records(source)
    IN_PICKLES["samples"](content, proof)
    path = write(tmp_path / "bad.pt2", content)
    run("rewrite", str(path), "--dry-run", "--trust-pickle")
    assert proof.exists()


def test_compiled_libraries_are_not_loaded(source: Path, tmp_path: Path) -> None:
    content = records(source) | {
        "data/aotinductor/model/x.so": b"\x7fELF",
        "data/aotinductor/model/x_metadata.json": b"{}",
    }
    program = mxfp8_graph.load(write(tmp_path / "compiled.pt2", content))
    assert "up.weight" in program.state_dict


def test_the_environment_stays_as_it_was(source: Path) -> None:
    before = dict(os.environ)
    mxfp8_graph.load(source)
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("name", "data", "message"),
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
    ids=lambda value: value if isinstance(value, str) else "",
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


def test_counters_that_torch_would_count_to(source: Path, tmp_path: Path) -> None:
    def edit(program: Any) -> None:
        program["range_constraints"]["u99999999999"] = {"min_val": 0, "max_val": 1}

    with pytest.raises(ContractError, match="torch counts up to it, one by one"):
        mxfp8_graph.load(edited(source, tmp_path / "bad.pt2", edit))


@pytest.mark.parametrize("expression", ["Pow(9, Pow(9, 9))", "9**9**9", "LShift(1, 10**9)", "factorial(10**9)"])
def test_expressions_that_take_for_ever(expression: str, source: Path, tmp_path: Path) -> None:
    path = edited(source, tmp_path / "bad.pt2", lambda program: in_expression(program, expression))
    with pytest.raises(ContractError, match="in its program"):
        mxfp8_graph.load(path)


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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "bad.pt2")
    with pytest.raises(ContractError, match="not a regular file"):
        mxfp8_graph.load(tmp_path / "bad.pt2")
