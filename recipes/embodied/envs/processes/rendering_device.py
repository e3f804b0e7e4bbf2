"""The accelerator on which a simulator process renders."""

from __future__ import annotations

import ctypes
import os

_CHOICE = "MUJOCO_EGL_DEVICE_ID"


def render_on_own_accelerator() -> None:
    """Make MuJoCo render with EGL on the accelerator of this process's worker.

    By itself it takes the first one of the node: EGL knows nothing of the variable that hides the others. The driver
    lists accelerators by EGL in the order in which they are counted, and other devices after them. Nothing is chosen
    where the worker has none or several, where the accelerators do not render, or where the file chooses itself.
    """
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if os.environ.get("MUJOCO_GL") != "egl" or _CHOICE in os.environ or not own.isdecimal():
        return
    if int(own) < egl_devices():
        os.environ[_CHOICE] = own


def egl_devices() -> int:
    """Return the number of devices that EGL lists; 0 without EGL."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return 0
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    address = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
    if not address:
        return 0
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(address)
    count = ctypes.c_int(0)
    return count.value if query(0, None, ctypes.byref(count)) else 0
