"""A Python that has imported what takes long, and forks for each script. Started by `forked` with the number of a
socket and the modules to import.

Each script has a process, a ``__main__`` and an end of the interpreter of its own, as if Python had been started for
it. Nothing but imports happens here before a fork.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import types


def serve(control):
    """Fork for every request; what to run, in the child; None where nobody is left who could ask."""
    running = {}
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, woken, *running], [], [])
        if woken in ready:
            woken.recv(4096)
        for link, pid in list(running.items()):
            if link in ready:  # whoever asked is gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            else:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                with contextlib.suppress(OSError):
                    link.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            del running[link]
            link.close()
        if control not in ready:
            continue
        head, places, _, _ = socket.recv_fds(control, 4, 4)
        if not head:
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)
            return None
        body = b""
        while len(body) < int.from_bytes(head, "big"):
            body += control.recv(65536)
        link = socket.socket(fileno=places[0])
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, place in enumerate(places[1:]):
                os.dup2(place, number)
            for place in places[1:]:
                os.close(place)
            for ours in (control, wake, woken, link, *running):
                ours.close()
            return json.loads(body)
        for place in places[1:]:
            os.close(place)
        link.sendall(b"%d\n" % pid)
        running[link] = pid


def run(request):
    """Run a script as Python does: with its own arguments, environment, folder and path."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.argv[:] = request["argv"]
    sys.path[:1] = request["path"]
    main = types.ModuleType("__main__")
    main.__file__ = request["name"]
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # a new Python draws numbers of its own; `random` sees to it itself
    try:
        exec(compile(request["code"], request["name"], "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        try:
            importlib.import_module(_name)
        except ModuleNotFoundError:
            raise
        except ImportError:  # an old torch lacks a name: what needs this module says so
            pass
    gc.collect()
    gc.freeze()  # what is never looked at again is never copied
    _request = serve(socket.socket(fileno=int(sys.argv[1])))
    if _request is not None:
        run(_request)
