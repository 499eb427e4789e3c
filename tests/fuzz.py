"""Damaged models and data through the whole command: anything but success or a clean error is a finding.

    python tests/fuzz.py --seconds 600 | --cases 10000 [--seed N] [--keep FOLDER]

Real models and data files are changed at random, as bytes and as structures (types, shapes, names, attributes, external
data), and given to `lsuv init`, `inspect`, `check`, `strip` or `expose`, each case in a process of its own with bounded
memory and time. A case is clean if the command succeeds (0 or 1) and what it wrote can be read, or if it fails (2) with
a line or two, no traceback, no "internal error", nothing unprintable and no output. Either way the inputs must be
untouched and nothing temporary may remain.
A case that dies by a signal is run once more as the real command, which has to contain the crash.
`tests/test_fuzz.py` goes through the first cases of seed 0 in the default test run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from helpers import model, normal
from lsuv_cli import strip

MEMORY = 6 << 30
SECONDS = 30  # of CPU time for one case: a busy machine makes no finding
HANGING = 20 * SECONDS  # without using the CPU
MANY = [0, 1, -1, 2, 3, 7, 64, 255, 2**16, 2**31 - 1, 2**31, 2**63 - 1, -(2**63)]
WORDS = ["", "x", "y", "w", "/", "../m.bin", "/etc/hostname", "m.bin", "\0", "é" * 40, "a" * 3000, "%s%n", "ai.onnx.ml",
         "\x1b[2J\n\u202e", "/" * 20000]  # fmt: skip
OPS = ["Conv", "MatMul", "Gemm", "Relu", "Add", "Reshape", "Transpose", "If", "Constant", "Identity", "Cast", "Concat",
       "BatchNormalization", "LSTM", "Einsum", "Gather", "QLinearConv", "Shape", "Slice", "NoSuchOp"]  # fmt: skip
MORE = [[], [], ["--bias", "keep"], ["--pre-init", "keep"], ["--tied", "untie"], ["--recurrent"], ["--before"]]


def seeds() -> dict[str, tuple[onnx.ModelProto, np.ndarray]]:
    """Small models of many kinds, each with data that fits."""
    image, row = normal(6, 3, 8, 8), normal(12, 8)
    conv, square = {"w": normal(4, 3, 3, 3), "b": normal(4)}, {"w": normal(8, 8), "v": normal(8, 8, seed=1)}
    recurrent = {"w": normal(1, 12, 8), "v": normal(1, 12, 4), "u": normal(4, 4), "k": np.array([1])}
    norm = {"s": np.ones(4, np.float32), "m": np.zeros(4, np.float32), "d": np.ones(4, np.float32)}
    made: dict[str, tuple[str, dict[str, np.ndarray], np.ndarray]] = {
        "convolutions": (
            """g (float[N,3,8,8] x) => (y) { a = Conv <pads=[1,1,1,1]> (x, w, b) r = Relu(a)
            p = MaxPool <kernel_shape=[2,2], strides=[2,2]> (r) f = Flatten(p) y = Gemm <transB=1> (f, v) }""",
            {**conv, "v": normal(5, 64)},
            image,
        ),
        "residual": (
            "g (float[N,8] x) => (y) { a = MatMul(x, w) t = Tanh(a) s = Add(t, x) y = MatMul(s, v) }",
            square,
            row,
        ),
        "shared": (
            "g (float[N,8] x) => (y) { i = Identity(w) a = MatMul(x, w) t = Relu(a) y = MatMul(t, i) }",
            {"w": normal(8, 8)},
            row,
        ),
        "views": (
            """g (float[N,8] x) => (y) { u = Transpose <perm=[1,0]> (w) h = Cast <to=1> (v)
            a = MatMul(x, u) t = Tanh(a) y = MatMul(t, h) }""",
            {"w": normal(8, 8), "v": normal(8, 8, dtype=np.float16)},
            row,
        ),
        "branches": (
            """g (float[N,8] x) => (y) { a = MatMul(x, w) z = If (c) <
            then_branch = t () => (p) { p = MatMul(a, v) }, else_branch = e () => (q) { q = Relu(a) }>
            y = MatMul(z, v) }""",
            {**square, "c": np.array(True)},
            row,
        ),
        "norm": (
            "g (float[N,3,8,8] x) => (y) { a = Conv(x, w) n = BatchNormalization(a, s, b, m, d) y = Relu(n) }",
            {**conv, **norm},
            image,
        ),
        "function": (
            """g (float[N,8] x) => (y) { a = local.f(x, w) y = MatMul(a, v) }
            <domain: "local", opset_import: ["" : 18]> f (p, q) => (r) { m = MatMul(p, q) r = Relu(m) }""",
            square,
            row,
        ),
        "recurrent": (
            """g (float[S,N,8] x) => (y) { h, l = GRU <hidden_size=4> (x, w, v)
            q = Squeeze(h, k) y = MatMul(q, u) }""",
            recurrent,
            normal(5, 3, 8),
        ),
    }
    return {name: (model(graph, **tensors), data) for name, (graph, tensors, data) in made.items()}


# Damage


def damaged_bytes(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, put in, taken out, repeated, or all cut off from somewhere."""
    text = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(6):
            case 0 if at < len(text):
                text[at] = chance.randrange(256)
            case 1 if at < len(text):
                text[at] ^= 1 << chance.randrange(8)
            case 2:
                text[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 8)))
            case 3:
                del text[at : at + chance.randint(1, 16)]
            case 4:
                text[at:at] = text[at : at + chance.randint(1, 64)]
            case 5 if chance.random() < 0.3:
                del text[at:]
    return bytes(text)


