"""Runs a function of a test module in several processes that are the ranks of one gloo group."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.forked import TESTS, Forked

_CHILD = """
import importlib, json, sys, datetime
import torch, torch.distributed as dist
torch.set_num_threads(1)
module, function, arguments, meeting = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method="file://" + meeting, timeout=datetime.timedelta(seconds=200),
                        rank=int(sys.argv[5]), world_size=int(sys.argv[6]))
answer = getattr(importlib.import_module(module), function)(*arguments)
print("ANSWER" + json.dumps(answer), flush=True)
sys.stdout.flush()
__import__("os")._exit(0)  # a group whose peers were killed cannot be taken down in order
"""


def run_ranks(function: Any, *arguments: Any, ranks: int = 2, timeout: float = 250) -> list[tuple[int, Any, str]]:
    """Call ``function(*arguments)`` in every rank: (exit code, what it returned, standard error) of each."""
    folder = str(Path(sys.modules[function.__module__].__file__ or "").parent)
    path = (folder, TESTS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    meeting = os.path.join(tempfile.mkdtemp(), "meeting")
    told = [function.__module__, function.__name__, json.dumps(arguments), meeting]
    children: list[Forked] = []
    ended = []
    try:
        children += [Forked(_CHILD, *told, rank, ranks, path=path) for rank in range(ranks)]
        for child in children:
            out, err = child.communicate(timeout)
            answers = [line for line in out.splitlines() if line.startswith("ANSWER")]
            ended.append((child.returncode, json.loads(answers[-1][6:]) if answers else None, err))
    finally:
        for child in children:
            child.close()
        shutil.rmtree(os.path.dirname(meeting), ignore_errors=True)
    return ended
