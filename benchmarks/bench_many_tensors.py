"""A checkpoint of very many tiny tensors: reading its structure, and its manifest written and read.

    python -m benchmarks.bench_many_tensors [--tensors 100000] [--runs 5] [--folder DIR]

Prints CPU seconds (the best of the runs: other work on the machine only ever adds to them), bytes of manifest per
tensor, and peak memory of a process that does all of it and a scan.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measuring import options

MAKE = """
import sys, torch, warnings
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
folder, count = sys.argv[1], int(sys.argv[2])
names = [f"model.layers.{i // 100:05d}.block.{i % 100:02d}.attn.weight" for i in range(count)]
state = {name: torch.full((4,), float(i)) for i, name in enumerate(names)}
torch.save(state, f"{folder}/model.pt")
save_file(state, f"{folder}/model.safetensors")
for shard in range(4):
    save_file({name: state[name] for name in names[shard::4]}, f"{folder}/model-0000{shard + 1}-of-00004.safetensors")
warnings.simplefilter("ignore")
dcp.save(state, checkpoint_id=f"{folder}/dcp", no_dist=True)
"""

# In a process of its own: what an earlier run left behind would count towards memory.
MEASURE = """
import json, resource, sys, time
from ckptguard.scan.one_file import Structures
from ckptguard.values.manifest import File, Manifest, Span, Tensor, decode_manifest
from ckptguard.values.record_text import encode_checked
from ckptguard.scan import scan_files
from ckptguard.storage import open_storage
folder, names, runs = sys.argv[1], sys.argv[3:], int(sys.argv[2])
storage = open_storage(folder)
best = {"structure": 1e9, "encode": 1e9, "write": 1e9, "decode": 1e9}

def timed(part, action):
    started = time.process_time()
    result = action()
    best[part] = min(best[part], time.process_time() - started)
    return result

def structures():
    found, read = [], Structures(storage).read
    for name in names:
        with storage.open(name) as reader:
            found.append((name, reader.entry.size, read(reader, name)))
    return found

def manifest_of(found):
    files = tuple(
        File(
            path=name, size=size, format=s.format, envelope="ab" * 32,
            spans=tuple(Span(p.offset, p.length, "cd" * 32) for p in s.spans),
            tensors=tuple(Tensor(t.name, t.dtype, t.shape, t.span, "model", 12345.6, 1234.56) for t in s.tensors),
        )
        for name, size, s in found
    )
    return Manifest(
        series="run", path=".", layout="folder", step=1, generation=1, digest_origin="observer",
        sealed_at="2026-01-01T00:00:00Z", version="0", nonce="n", files=files,
    )

for run in range(runs):
    found = timed("structure", structures)
    count = sum(len(s.tensors) for *_, s in found)
    assert not any(s.problems for *_, s in found)
    manifest = manifest_of(found)
    del found
    text = timed("encode", lambda: encode_checked(manifest))
    key = f"manifest-{run}"
    timed("write", lambda: storage.create(key, text))
    assert timed("decode", lambda: decode_manifest(text)) == manifest
    storage.remove(key)
del manifest
started = time.process_time()
scan_files(storage, names)
scan = time.process_time() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({**best, "scan": scan, "bytes": len(text) / count, "peak": peak}))
"""


def main() -> None:
    """Make the files, measure, remove them."""
    given = options(__doc__, tensors=100_000, runs=5, folder=Path)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        subprocess.run([sys.executable, "-c", MAKE, folder, str(given.tensors)], check=True)
        shards = [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
        for what, names in (
            ("model.pt", ["model.pt"]),
            ("model.safetensors", ["model.safetensors"]),
            ("four shards", shards),
            ("DCP", ["dcp/.metadata", "dcp/__0_0.distcp"]),
        ):
            argv = [sys.executable, "-c", MEASURE, folder, str(given.runs), *names]
            found = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
            parts = {part: found[part] for part in ("structure", "encode", "write", "decode")}
            print(
                f"{what:18} {sum(parts.values()):5.2f} s = "
                + " + ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
                + f"   a scan {found['scan']:.2f} s   manifest {found['bytes']:.0f} bytes a tensor   "
                + f"peak {found['peak']:.0f} MiB"
            )


if __name__ == "__main__":
    main()
