"""Puts a rewritten decoder and our library into the folder of onnxruntime-genai's model builder.

python configure.py FOLDER MODEL, with MODEL a file of FOLDER.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from mxfp8_ops import native

folder, model = Path(sys.argv[1]), sys.argv[2]
library = native.library_path()
shutil.copy(library, folder)  # onnxruntime-genai looks for it beside genai_config.json
config = json.loads((folder / "genai_config.json").read_text())
decoder = config["model"]["decoder"]
decoder["filename"] = model
decoder["session_options"]["custom_ops_library"] = library.name
(folder / "genai_config.json").write_text(json.dumps(config, indent=4))
