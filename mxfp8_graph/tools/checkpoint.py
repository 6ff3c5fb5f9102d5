"""Writes a Hugging Face folder with packed weights, which vLLM, SGLang and transformers load.

The tests of this file state the rules of these readers, with their sources.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from mxfp8_graph import files
from mxfp8_graph.file_reading import locate
from mxfp8_graph.packed import safetensors
from mxfp8_graph.packed.checkpoint import listed, read_json
from mxfp8_graph.packed.compressed_tensors import COMPRESSED_TENSORS, CONFIG_KEY, CONVENTIONS, config_of, entries_of
from mxfp8_graph.packed.contents import Contents, PackedWeight, Tensor
from mxfp8_graph.packed.interchange import contents, file_metadata
from mxfp8_ops import formats
from mxfp8_ops.errors import BackendError, ContractError, Option

_FUSED: Final = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("qkv_proj", ("query", "key", "value")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
)
"""(layer of servers, the layers of transformers that they fuse into it); all or none of their weights are MXFP8."""

_LARGEST_FILE: Final = 5_000_000_000
"""Largest number of bytes of the tensors in a file, as in transformers."""

_DESCRIPTIONS: Final = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
"""Suffixes of tokenizers and configurations; other files beside a model are most often weights."""

_INDEXES: Final = (".safetensors.index.json", ".bin.index.json")


def export_checkpoint(
    model: Any,
    output: str | Path,
    *,
    config: str | Path,
    convention: str = COMPRESSED_TENSORS,
) -> tuple[Path, list[str]]:
    """Writes the packed bytes of a model to a folder that vLLM, SGLang or transformers load; returns (`output`, notes).

    The folder has model.safetensors, or model-00001-of-0000N.safetensors and an index above 5 GB; config.json with
    its quantization_config; and the tokenizer, generation_config.json and other descriptions of `config`. Tensors have
    the names of the class of transformers in config.json. Tensors that are not packed keep the model's dtype.

    Args:
        model: a model of any type that `unpack` takes; rewrite a trained program for inference first.
        output: the new folder.
        config: the Hugging Face folder that the model comes from, or another one with its config.json and tokenizer.
        convention: "compressed-tensors" for vLLM, "scale-inv" for SGLang and transformers.

    Raises:
        ContractError: the model has no packed weights, or lacks tensors of the class of transformers; servers read a
            packed weight in high precision; a packed weight is not E4M3 with K a multiple of 32; some but not all
            weights of a layer that servers fuse are packed; or the folder exists or cannot be written.
        BackendError: torch or transformers is missing.
    """
    if convention not in CONVENTIONS:
        raise ContractError.unknown("convention", convention, CONVENTIONS)
    target = Path(os.path.abspath(output))  # noqa: PTH100 - resolve() follows a link there
    # Before the model is read. lexists: a dangling link would block the rename at the end, too.
    if os.path.lexists(target):
        advice = ("pass another ", Option("output"), ", or remove it")
        raise ContractError(target, "exists already", expected="a new folder", advice=advice)
    source = contents(model)
    described = _descriptions(Path(config))
    numbers = read_json(
        Path(config, "config.json"), what="not a JSON object", expected="the config of a model", advice="copy it again"
    )
    reference = _reference(Path(config))
    tensors, notes = _matched(reference, source)
    weights = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, PackedWeight)}
    _check(weights, reference, source.where)
    if only := [name for name, weight in weights.items() if weight.weight_only]:
        notes.append(f"{len(only)} weights do not quantize their activations; servers do (W8A8): {listed(only, 3)}")
    quantization = config_of(weights, convention, _ignored(reference, weights))
    shards = list(_shards(entries_of(tensors, convention)))
    with _whole_folder(target) as folder:
        for path in described:
            (folder / path.name).write_bytes(path.read_bytes())
        _write_json(folder / "config.json", {**numbers, CONFIG_KEY: quantization})
        _write_shards(folder, shards, file_metadata(quantization, source))
    return target, notes


def _descriptions(folder: Path) -> list[Path]:
    """Returns the files of a Hugging Face folder that describe a model and its tokenizer, without config.json.

    Raises:
        ContractError: the folder cannot be read, has no config.json, or one of the files is a link to the outside.
    """
    main = folder / "config.json"
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        if main.name not in names:
            advice = ("pass another ", Option("config", "FOLDER"))
            raise ContractError(folder, f"has no {main.name}", expected="config.json and a tokenizer", advice=advice)
        chosen = [name for name in names if Path(name).suffix in _DESCRIPTIONS and not name.endswith(_INDEXES)]
        # Only checked, so that files keep their names: in the hub's cache they are links to files named by a checksum.
        for name in chosen:
            locate(main, name, str(folder))
    except OSError as error:
        raise ContractError.unreadable(folder, error, "a readable folder") from None
    return [folder / name for name in chosen if name != main.name]


@contextlib.contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """Yields a folder to fill, which is moved to `target` at the end, or removed after an error."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ContractError.unwritable(target, error, ("pass another ", Option("output"))) from None
    with files.output(target, overwrite=False) as around:
        folder = around / target.name
        folder.mkdir()
        yield folder


