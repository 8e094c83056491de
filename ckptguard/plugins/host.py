"""The process of one call: ``python -m ckptguard.plugins.host MEMORY PARENT``. It reads a `PluginCall` and writes an
`PluginAnswer`.

It has limited memory, low priority, and dies with its parent. A plugin cannot print into the answer.
"""

from __future__ import annotations

import importlib
import itertools
import operator
import os
import sys
from typing import Any

import msgspec

from ckptguard.plugins.interface import FileContents, Saved
from ckptguard.plugins.messages import MOST_SENTENCES, MOST_TENSORS, MOST_VALUES, PluginAnswer, PluginCall
from ckptguard.scan.process.limits import die_with, limit_process
from ckptguard.scan.process.low_priority import lower_priority


def main() -> None:
    """Make the one call of stdin."""
    answers = os.dup(1)
    os.dup2(2, 1)
    die_with(int(sys.argv[2]))
    limit_process(int(sys.argv[1]))
    lower_priority()
    call = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=PluginCall)
    try:
        answer = PluginAnswer(result=msgspec.Raw(msgspec.msgpack.encode(_result(call))))
    except BaseException as error:
        said = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
        answer = PluginAnswer(failure=" ".join(said.split()))
    with os.fdopen(answers, "wb") as file:
        file.write(msgspec.msgpack.encode(answer))
    os._exit(0)  # threads and exit handlers of a plugin must not hold the answer back


def _result(call: PluginCall) -> object:
    module, _, name = call.entry.partition(":")
    function: Any = operator.attrgetter(name.split("[")[0].strip())(importlib.import_module(module.strip()))
    if call.kind == "formats":
        with open(msgspec.msgpack.decode(call.argument, type=str), "rb") as file:
            contents = function(file)
        if not isinstance(contents, FileContents):
            raise TypeError(f"it returned {type(contents).__name__}, not FileContents")
        if len(contents.tensors) > MOST_TENSORS:
            raise ValueError(f"it states {len(contents.tensors)} tensors")
        few = {name: getattr(contents, name)[:MOST_SENTENCES] for name in ("problems", "not_understood")}
        return msgspec.structs.replace(contents, **few)
    if call.kind == "channels":
        return function(*msgspec.msgpack.decode(call.argument))
    argument = msgspec.msgpack.decode(call.argument, type=Saved if call.kind == "checks" else tuple[str, ...])
    return list(itertools.islice(function(argument), MOST_VALUES))


if __name__ == "__main__":
    main()
