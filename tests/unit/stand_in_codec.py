"""The simulated device with a codec of a test's own, in a process of its own: which codec serves a
device type is settled once."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

from warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]

# The simulated device with a codec that asks for the check; `wrong(table)` may break the kernels.
PROGRAM = """
import ctypes, sys
sys.path[:0] = [{root!r} + "/python", {root!r} + "/tests/simdev", {root!r} + "/tests"]
import torch, simdev
from memswap import _C as native

class Table(ctypes.Structure):  # memswap_codec
    _fields_ = [("version", ctypes.c_uint32), ("name", ctypes.c_char_p),
                *[(name, ctypes.c_void_p) for name in ("encode", "decode", "message")],
                ("spare_tiles", ctypes.c_uint32), ("check_first", ctypes.c_uint32),
                ("workspace_bytes", ctypes.c_uint64), ("reports", ctypes.c_uint32),
                ("maps_host", ctypes.c_uint32)]

CODE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
api = ctypes.pythonapi
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
alive = []
api.Py_IncRef(ctypes.py_object(alive))  # as long as the process: a codec's table never goes

def table_of(capsule):
    table = Table.from_buffer_copy(Table.from_address(
        api.PyCapsule_GetPointer(capsule, b"memswap_codec")))
    alive.append(table)
    return table

def capsule_of(table):
    return api.PyCapsule_New(ctypes.addressof(table), b"memswap_codec", None)

def replace(table, name, after):
    original = CODE(getattr(table, name))
    def call(jobs, count, launch):
        code = original(jobs, count, launch)
        return after(jobs) or code
    alive.append(CODE(call))
    setattr(table, name, ctypes.cast(alive[-1], ctypes.c_void_p))

def pointer(jobs, offset):
    return ctypes.cast(jobs + offset, ctypes.POINTER(ctypes.c_void_p))[0]

{wrong}
host = table_of(native.codec_capsule(torch.device("cpu")))
wrong(host)
table = table_of(simdev.codec_on_streams(capsule_of(host)))
table.{field} = 1
native.register_codec(simdev.NAME, capsule_of(table))
device = torch.device(simdev.NAME, 0)
"""

RIGHT = """
def wrong(table): pass
"""


def run(wrong: str, program: str, field: str = "check_first") -> str:
    """Run `program` behind the preparation above and return what it printed.

    Args:
        wrong: defines `wrong(table)`, which may break the host's codec that the device's runs.
        program: what to run.
        field: of memswap_codec, set to 1.
    """
    source = PROGRAM.format(root=str(ROOT), wrong=wrong, field=field) + textwrap.dedent(program)
    done = warm_python().run(source, timeout_s=900)
    assert done.returncode == 0, f"{ended(done.returncode)}\n{done.stdout}\n{done.stderr[-8000:]}"
    return done.stdout


def ended(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
