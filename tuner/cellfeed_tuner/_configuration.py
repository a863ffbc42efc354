"""One point of the space that is searched: settings of a loader by name."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cellfeed import ParameterError

if TYPE_CHECKING:
    from cellfeed import EpochPlan

Setting = bool | int | float | str | None
"""A value of a setting."""

SIZES = {"block_size": 1, "fetch_factor": 1, "num_workers": 0}
"""What every loader has, if it has only one value of it, and what it is at least."""


class Configuration(Mapping[str, Setting]):
    """Settings of a loader that the tuner chooses: a mapping by name, hashable and ordered.

    Three of them have a meaning to the tuner, and always a value: that of a loader which reads
    each row and each minibatch by itself, in the training process, if none is given. If neither a
    block size nor a fetch factor is given, the loader has none, and neither is listed.

    Parameters
    ----------
    block_size
        Rows that lie together and are read together, at least 1.
    fetch_factor
        Minibatches of a fetch, that is of what is read and shuffled at a time, at least 1.
    num_workers
        Worker processes of the loader; 0 reads in the training process.
    others
        Other settings, such as ``num_threads=2``.

    Raises
    ------
    ParameterError
        A size is below what it may be.

    Examples
    --------
    >>> configuration = Configuration(block_size=16, fetch_factor=64, align="chunks")
    >>> configuration.num_workers, configuration["align"]
    (0, 'chunks')
    >>> print(configuration)
    block size 16, fetch factor 64, 0 workers, align chunks
    >>> print(Configuration(num_workers=2, prefetch_factor=4, persistent_workers=True))
    2 workers, persistent workers, prefetch factor 4
    """

    __slots__ = ("_key", "_settings", "_sizes")

    def __init__(
        self,
        *,
        block_size: int | None = None,
        fetch_factor: int | None = None,
        num_workers: int = 0,
        **others: Setting,
    ) -> None:
        sizes = dict(zip(SIZES, (block_size, fetch_factor, num_workers), strict=True))
        self._sizes = {n: SIZES[n] if each is None else each for n, each in sizes.items()}
        for name, value in self._sizes.items():
            if value < SIZES[name]:
                msg = f"`{name} >= {SIZES[name]}` must hold, but got {name}={value}"
                raise ParameterError(msg)
        has_blocks = block_size is not None or fetch_factor is not None
        listed: dict[str, Setting] = {**self._sizes} if has_blocks else {"num_workers": num_workers}
        self._settings = listed | dict(sorted(others.items()))
        self._key = tuple((n, *_rank(each)) for n, each in (self._sizes | self._settings).items())

    def __getitem__(self, name: str) -> Setting:
        return self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and self._key == other._key

    def __lt__(self, other: "Configuration") -> bool:
        return self._key < other._key

    @property
    def block_size(self) -> int:
        """Rows that lie together and are read together."""
        return self._sizes["block_size"]

    @property
    def fetch_factor(self) -> int:
        """Minibatches of a fetch."""
        return self._sizes["fetch_factor"]

    @property
    def num_workers(self) -> int:
        """Worker processes of the loader."""
        return self._sizes["num_workers"]

    def changed(self, **settings: Setting) -> "Configuration":
        """Return the same with other values of some settings."""
        values: dict[str, Any] = {**self, **settings}
        return Configuration(**values)

    @property
    def others(self) -> dict[str, Setting]:
        """Settings beside the three that every loader has."""
        return {name: value for name, value in self.items() if name not in SIZES}

    @property
    def plan_settings(self) -> tuple[Any, ...]:
        """What the order of rows may depend on: all settings but the number of workers.

        The block size, the fetch factor, and each other setting with its name.
        """
        return self.block_size, self.fetch_factor, *self.others.items()

    def is_like(self, other: "Configuration") -> bool:
        """Return whether only the number of workers differs, or what exists only with workers."""
        sizes = (self.block_size, self.fetch_factor) == (other.block_size, other.fetch_factor)
        shared = self.others.keys() & other.others.keys()
        return sizes and all(self[name] == other[name] for name in shared)

    @property
    def fetches_per_round(self) -> int:
        """Fetches that are under way at the same time."""
        return max(1, self.num_workers)

    @property
    def minibatches_per_round(self) -> int:
        """Minibatches after which every worker has delivered one whole fetch."""
        return self.fetch_factor * self.fetches_per_round

    @property
    def minibatches_in_memory(self) -> int:
        """Minibatches that buffers hold at most.

        While one fetch is delivered, the next is read; of those of workers, one more may wait.
        """
        return self.minibatches_per_round * (3 if self.num_workers else 2)

    def cells_to_time(self, batch_size: int) -> int:
        """Return how many cells an epoch needs for whole fetches of it to be timed.

        With workers, these are two of each: the first contains their start.
        """
        return (2 if self.num_workers else 1) * self.minibatches_per_round * batch_size

    def rounds_per_epoch(self, plan: "EpochPlan") -> int:
        """Return how many rounds of whole fetches an epoch has."""
        return plan.n_whole_fetches // self.fetches_per_round

    def __str__(self) -> str:
        sizes = [f"block size {self.block_size}", f"fetch factor {self.fetch_factor}"]
        listed = sizes if "block_size" in self._settings else []
        others = [_in_words(*each) for each in self.others.items()]
        return ", ".join([*listed, workers_in_words(self.num_workers), *others])

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.items())
        return f"Configuration({settings})"


def _in_words(name: str, value: Setting) -> str:
    name = name.replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"


def workers_in_words(number: int) -> str:
    """Return ``1 worker``, ``2 workers`` and so on."""
    return "1 worker" if number == 1 else f"{number} workers"


def _rank(value: Setting) -> tuple[int, float, str]:
    """Return what orders values of any kind: None, then numbers, then words."""
    if value is None:
        return 0, 0.0, ""
    return (2, 0.0, value) if isinstance(value, str) else (1, value, "")
