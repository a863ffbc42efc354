"""Where other projects document their names, so that pages link there and build without a network.

sphinx.ext.intersphinx would fetch an inventory of each project at every build.
"""

import builtins

_PYTHON = "https://docs.python.org/3/library"
_TORCH = "https://docs.pytorch.org/docs/stable"
# A name, or the beginning of names that ends with a dot: its page, to which `#name` is added.
# In a page, {} stands for the name.
_PAGES = {
    "anndata.AnnData": "https://anndata.readthedocs.io/en/stable/generated/{}.html",
    "anndata.experimental.AnnCollection": "https://anndata.readthedocs.io/en/stable/generated/{}.html",
    "numpy.dtype": "https://numpy.org/doc/stable/reference/generated/{}.html",
    "numpy.ndarray": "https://numpy.org/doc/stable/reference/generated/{}.html",
    "numpy.typing.ArrayLike": "https://numpy.org/doc/stable/reference/typing.html",
    "numpy.typing.NDArray": "https://numpy.org/doc/stable/reference/typing.html",
    "pandas.DataFrame": "https://pandas.pydata.org/docs/reference/api/{}.html",
    "pandas.Series": "https://pandas.pydata.org/docs/reference/api/{}.html",
    "scipy.sparse.csr_array": "https://docs.scipy.org/doc/scipy/reference/generated/{}.html",
    "scipy.sparse.csr_matrix": "https://docs.scipy.org/doc/scipy/reference/generated/{}.html",
    "torch.Tensor": f"{_TORCH}/tensors.html",
    "torch.device": f"{_TORCH}/tensor_attributes.html",
    "torch.dtype": f"{_TORCH}/tensor_attributes.html",
    "torch.utils.data.DataLoader": f"{_TORCH}/data.html",
    "torch.utils.data.Dataset": f"{_TORCH}/data.html",
    "torch.utils.data.IterableDataset": f"{_TORCH}/data.html",
    "matplotlib.figure.Figure": "https://matplotlib.org/stable/api/figure_api.html",
    "pathlib.Path": f"{_PYTHON}/pathlib.html",
    **dict.fromkeys(
        ("bool", "bytes", "dict", "float", "frozenset", "int", "list", "range", "set", "slice",
         "str", "tuple", "type"), f"{_PYTHON}/stdtypes.html"
    ),
    **dict.fromkeys(("None",), f"{_PYTHON}/constants.html"),
    "collections.abc.": f"{_PYTHON}/collections.abc.html",
    "typing.": f"{_PYTHON}/typing.html",
}  # fmt: skip


def url_of(name):
    """Return where a name of another project is documented, or None."""
    page = _PAGES.get(name) or _PAGES.get(name[: name.rfind(".") + 1] or None)
    own = getattr(builtins, name, None)
    if page is None and isinstance(own, type) and issubclass(own, BaseException):
        page = f"{_PYTHON}/exceptions.html"
    return page and f"{page.format(name)}#{name}"