class _Parameter(NamedTuple):
    """A tensor of the class of transformers."""

    names: tuple[str, ...]
    """Its name in a checkpoint, then the names of tensors that are tied to it."""
    shape: tuple[int, ...]
    is_linear: bool
    """Whether it is the weight of a linear layer that is not the output projection."""


def _reference(folder: Path) -> list[_Parameter]:
    """Returns the tensors, without values, that transformers expects in a checkpoint with this config.json."""
    try:
        import transformers  # noqa: F401
        from torch import nn
    except ImportError as error:
        expected, advice = "torch and transformers", "pip install torch transformers"
        raise BackendError("export_checkpoint", str(error), expected=expected, advice=advice) from error
    from mxfp8_graph.tools.from_hf import architecture

    model = architecture.build(folder, "float32", "meta")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linears = {name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head}
    tied: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        tied.setdefault(id(tensor), []).append(name)
    # A tensor counts as linear only if all its names do: one that is tied to a table stays in high precision.
    return [
        _Parameter(tuple(names), tuple(state[names[0]].shape), linears >= {name.rpartition(".")[0] for name in names})
        for names in tied.values()
    ]


def _matched(reference: list[_Parameter], source: Contents) -> tuple[dict[str, PackedWeight | Tensor], list[str]]:
    """Returns (the tensors of a model by their names in transformers, notes)."""
    known: dict[str, PackedWeight | Tensor] = {tensor.name: tensor for tensor in source.others}
    known |= {weight.parameter: weight for weight in source.weights.values()}
    # In a program of a module that calls the model, all names have one more prefix.
    wanted = {name for parameter in reference for name in parameter.names}
    last = reference[-1].names[0]
    prefixes = ["", *sorted(name.removesuffix(last) for name in known if name.endswith(f".{last}"))]
    prefix = max(prefixes, key=lambda prefix: sum(f"{prefix}{name}" in known for name in wanted))
    tensors: dict[str, PackedWeight | Tensor] = {}
    problems = []
    for parameter in reference:
        name = parameter.names[0]
        tied = [known[each] for n in parameter.names if (each := f"{prefix}{n}") in known]
        # A packed tensor first: `_check` refuses a packed output projection that is tied to a table.
        tensor = min(tied, key=lambda each: not isinstance(each, PackedWeight), default=None)
        if tensor is None:
            problems.append(f"no {name!r} {list(parameter.shape)}")
        elif tensor.shape != parameter.shape:
            problems.append(f"{name!r} is {list(tensor.shape)}, not {list(parameter.shape)}")
        else:
            tensors[name] = tensor
    if problems:
        expected = "each tensor of the class that config.json names, by its name in transformers"
        advice = "export the model of transformers with torch.export, which keeps names, and rewrite the program"
        raise ContractError(source.where, listed(problems), expected=expected, advice=advice)
    others = sorted(known.keys() - {f"{prefix}{name}" for name in wanted})
    notes = [f"{len(others)} tensors of the model are not in the checkpoint: {listed(others, 5)}"] if others else []
    return tensors, notes


