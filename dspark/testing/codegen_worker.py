"""Compiles kernels ahead of time, in a process of its own: it must not have TRITON_INTERPRET set, nor needs torch.

:mod:`dspark.testing.codegen` runs this file as a script. Jobs come as JSON on standard input, and for each of them one
line of JSON goes to standard output as soon as it is compiled.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path
from typing import Any


def compile_job(job: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel for one target; what the compiler printed about it, and in how many seconds."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, function = job["kernel"].partition(":")
    kernel = getattr(importlib.import_module(module), function)
    signature = {name: _type_of(name, job["signature"]) for name in kernel.arg_names}

    def place(path: str) -> tuple[int, ...]:
        """Where an argument, or a field of a group, stands."""
        first, *rest = path.split(".")
        found, kind = [kernel.arg_names.index(first)], signature[first]
        for name in rest:
            found.append(kind._fields.index(name))
            kind = getattr(kind, name)
        return tuple(found)

    constants = {place(path): value for path, value in job["constexprs"].items()}
    attributes = {place(path): [["tt.divisibility", 16]] for path in job["aligned"]}
    backend, architecture, warp_size = job["target"]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"], **job["options"]}
    started = time.perf_counter()
    compiled = triton.compile(source, target=GPUTarget(backend, architecture, warp_size), options=options)
    seconds = time.perf_counter() - started
    texts = _disassemble(compiled.asm["cubin"]) if backend == "cuda" else {"assembly": compiled.asm["amdgcn"]}
    return {"ttir": compiled.asm["ttir"], "shared": compiled.metadata.shared, "seconds": seconds, **texts}


def _type_of(path: str, signature: dict[str, str]) -> Any:
    """The type of an argument; of a group, a NamedTuple of those of its fields."""
    inner = [key.removeprefix(f"{path}.").partition(".")[0] for key in signature if key.startswith(f"{path}.")]
    if not inner:
        return signature.get(path, "constexpr")
    fields = {name: _type_of(f"{path}.{name}", signature) for name in inner}
    return namedtuple(path.rpartition(".")[2], fields)(**fields)


def _disassemble(cubin: bytes) -> dict[str, str]:
    """SASS and resource usage of a cubin by the tools in triton's wheel, kept in triton's own cache."""
    import triton
    from triton.runtime.cache import get_cache_manager

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cache = get_cache_manager(hashlib.sha256(cubin).hexdigest())
    texts: dict[str, str] = {}
    if kept := cache.get_file("disassembly.json"):
        texts = json.loads(Path(kept).read_text(encoding="utf-8"))
        return texts
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        for name, option in (("assembly", "-sass"), ("resources", "--dump-resource-usage")):
            command = [str(tool), option, str(path)]
            texts[name] = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    cache.put(json.dumps(texts), "disassembly.json", binary=False)
    return texts


def _describe(error: BaseException | None) -> str:
    """An error and its causes: the compiler's own message says where, and what is behind it says why."""
    lines = []
    while error is not None:
        lines.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(lines)


def main() -> None:
    request = json.load(sys.stdin)
    sys.path[:0] = request["path"]
    for job in request["jobs"]:
        try:
            result = compile_job(job)
        except Exception as error:
            result = {"error": _describe(error)}
        sys.stdout.write(json.dumps({"key": job["key"], **result}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