def messages(message: Any) -> Iterator[Any]:
    """A protobuf message and all messages inside it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                yield from messages(inner)


def damage_structure(proto: onnx.ModelProto, chance: random.Random) -> None:
    """Some fields of some messages set to other values of their type, removed, repeated or swapped."""
    for _ in range(chance.randint(1, 4)):
        message = chance.choice([m for m in messages(proto) if m.ListFields()] or [proto])
        if message.DESCRIPTOR.name == "NodeProto" and chance.random() < 0.2:
            message.op_type = chance.choice(OPS)
            continue
        if message.DESCRIPTOR.name == "TensorProto" and chance.random() < 0.2:
            damage_tensor(message, chance)
            continue
        field, value = chance.choice(message.ListFields() or [(None, None)])
        if field is None:
            continue
        if not field.is_repeated:
            if field.message_type is None:
                setattr(message, field.name, other(field, value, chance))
            elif chance.random() < 0.3:
                message.ClearField(field.name)
            continue
        at = chance.randrange(len(value))
        match chance.randrange(4):
            case 0:
                del value[at]
            case 1 if field.message_type is not None:
                value.add().CopyFrom(value[at])
            case 1:
                value.append(value[at])
            case 2 if field.message_type is None:
                value[at] = other(field, value[at], chance)
            case _:
                kept = [type(v).FromString(v.SerializeToString()) if field.message_type else v for v in value]
                chance.shuffle(kept)
                del value[:]
                value.extend(kept)


def other(field: Any, value: Any, chance: random.Random) -> Any:
    """Another value of a scalar field."""
    match value:
        case bool():
            return not value
        case int() if field.enum_type is not None:
            return chance.choice([v.number for v in field.enum_type.values])
        case int():
            bits = 31 if field.cpp_type == field.CPPTYPE_INT32 else 63
            return min(max(chance.choice([*MANY, value + 1, value - 1]), -(2**bits)), 2**bits - 1)
        case float():
            return chance.choice([0.0, -1.0, 1e38, -1e38, float("nan"), float("inf"), 1e-40])
        case bytes():
            return damaged_bytes(value[:4096], chance)
        case _:
            return chance.choice(WORDS)


def damage_tensor(tensor: TensorProto, chance: random.Random) -> None:
    match chance.randrange(5):
        case 0:
            tensor.data_type = chance.choice(list(TensorProto.DataType.values()))
        case 1:
            tensor.dims.append(chance.choice(MANY))
        case 2:
            tensor.data_location = TensorProto.EXTERNAL
            for key in ("location", "offset", "length", "checksum")[: chance.randint(1, 4)]:
                tensor.external_data.add(key=key, value=str(chance.choice([*WORDS, *MANY])))
        case 3:
            tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 2]
        case 4:
            strange = chance.choice([np.nan, np.inf, 3e38, 1e-45])
            tensor.raw_data = np.full(max(1, len(tensor.raw_data) // 4), strange, np.float32).tobytes()


# Cases


def stored(data: np.ndarray, name: str) -> bytes:
    """An array for the input `x` as the bytes of a file of this name."""
    buffer = io.BytesIO()
    match Path(name).suffix:
        case ".npy":
            np.save(buffer, data)
        case ".npz":
            np.savez(buffer, x=data)
        case ".pb":
            return numpy_helper.from_array(data, "x").SerializeToString()
        case ".safetensors":
            header = {"x": {"dtype": "F32", "shape": data.shape, "data_offsets": [0, data.nbytes]}}
            text = json.dumps(header).encode()
            return struct.pack("<Q", len(text)) + text + data.tobytes()
    return buffer.getvalue()


@dataclass
class Case:
    """Files in a folder, and the words of a command on them."""

    about: str
    words: list[str]
    files: dict[str, bytes]


def case(number: int, seed: int, models: dict[str, tuple[onnx.ModelProto, np.ndarray]]) -> Case:
    """The case with this number; the same for the same seed."""
    chance = random.Random(f"{seed}/{number}")
    name = chance.choice(sorted(models))
    original, data = models[name]
    proto = onnx.ModelProto()
    proto.CopyFrom(original)
    files: dict[str, bytes] = {}
    if chance.random() < 0.1:
        proto = strip(proto).model
    if chance.random() < 0.3:
        blob = b""
        for tensor in proto.graph.initializer:
            if tensor.raw_data:
                entries = {"location": "m.bin", "offset": len(blob), "length": len(tensor.raw_data)}
                blob += tensor.raw_data
                tensor.ClearField("raw_data")
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in entries.items():
                    tensor.external_data.add(key=key, value=str(value))
        files["m.bin"] = blob
    table = chance.choice(["c.npy"] * 5 + ["c.npz"] * 3 + ["c.safetensors", "input_0.pb"])
    files |= {table: stored(data, table), "m.onnx": b""}
    where = chance.random()
    if where < 0.6:
        damage_structure(proto, chance)
    files["m.onnx"] = proto.SerializeToString()
    if 0.6 <= where < 0.8:
        files["m.onnx"] = damaged_bytes(files["m.onnx"], chance)
    elif 0.8 <= where < 0.95:
        files[table] = damaged_bytes(files[table], chance)
    elif where >= 0.95:
        files["m.bin"] = damaged_bytes(files.get("m.bin", b"nothing"), chance)
    command = chance.choice([["init", "-o", "o.onnx"]] * 8 + [["inspect"], ["check"]] * 2 + [["strip"], ["expose"]])
    if command[0] in {"strip", "expose"}:
        return Case(name, [*command, "m.onnx", "-o", "o.onnx"], files)
    more = chance.choice(MORE) if command[0] == "init" else []
    words = [command[0], "m.onnx", "--data", table, *command[1:], *more]
    return Case(name, [*words, "--device", "cpu", "--threads", "1"], files)


def outcome(case: Case, folder: Path) -> tuple[str, str]:
    """What became of a case: ok, refused or crash, or a finding in a word or two; and what was printed."""
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    code, printed = forked(case.words, folder)
    verdict = judge(case, folder, code, printed)
    if verdict.startswith("signal"):
        clean(case, folder)
        command = [sys.executable, "-c", "from lsuv_cli.cli import main; main()", *case.words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, preexec_fn=bounded)
        verdict = judge(case, folder, done.returncode, done.stderr)
        verdict = "crash" if verdict in {"refused", "ok"} else f"not contained: {verdict}"
    return verdict, printed


def judge(case: Case, folder: Path, code: int, printed: str) -> str:
    if code < 0:
        return "too slow" if code in {-signal.SIGPROF, -signal.SIGALRM} else f"signal {-code}"
    if "Traceback" in printed or "internal error" in printed:
        return "traceback" if "Traceback" in printed else "internal error"
    if not all(line.isprintable() for line in printed.split("\n")):
        return "unprintable"
    if any((folder / name).read_bytes() != content for name, content in case.files.items()):
        return "input changed"
    left = {path.name for path in folder.iterdir()} - set(case.files)
    if code == 2:
        lines = [line for line in printed.splitlines() if not line.startswith("warning:")]
        if not 1 <= len(lines) <= 2 or not lines[0].startswith("lsuv: "):
            return "not one or two lines"
        return "refused" if not left else "something left"
    if code not in {0, 1}:
        return f"exit code {code}"
    if case.words[0] in {"init", "strip", "expose"}:
        if not left <= {"o.onnx", "o.onnx.data"} or "o.onnx" not in left:
            return "something left"
        onnx.load(folder / "o.onnx")
    return "ok"


def clean(case: Case, folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, content in case.files.items():
        (folder / name).write_bytes(content)


def forked(words: list[str], folder: Path) -> tuple[int, str]:
    """Run the command in a fork of this process, which has imported everything and run nothing."""
    with tempfile.TemporaryFile("w+") as stderr:
        child = os.fork()
        if child == 0:
            code = 99
            with contextlib.suppress(BaseException):
                os.chdir(folder)
                os.dup2(stderr.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                bounded()
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
                from lsuv_cli.cli import main

                try:
                    main(words)
                except SystemExit as ended:
                    code = int(ended.code or 0)
                sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        stderr.seek(0)
        return os.waitstatus_to_exitcode(status), stderr.read()


def bounded() -> None:
    """Limits for one case: memory, so that the machine stays usable, and time."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(HANGING)


