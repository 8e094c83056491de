"""Our own pickle machine. It moves inert values, and never imports, calls or looks up a file's names.

Limits come first: exceeding one is a problem of the file. Deep nesting needs no recursion, because the machine has
none, and its values (`inert_values`) are never hashed, compared or printed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from ckptguard.formats.pickle.arguments import keys_of, size_of
from ckptguard.formats.pickle.constants import UINT64, PickleProblem
from ckptguard.formats.pickle.containers import Containers
from ckptguard.formats.pickle.inert_values import Call, Global, Kind, PersistentId
from ckptguard.formats.pickle.known_calls import PLAIN_TENSOR, doubtful_name, row_of, what_comes, what_is_set
from ckptguard.formats.pickle.long_values import MARGIN, InMemory, PickleStream

BUDGET = 384 << 20  # about the bytes that opcodes leave; each also costs time
_FRAME_COST = 32
_NO_FRAME = 1 << 64
_STOP = 0x2E
_FRAME = 0x95

# The method of each opcode; other bytes are invalid.
# 82 to 84 are EXT1, EXT2 and EXT4; 97 and 98 NEXT_BUFFER and READONLY_BUFFER.
_TABLE = """
    ( mark           0 pop            1 drop_mark      2 duplicate      F text_float     I text_int
    J binint         K binint1        L text_long      M binint2        N none           P text_persistent
    Q persistent     R reduce         S text_string    T string4        U short_string   V text_unicode
    X unicode        a append         b build          c text_global    d dict_of_mark   } empty_dict
    e appends        g text_get       h binget         i text_instance  j long_binget    l list_of_mark
    ] empty_list     o object_of_mark p text_put       q binput         r long_binput    s set_item
    t tuple_of_mark  ) empty_tuple    u set_items      G binfloat       B bytes4         C short_bytes
    80 proto         81 new_object       82 refused       83 refused       84 refused       85 tuple1
    86 tuple2        87 tuple3        88 true          89 false         8A long1         8B long4
    8C short_unicode 8D unicode8      8E bytes8        8F empty_set     90 add_items       91 frozen_set
    92 new_object_ex 93 stack_global  94 memoize       95 frame         96 bytearray8       97 refused
    98 refused
