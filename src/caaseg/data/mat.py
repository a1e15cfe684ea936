"""One label map out of a MATLAB file that may be anything."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caaseg.data.sample import BadFileError


def read_mat(path: Path, key: str) -> NDArray[Any]:
    """The matrix called `key`, (H, W), of whole numbers; BadFileError if there is no such thing."""
    from scipy.io import loadmat

    if not path.is_file():
        raise BadFileError(f"{path}: no such file; expected a MATLAB file with the label map {key!r}")
    try:
        content = loadmat(path, variable_names=[key])
    except Exception as error:  # the reader raises all sorts on damaged files
        raise BadFileError(
            f"{path}: cannot be read as a MATLAB file ({type(error).__name__}: {error}); replace the file"
        ) from error
    if key not in content:
        raise BadFileError(f"{path}: no matrix {key!r} in it; expected the label map under that name")
    values = content[key]
    if not isinstance(values, np.ndarray) or values.ndim != 2 or values.dtype.kind not in "ui" or values.size == 0:
        raise BadFileError(f"{path}: {key!r} is no matrix of whole numbers; expected a label map, height x width")
    return values
