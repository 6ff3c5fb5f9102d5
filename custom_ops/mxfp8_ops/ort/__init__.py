"""The nodes inside ONNX Runtime: `register` adds the native library to session options, `session` opens a session."""

from mxfp8_ops.ort.package import MIN_ORT
from mxfp8_ops.ort.sessions import DEVICES, DISABLE, FASTER_WITHOUT, check_started, register, session

__all__ = ["DEVICES", "DISABLE", "FASTER_WITHOUT", "MIN_ORT", "check_started", "register", "session"]