def _check(weights: Mapping[str, PackedWeight], reference: list[_Parameter], where: str) -> None:
    """Raises ContractError if servers cannot read the packed weights."""
    linear = {parameter.names[0] for parameter in reference if parameter.is_linear}
    names = {parameter.names[0] for parameter in reference}
    problems = [] if weights else ["no packed weights"]
    for name, weight in weights.items():
        if name not in linear and ".experts." not in name:
            problems.append(f"{name!r} is packed, but servers read it in high precision")
        elif weight.element_format != formats.E4M3.name:
            problems.append(f"{name!r} has {weight.element_format} elements, not e4m3")
        elif weight.shape[-1] % formats.BLOCK_SIZE:
            problems.append(f"{name!r} has K = {weight.shape[-1]}, which is not a multiple of {formats.BLOCK_SIZE}")
    # transformers stacks experts when it loads them; checkpoints have separate tensors for each expert.
    stacks = [p.names[0] for p in reference if len(p.shape) == 3 and ".experts." in p.names[0]]
    problems += [f"{name!r} stacks experts, which servers read one by one" for name in stacks]
    for fused, group in _groups(names):
        kept = [name for name in group if name not in weights]
        if 0 < len(kept) < len(group):
            problems.append(f"{fused!r} is one layer of servers, of which {', '.join(kept)} are not packed")
    if problems:
        expected = "E4M3 weights of linear layers, in all or none of the weights of a fused layer"
        advice = "rewrite with a recipe that excludes these layers, and all of a fused one"
        raise ContractError(where, listed(problems), expected=expected, advice=advice)


def _groups(names: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields (name of a fused layer in servers, names of its weights in a checkpoint)."""
    for fused, parts in _FUSED:
        first = f"{parts[0]}.weight"
        for name in sorted(name for name in names if f".{name}".endswith(f".{first}")):
            module = name.removesuffix(first)
            group = [f"{module}{part}.weight" for part in parts]
            if names.issuperset(group):
                yield f"{module}{fused}", group


def _ignored(reference: list[_Parameter], weights: Mapping[str, PackedWeight]) -> list[str]:
    """Returns the modules whose weights are not packed, tables and routers too, and the fused layers of them."""
    ignored = {
        name.rpartition(".")[0]
        for parameter in reference
        if parameter.names[0] not in weights and len(parameter.shape) > 1
        for name in parameter.names
    }
    names = {parameter.names[0] for parameter in reference}
    # The names of fused layers too: a server that does not know the parts looks up the fused layer.
    return sorted(ignored | {fused for fused, group in _groups(names) if group[0] not in weights})


def _shards(entries: list[safetensors.Entry]) -> Iterator[list[safetensors.Entry]]:
    """Yields the tensors of each file, in order."""
    shard: list[safetensors.Entry] = []
    size = 0
    for entry in entries:
        # A tensor above the limit gets a file of its own.
        if shard and size + entry.byte_size > _LARGEST_FILE:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.byte_size
    yield shard


def _write_shards(folder: Path, shards: list[list[safetensors.Entry]], metadata: Mapping[str, str]) -> None:
    """Writes model.safetensors, or several files and their index."""
    # The names that transformers itself writes and looks for.
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        size = sum(entry.byte_size for shard in shards for entry in shard)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    for name, shard in zip(names, shards, strict=True):
        safetensors.write(folder / name, shard, metadata, overwrite=False)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_bytes((json.dumps(data, indent=2) + "\n").encode())
