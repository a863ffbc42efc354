"""docs/how-to/remote.md runs as it stands, on a server of the tests."""

import re
from pathlib import Path

import anndata
import numpy as np
import pandas as pd

TEXT = (Path(__file__).parents[3] / "docs" / "how-to" / "remote.md").read_text()


def test_the_example(tmp_path, s3_server):
    values = np.random.default_rng(0).random((300, 20), np.float32)
    obs = pd.DataFrame({"plate": ["a"] * 300}, index=[str(row) for row in range(300)])
    for name in "ab":
        anndata.AnnData(values, obs=obs).write_h5ad(tmp_path / f"{name}.h5ad")
        s3_server.put(tmp_path / f"{name}.h5ad", f"plates of docs/{name}.h5ad")
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    code = code.replace("s3://bucket/plates/", f"s3://{s3_server.bucket}/plates of docs/")
    code = re.sub(r"storage_options=\{.*?\}", "storage_options=OPTIONS", code)
    found = {"OPTIONS": s3_server.options}
    exec(compile(code, "docs/how-to/remote.md", "exec"), found)
    rows = np.concatenate([each.rows for each in found["dataset"]])
    assert sorted(rows.tolist()) == list(range(600))
