"""Names of the elements of a collection."""

from collections.abc import Sequence

from cellfeed._errors import ParameterError, require_list

__all__ = ["require_elements"]


def require_elements(names: Sequence[str]) -> tuple[str, ...]:
    """Check the names of elements, and return them as a tuple.

    Raises
    ------
    ParameterError
        There are none, one is given twice, or one is not a name of an element.

    Examples
    --------
    >>> require_elements(["X", "layers/counts"])
    ('X', 'layers/counts')
    >>> require_elements(["mod/rna/X", "mod/protein/obsm/X_pca"])
    ('mod/rna/X', 'mod/protein/obsm/X_pca')
    """
    require_list("elements", "names", names)
    for name in names:
        if not _is_element(name):
            msg = (
                "`elements` must be 'X', 'raw/X', 'layers/NAME' or 'obsm/NAME' (in MuData, after "
                "'mod/MODALITY/'), or for token streams 'spans' and 'metadata', but got "
                f"{name!r}; give its path in the file"
            )
            if "/" not in str(name):
                msg += f", such as 'layers/{name}' for a layer"
            raise ParameterError(msg)
    if not names or len(set(names)) < len(names):
        msg = f"`elements` must name at least one element, each once, but got {list(names)!r}"
        raise ParameterError(msg)
    return tuple(names)


def _is_element(name: object) -> bool:
    if not isinstance(name, str):
        return False
    if name in ("spans", "metadata"):
        return True
    folder, _, rest = name.partition("/")
    if folder == "mod":
        modality, _, name = rest.partition("/")
        folder, _, rest = name.partition("/")
        if not modality:
            return False
    return name in ("X", "raw/X") or (folder in ("layers", "obsm") and bool(rest.strip("/")))
