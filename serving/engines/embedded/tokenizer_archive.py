"""The tokenizer of a checkpoint folder as one zip archive, equal for equal files."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from serving.core.errors import ArtefactError

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
# A zip entry without its file's own time, so that the archive's hash names the content alone.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def zip_tokenizer(model_dir: str) -> bytes:
    """Packs those of `FILES` that the folder has.

    Raises:
        ArtefactError: no tokenizer.json.
    """
    folder = Path(model_dir) if model_dir else None
    if folder is None or not (folder / FILES[0]).is_file():
        raise ArtefactError(model_dir or "(no model folder)", f"holds no {FILES[0]}")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in FILES:
            if (folder / name).is_file():
                entry = zipfile.ZipInfo(name, date_time=_EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, (folder / name).read_bytes())
    return buffer.getvalue()
