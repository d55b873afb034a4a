"""assay weights and assay reference on files that are damaged, forged or no files: exit code 3, which file and where,
within little time and memory."""

from __future__ import annotations

import json
import os
import pathlib
import struct
import subprocess
from typing import Any, Callable

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_BINARY", str(ROOT / "build" / "assay"))
ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
Content = bytes | Callable[[pathlib.Path], Any]


def stored(header: Any = None, data: bytes = bytes(24), size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps({"a.weight": ENTRY} if header is None else header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def changed(**entry: Any) -> bytes:
    return stored({"a.weight": ENTRY | entry})


def index(weight_map: Any) -> bytes:
    return json.dumps({"weight_map": weight_map}).encode()


def itself(path: pathlib.Path) -> None:
    path.symlink_to(path.name)


def link(target: str) -> Callable[[pathlib.Path], None]:
    return lambda path: path.symlink_to(target)


ONE, INDEX, CONFIG, SHARD = "model.safetensors", "model.safetensors.index.json", "config.json", "s1.safetensors"
NAMED = {INDEX: index({"a.weight": SHARD})}
FOLDERS: dict[str, tuple[dict[str, Content], str, str]] = {
    # name: (files, the one at fault, what is said of it)
    "no bytes": ({ONE: b""}, ONE, "0 bytes, too short for the header length at offset 0"),
    "part of the header length": ({ONE: stored()[:7]}, ONE, "at offset 0"),
    "part of the header": ({ONE: stored()[:20]}, ONE, "at offset 8 ends beyond the file of 20 bytes"),
    "part of the data": ({ONE: stored()[:-1]}, ONE, "data section at offset 80 has 23 bytes"),
    "header length of 2^63": ({ONE: stored(size=2**63)}, ONE, "header length 9223372036854775808 at offset 0"),
    "header length of -1": ({ONE: stored(size=2**64 - 1)}, ONE, "at offset 0"),
    "header that is deep": ({ONE: stored(b"[" * 100000)}, ONE, "invalid JSON at byte"),
    "name twice": ({ONE: stored(b'{"a":%s,"a":%s}' % ((json.dumps(ENTRY).encode(),) * 2))}, ONE, 'duplicate key "a"'),
    "offsets beyond the file": ({ONE: changed(data_offsets=[0, 2**62])}, ONE, "end beyond the file"),
    "offsets that run backwards": ({ONE: changed(data_offsets=[24, 0])}, ONE, "run backwards"),
    "offsets below 0": ({ONE: changed(data_offsets=[-8, 16])}, ONE, "at offset 8, entry \"a.weight\": data_offsets [-8,16] are no sizes"),
    "offsets above int64": ({ONE: changed(data_offsets=[2**64 - 24, 2**64 - 1])}, ONE, "are no sizes"),
    "tensors on each other": ({ONE: stored({"a": ENTRY, "b": ENTRY})}, ONE, "overlaps the one before"),
    "extents that overflow": ({ONE: changed(shape=[2**32, 2**32])}, ONE, "overflows"),
    "extents beside a 0": ({ONE: changed(shape=[0, 2**62, 2**62], data_offsets=[0, 0])}, ONE, "belong to no tensor"),
    "extent below 0": ({ONE: changed(shape=[-2, -3])}, ONE, "shape entry -2 is no size"),
    "rank of 302": ({ONE: changed(shape=[1] * 300 + [2, 3])}, ONE, "rank 302 is above"),
    "dtype of no kind": ({ONE: changed(dtype="Q9")}, ONE, 'unknown dtype "Q9"'),
    "folder for a file": ({ONE: pathlib.Path.mkdir}, ONE, "not a regular file"),
    "pipe for a file": ({ONE: os.mkfifo}, ONE, "not a regular file"),
    "device for a file": ({ONE: link("/dev/zero")}, ONE, "not a regular file"),
    "link to itself": ({ONE: itself}, ONE, "Too many levels of symbolic links"),
    "link to nothing": ({ONE: link("nowhere")}, ONE, "No such file"),
    "no checkpoint": ({}, "", "holds neither model.safetensors nor"),
    "config that is no object": ({ONE: stored(), CONFIG: b"[1]"}, CONFIG, "at offset 0 there is no JSON object"),
    "config of no bytes": ({ONE: stored(), CONFIG: b""}, CONFIG, "invalid JSON at byte 0"),
    "config that is a folder": ({ONE: stored(), CONFIG: pathlib.Path.mkdir}, CONFIG, "not a regular file"),
    "config that is a link to itself": ({ONE: stored(), CONFIG: itself}, CONFIG, "Too many levels"),
    "config that never ends": ({ONE: stored(), CONFIG: link("/dev/zero")}, CONFIG, "not a regular file"),
    "absent shard": (NAMED, SHARD, "No such file or directory (shard named by"),
    "shard of no bytes": (NAMED | {SHARD: b""}, SHARD, "0 bytes"),
    "shard that is a folder": (NAMED | {SHARD: pathlib.Path.mkdir}, SHARD, "not a regular file (shard named by"),
    "shard that is a link to itself": (NAMED | {SHARD: itself}, SHARD, "Too many levels"),
    "shard that is a pipe": (NAMED | {SHARD: os.mkfifo}, SHARD, "not a regular file"),
    "shard without its tensor": ({INDEX: index({"a.weight": SHARD, "b.weight": SHARD}), SHARD: stored()}, INDEX, '"b.weight"'),
    "shard of another's tensor": ({INDEX: index({"b.weight": SHARD}), SHARD: stored()}, SHARD, 'tensor "a.weight" at offset 80 is not listed'),
    "shard outside": ({INDEX: index({"a.weight": "../x/model.safetensors"})}, INDEX, "no file name inside the folder"),
    "shard of an absolute name": ({INDEX: index({"a.weight": "/etc/passwd"})}, INDEX, "no file name inside the folder"),
    "shard of a name with NUL": ({INDEX: index({"a.weight": "s\0.safetensors"})}, INDEX, "no file name inside the folder"),
    "index without a map": ({INDEX: b"{}"}, INDEX, "weight_map"),
    "index that is a folder": ({INDEX: pathlib.Path.mkdir}, INDEX, "not a regular file"),
}  # fmt: skip


def refused(path: pathlib.Path, fault: pathlib.Path, says: str) -> None:
    for command in (["weights", str(path)], ["reference", str(path), "--tokens", "1", "--max-tokens", "1"]):
        argv = ["bash", "-c", 'ulimit -v 4000000; exec "$@"', "bash", ASSAY, *command]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.returncode == 3 and not done.stdout, (command[0], done.returncode, done.stderr)
        assert str(fault) in done.stderr and says in done.stderr, done.stderr


@pytest.mark.parametrize("name", FOLDERS)
def test_folder(name: str, tmp_path: pathlib.Path) -> None:
    files, fault, says = FOLDERS[name]
    for file, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / file).write_bytes(content)
        else:
            content(tmp_path / file)
    refused(tmp_path, tmp_path / fault, says)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small GGUF file: four keys, an array among them, and one tensor of [4, 32] at offset 256."""
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_array("x", [1, 2, 3])
    writer.add_tensor("blk.0.attn_q.weight", np.ones((4, 32), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path.read_bytes()


def test_gguf_cut_anywhere(whole: bytes, tmp_path: pathlib.Path) -> None:
    """Every length up to the header's end, then some: none is taken for a file, each names its offset."""
    path = tmp_path / "m.gguf"
    for length in [*range(0, 256, 5), 256, 300, len(whole) - 1]:
        path.write_bytes(whole[:length])
        done = subprocess.run([ASSAY, "weights", str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 3 and str(path) in done.stderr, (length, done.returncode, done.stderr)
        assert "offset " in done.stderr or "begins at" in done.stderr, (length, done.stderr)


NAME = b"blk.0.attn_q.weight"
FORGED = {
    # name: (behind which bytes, at which distance, format, value, what is said)
    "version": (b"GGUF", 0, "<I", 99, "version 99"),
    "big-endian": (b"GGUF", 0, ">I", 3, "big-endian"),
    "tensors": (b"GGUF", 4, "<Q", 2**63, "do not fit the file of"),
    "pairs": (b"GGUF", 12, "<Q", 2**64 - 1, "do not fit the file of"),
    "length of a key": (b"GGUF", 20, "<Q", 2**62, "ends beyond the file"),
    "length of a tensor's name": (b"GGUF", -1, "<Q", 2**50, "ends beyond the file"),
    "rank": (NAME, 0, "<I", 2**31, "rank 2147483648"),
    "extent": (NAME, 4, "<Q", 2**63, "is no size"),
    "extent that overflows": (NAME, 4, "<Q", 2**62, "is no size"),
    "extent of 0": (NAME, 4, "<Q", 0, "is no size"),
    "type": (NAME, 20, "<I", 12345, "unknown type 12345"),
    "type of larger blocks": (NAME, 20, "<I", 12, "do not fill blocks of q4_k"),
    "offset": (NAME, 24, "<Q", 2**63, "end beyond the file"),
    "offset off the grid": (NAME, 24, "<Q", 1, "misaligned"),
    "length of an array": (struct.pack("<I", 9), 4, "<Q", 2**61, "ends beyond the file"),
    "array of arrays": (struct.pack("<I", 9), 0, "<I", 9, "nested type 9"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_gguf(name: str, whole: bytes, tmp_path: pathlib.Path) -> None:
    behind, distance, form, value, says = FORGED[name]
    at = whole.index(behind) + len(behind) + distance if distance >= 0 else whole.index(NAME) - 8
    data = bytearray(whole)
    struct.pack_into(form, data, at, value)
    (tmp_path / "m.gguf").write_bytes(data)
    refused(tmp_path / "m.gguf", tmp_path / "m.gguf", says)


@pytest.mark.parametrize("kind, says", [("link", "Too many levels"), ("pipe", "not a regular file"), ("device", "not a regular file")])
def test_gguf_that_is_no_file(kind: str, says: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.gguf"
    {"link": itself, "pipe": os.mkfifo, "device": link("/dev/zero")}[kind](path)
    refused(path, path, says)


def test_split_gguf_without_its_parts(whole: bytes, tmp_path: pathlib.Path) -> None:
    for count in (2, 99999):
        path = tmp_path / f"m-00001-of-{count:05d}.gguf"
        path.write_bytes(whole)
        refused(path, tmp_path / f"m-00002-of-{count:05d}.gguf", "no such file")


def test_configuration_of_absurd_sizes(tmp_path: pathlib.Path) -> None:
    """Nothing is reserved for layers, experts or rows that the files do not hold."""
    (tmp_path / ONE).write_bytes(stored({"model.embed_tokens.weight": ENTRY}))
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 4096, "hidden_size": 3, "vocab_size": 2, "n_routed_experts": 2**16}
    (tmp_path / CONFIG).write_text(json.dumps(config | {"num_experts_per_tok": 2, "kv_lora_rank": 2**30, "intermediate_size": 2**31 - 1}))
    argv = ["bash", "-c", 'ulimit -v 4000000; exec "$@"', "bash", ASSAY]
    done = subprocess.run([*argv, "weights", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1) and not done.stderr, (done.returncode, done.stderr)
    done = subprocess.run([*argv, "reference", str(tmp_path), "--tokens", "1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and str(tmp_path) in done.stderr, (done.returncode, done.stderr)


def test_layers_without_end_of_an_unknown_family(tmp_path: pathlib.Path) -> None:
    header = {"model.embed_tokens.weight": ENTRY, "model.norm.weight": ENTRY | {"data_offsets": [24, 48]}}
    (tmp_path / ONE).write_bytes(stored(header, bytes(48)))
    (tmp_path / CONFIG).write_text(json.dumps({"model_type": "unheard_of", "num_hidden_layers": 10**18}))
    argv = ["bash", "-c", 'ulimit -v 4000000; exec "$@"', "bash", ASSAY, "weights", "--json", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and len(json.loads(done.stdout)["findings"]) == 1000, done.stderr