"""
_WORDS = _TABLE.split()
_OPCODES: dict[int, str] = {
    int(code, 16) if len(code) == 2 else ord(code): name for code, name in zip(_WORDS[::2], _WORDS[1::2], strict=True)
}

# About how many bytes each leaves, at least the worth of its time.
_DEAR = {
    "]}\x8fl\x91d": 176,  # a list and what wraps it
    "pqr\x94": 128,  # an entry of the memo
    "RioQP\x81\x92": 128,  # objects
    "(t\x85\x86\x87": 88,  # a list or tuple
    "bcXVUTBCSL\x8a\x8b\x8c\x8d\x8e\x96\x93": 80,  # texts, bytes, states
    "GFJMI": 48,  # numbers
}
# Only STOP and FRAME cost nothing, by which the machine recognises them.
COSTS: tuple[int, ...] = tuple(
    0 if code in (_STOP, _FRAME) else next((cost for codes, cost in _DEAR.items() if chr(code) in codes), 32)
    for code in range(256)
)


class Pickled(NamedTuple):
    """One pickle: its value, the dotted names and persistent ids in it, and where the next byte is.

    `cost` is its use of the budget. `doubts`: why loading it may fail, or give other numbers. `dropped`: values that
    were made but are not in the result, or are another part of it.
    """

    value: object
    globals: frozenset[str]
    end: int
    persistent: tuple[PersistentId, ...] = ()
    cost: int = 0
    doubts: tuple[str, ...] = ()
    dropped: tuple[object, ...] = ()


def read_pickle(data: bytes | PickleStream, start: int = 0, *, budget: int = BUDGET) -> Pickled:
    """Return the pickle that begins at `start`. PickleProblem for anything else.

    Long byte strings and texts in it are read later, so what it was read from must stay open.
    """
    return run_machine(Machine(data, start), start, budget)


def run_machine(machine: Machine, start: int, budget: int) -> Pickled:
    """Do the same with another machine."""
    try:
        end, cost = machine.run(start, budget)
    except PickleProblem as error:
        error.globals = frozenset(machine.names)
        raise
    except (IndexError, struct.error) as error:
        early = machine.position >= machine.stream.size - 8
        message = "the pickle ends early" if early else f"the pickle is damaged near byte {machine.position}"
        problem = PickleProblem(message, ends_early=early)
        problem.globals = frozenset(machine.names)
        raise problem from error
    finally:
        machine.steps.clear()  # they refer back to the machine, which would keep everything until a collection
    found = machine.value, frozenset(machine.names), end, tuple(machine.persistents), cost
    return Pickled(*found, tuple(machine.doubts), tuple(machine.dropped))


class Machine(Containers):
    """Names and calls. `Constants` explains how opcodes are methods."""

    __slots__ = ("costs", "known", "names", "persistents", "position", "returned", "steps", "value")

    def __init__(self, data: bytes | PickleStream, start: int) -> None:
        super().__init__(data if isinstance(data, PickleStream) else PickleStream(InMemory(data)))
        self.names: set[str] = set()
        self.known: dict[tuple[str, str], Global] = {}
        self.value: object = None
        self.persistents: list[PersistentId] = []
        # Our own table of our own methods.
        self.steps: list[Callable[[int], int]] = [getattr(self, _OPCODES.get(code, "unknown")) for code in range(256)]
        self.costs: tuple[int, ...] = COSTS
        self.returned = 0  # of the budget: what a kind of machine does not keep after all
        self.position = start

    def run(self, start: int, budget: int) -> tuple[int, int]:
        """Execute until STOP. Returns the position after it, and the cost."""
        steps, costs, room = self.steps, self.costs, budget
        frame = _NO_FRAME  # where the current frame ends
        position, soon, data = self.look_from(start)
        stop = soon  # where something is to be done beside the next opcode
        try:
            while room > 0 or self.returned:
                room, self.returned = room + self.returned, 0
                while room > 0:
                    code = data[position]
                    cost = costs[code]
                    if not cost:
                        if code == _STOP:
                            if self.marks or len(self.stack) != 1:
                                raise PickleProblem("the pickle stops with an unfinished value")
                            if frame not in (_NO_FRAME, position + 1):
                                raise PickleProblem("the pickle stops in the middle of a frame")
                            self.value = self.stack.pop()
                            return self.stream.begin + position + 1, budget - room
                        if frame != _NO_FRAME:
                            raise PickleProblem("a frame begins in a frame")
                        frame, cost = self.frame_end(position + 1), _FRAME_COST
                        stop = min(frame, soon)
                    room -= cost
                    position = steps[code](position + 1)
                    if position >= stop:
                        # Python's readers disagree about where such a value continues, and so about everything after
                        # it.
                        if position > frame:
                            raise PickleProblem("a value reaches beyond the end of its frame")
                        frame = _NO_FRAME if position == frame else frame
                        if position >= soon:
                            # What was read of the window is in memory, and costs; what stayed in the file is not.
                            room -= max(position - self.kept_out, 0)
                            here = self.stream.begin + position
                            moved = position
                            position, soon, data = self.look_from(here)
                            frame -= 0 if frame == _NO_FRAME else moved - position
                        stop = min(frame, soon)
        finally:
            self.position = self.stream.begin + position
        raise PickleProblem("more values than ckptguard reads", too_large=True)

    def look_from(self, start: int) -> tuple[int, int, bytes]:
        """Look at the window from this byte on. Returns its position there, where the next one is needed, and the
        window."""
        position = self.stream.move(start)
        data = self.data = self.stream.data
        self.kept_out = 0
        is_last = self.stream.begin + len(data) >= self.stream.size
        return position, _NO_FRAME if is_last else len(data) - MARGIN, data

    def frame_end(self, p: int) -> int:
        end: int = p + 8 + UINT64(self.data, p)[0]
        if self.stream.begin + end > self.stream.size:
            raise PickleProblem("the pickle ends early", ends_early=True)
        return end

    def unknown(self, p: int) -> int:
        raise PickleProblem(f"byte {self.stream.begin + p - 1} is not an opcode (0x{self.data[p - 1]:02x})")

    def refused(self, p: int) -> int:
        raise PickleProblem(
            "the pickle uses the extension registry or out-of-band buffers, which ckptguard never follows"
        )

    # -- names and what would be called

    def text_global(self, p: int) -> int:
        named, p = self.text_name(p)
        self.stack.append(named)
        return p

    def stack_global(self, p: int) -> int:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise PickleProblem("a global's name is computed, so the call is unknown")
        self.stack.append(self.known_global(module, name))
        return p

    def text_name(self, p: int) -> tuple[Global, int]:
        module, p = self.line(p)
        name, p = self.line(p)
        try:
            return self.known_global(module.decode("utf-8"), name.decode("utf-8")), p
        except UnicodeDecodeError as error:
            raise PickleProblem("a global's name is not UTF-8") from error

    def known_global(self, module: str, name: str) -> Global:
        found = self.known.get((module, name))
        if found is None:
            if len(module) + len(name) > 1000:
                raise PickleProblem("a global's name is too long")
            found = self.known[module, name] = Global(module, name)
            self.names.add(found.dotted.encode("utf-8", "backslashreplace").decode("utf-8"))
            found.row = row_of(module, name)
            self.doubt(doubtful_name(module, name, self.protocol))
        return found

    def reduce(self, p: int) -> int:
        args = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], args)
        return p

    def call(self, func: object, args: object, *, new: bool = False) -> Call:
        made = Call(func, args)
        is_short = args == () or (type(func) is Global and func.row is PLAIN_TENSOR)
        if not is_short and not self.take_room(size_of(args)):
            return made  # it is in doubt
        why = what_comes(made, new=new)
        if why is not None:
            self.doubt(why)
        elif not is_short and (not new or made.kind is Kind.FIXED):
            self.check_keys(keys_of(made))
        return made

    def new_object(self, p: int) -> int:
        args = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], args, new=True)
        return p

    def new_object_ex(self, p: int) -> int:
        kwargs, args = self.stack.pop(), self.stack.pop()
        made = self.stack[-1] = self.call(self.stack[-1], args, new=True)
        made.kwargs = kwargs
        return p

    def build(self, p: int) -> int:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Call:
            if target.state is None:
                target.state = state
                self.doubt(what_is_set(target, state))
            else:  # a second state would replace what the first one set only in part: keep both
                target.state = (target.state, state)
                self.doubt("it sets the state of one object twice")
        elif type(target) is Global:
            self.doubt(f"it changes {target.dotted} itself")
        else:
            raise PickleProblem("state is set on a value that is not an object")
        return p

    def text_instance(self, p: int) -> int:
        named, p = self.text_name(p)
        args = self.pop_mark()
        self.stack.append(self.call(named, tuple(args)))
        return p

    def object_of_mark(self, p: int) -> int:
        items = self.pop_mark()
        self.stack.append(self.call(items[0], tuple(items[1:])))
        return p

    def persistent(self, p: int) -> int:
        reference = self.stack[-1] = PersistentId(self.stack[-1])
        self.persistents.append(reference)
        return p