def warm_up() -> None:
    """Import all that a command imports, so that a fork need not.

    No session is made: a fork would not have its threads.
    """
    import lsuv_cli.api
    import lsuv_cli.cli.display  # noqa: F401
    from lsuv_cli.cli import main

    for command in ("init", "inspect", "check", "strip", "expose"):
        more = ["-o", "o.onnx"] if command in {"strip", "expose"} else ["--data", "missing.npy"]
        with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.suppress(SystemExit):
            main([command, "missing.onnx", *more])
        assert "missing.onnx" in told.getvalue()


def run(numbers: Iterator[int], seed: int, found: Callable[[int, Case, str, str], None]) -> collections.Counter[str]:
    """Go through cases; each that is not clean is told."""
    warm_up()
    models = seeds()
    counts: collections.Counter[str] = collections.Counter()
    for number in numbers:
        one = case(number, seed, models)
        with tempfile.TemporaryDirectory() as folder:
            verdict, printed = outcome(one, Path(folder))
        counts[verdict] += 1
        if verdict not in {"ok", "refused"}:
            found(number, one, verdict, printed)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Damaged models and data through the whole command.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=int, help="up to this number, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--keep", type=Path, help="a folder for the files of what is found")
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds

    def numbers() -> Iterator[int]:
        number = asked.first
        while number < asked.cases if asked.cases is not None else time.monotonic() < end:
            if number and number % 500 == 0:
                print(f"{number} cases", flush=True)
            yield number
            number += 1

    def found(number: int, case: Case, verdict: str, printed: str) -> None:
        print(f"{number} ({case.about}): {verdict}: {' '.join(case.words)}\n    {printed.strip()[-600:]}", flush=True)
        if asked.keep:
            folder = asked.keep / f"{asked.seed}-{number}"
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in case.files.items():
                (folder / name).write_bytes(content)

    counts = run(iter([asked.only]) if asked.only is not None else numbers(), asked.seed, found)
    told = ", ".join(f"{count} {what}" for what, count in counts.most_common())
    print(f"{counts.total()} cases of seed {asked.seed}: {told}")
    sys.exit(bool(set(counts) - {"ok", "refused", "crash"}))


if __name__ == "__main__":
    main()
