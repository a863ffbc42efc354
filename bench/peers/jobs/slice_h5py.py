"""The floor on plates: slices through h5py."""

from protocol import Job, Loader, run_loader
from slices import sliced_loader
from storage import open_plates


def open_loader(job: Job) -> Loader:
    return sliced_loader(open_plates(job.plates), job)


if __name__ == "__main__":
    run_loader(open_loader, ["h5py", "scipy", "torch", "numpy"])
