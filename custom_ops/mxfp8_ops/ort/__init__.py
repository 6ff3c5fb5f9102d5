"""The nodes inside ONNX Runtime: registers the native library with a session.

sessions.py     registering and making sessions
"""

from mxfp8_ops.ort.sessions import DEVICES, DISABLE, FASTER_WITHOUT, MIN_ORT, register, session

__all__ = ["DEVICES", "DISABLE", "FASTER_WITHOUT", "MIN_ORT", "register", "session"]
