import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellfeed.machine import cpu_quota, memory_headroom

V2 = "sys/fs/cgroup"
HYBRID_V2 = "sys/fs/cgroup/unified"
V1_CPU = "sys/fs/cgroup/cpu,cpuacct"
V1_MEMORY = "sys/fs/cgroup/memory"
V1_UNLIMITED = 9223372036854771712


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def plant_v2(root: Path, path: str, files: dict[str, str]) -> Path:
    below_mount = {f"{V2}/{name}": text for name, text in files.items()}
    return plant(
        root,
        {"proc/self/cgroup": f"0::{path}", f"{V2}/cgroup.controllers": "cpu memory"} | below_mount,
    )


def plant_v1(root: Path, path: str, files: dict[str, str]) -> Path:
    lines = f"9:name=systemd:{path}\n4:memory:{path}\n3:cpuset:/\n2:cpu,cpuacct:{path}"
    return plant(root, {"proc/self/cgroup": lines} | files)


class TestCpuQuota:
    def test_v2(self, tmp_path):
        assert cpu_quota(plant_v2(tmp_path, "/job", {"job/cpu.max": "150000 100000"})) == 1.5

    def test_v2_without_a_limit(self, tmp_path):
        assert cpu_quota(plant_v2(tmp_path, "/job", {"job/cpu.max": "max 100000"})) is None

    @pytest.mark.parametrize(("outer", "inner"), [("200000", "400000"), ("400000", "200000")])
    def test_the_tightest_level_counts(self, tmp_path, outer, inner):
        files = {"a/cpu.max": f"{outer} 100000", "a/b/cpu.max": f"{inner} 100000"}
        assert cpu_quota(plant_v2(tmp_path, "/a/b", files)) == 2

    def test_levels_between_may_be_silent(self, tmp_path):
        files = {"a/cpu.max": "300000 100000", "a/b/c/cpu.max": "max 100000"}
        assert cpu_quota(plant_v2(tmp_path, "/a/b/c", files)) == 3

    def test_a_neighbour_and_a_child_do_not_count(self, tmp_path):
        files = {
            "a/cpu.max": "400000 100000",
            "a/child/cpu.max": "100000 100000",
            "b/cpu.max": "100000 100000",
        }
        assert cpu_quota(plant_v2(tmp_path, "/a", files)) == 4

    def test_v1_with_a_shared_mount(self, tmp_path):
        files = {
            f"{V1_CPU}/job/cpu.cfs_quota_us": "250000",
            f"{V1_CPU}/job/cpu.cfs_period_us": "100000",
        }
        assert cpu_quota(plant_v1(tmp_path, "/job", files)) == 2.5

    def test_v1_nested_under_an_unlimited_group(self, tmp_path):
        files = {
            f"{V1_CPU}/a/cpu.cfs_quota_us": "50000",
            f"{V1_CPU}/a/cpu.cfs_period_us": "100000",
            f"{V1_CPU}/a/b/cpu.cfs_quota_us": "-1",
            f"{V1_CPU}/a/b/cpu.cfs_period_us": "100000",
        }
        assert cpu_quota(plant_v1(tmp_path, "/a/b", files)) == 0.5

    def test_v1_without_a_limit(self, tmp_path):
        files = {
            f"{V1_CPU}/job/cpu.cfs_quota_us": "-1",
            f"{V1_CPU}/job/cpu.cfs_period_us": "100000",
        }
        assert cpu_quota(plant_v1(tmp_path, "/job", files)) is None

    def test_cpuset_is_not_taken_for_cpu(self, tmp_path):
        files = {
            "sys/fs/cgroup/cpuset/cpu.cfs_quota_us": "100000",
            "sys/fs/cgroup/cpuset/cpu.cfs_period_us": "100000",
        }
        assert cpu_quota(plant_v1(tmp_path, "/", files)) is None

    def test_hybrid_takes_the_tighter_hierarchy(self, tmp_path):
        files = {
            "proc/self/cgroup": "2:cpu,cpuacct:/a\n0::/b",
            f"{V1_CPU}/a/cpu.cfs_quota_us": "800000",
            f"{V1_CPU}/a/cpu.cfs_period_us": "100000",
            f"{HYBRID_V2}/cgroup.controllers": "",
            f"{HYBRID_V2}/b/cpu.max": "600000 100000",
        }
        assert cpu_quota(plant(tmp_path, files)) == 6

    def test_a_container_that_sees_the_path_of_its_host(self, tmp_path):
        groups_of_the_container = {"cpu.max": "350000 100000", "docker/cpu.max": "100000 100000"}
        root = plant_v2(tmp_path, "/docker/0123abcd", groups_of_the_container)
        assert cpu_quota(root) == 3.5

    def test_a_path_that_leads_out_of_the_mount(self, tmp_path):
        files = {"sys/fs/elsewhere/cpu.max": "100000 100000", f"{V2}/cpu.max": "700000 100000"}
        root = plant(plant_v2(tmp_path, "/../elsewhere", {}), files)
        assert cpu_quota(root) == 7

    def test_a_path_with_a_colon(self, tmp_path):
        files = {"pod:1/cpu.max": "200000 100000", "cpu.max": "900000 100000"}
        assert cpu_quota(plant_v2(tmp_path, "/pod:1", files)) == 2

    @pytest.mark.parametrize("text", ["", "max", "garbage", "1 2 3", "100000 "])
    def test_text_that_is_no_quota(self, tmp_path, text):
        assert cpu_quota(plant_v2(tmp_path, "/job", {"job/cpu.max": text})) is None

    def test_no_control_groups_at_all(self, tmp_path):
        assert cpu_quota(tmp_path) is None

    def test_membership_without_a_mount(self, tmp_path):
        assert cpu_quota(plant_v1(tmp_path, "/job", {})) is None

    @settings(deadline=None)  # it writes files
    @given(
        st.lists(
            st.none() | st.tuples(st.integers(1_000, 10**7), st.integers(1_000, 10**6)),
            max_size=5,
        )
    )
    def test_equals_the_minimum_along_the_path(self, levels):
        files = {}
        for depth, level in enumerate(levels):
            folder = "g/" * depth
            quota, period = level or ("max", 100_000)
            files[f"{folder}cpu.max"] = f"{quota} {period}"
        with tempfile.TemporaryDirectory() as folder:
            root = plant_v2(Path(folder), "/" + "/".join("g" * (len(levels) - 1)), files)
            oracle = [quota / period for quota, period in filter(None, levels)]
            assert cpu_quota(root) == min(oracle, default=None)


class TestMemoryHeadroom:
    def test_v2_is_the_limit_less_what_is_in_use(self, tmp_path):
        files = {"job/memory.max": "1000", "job/memory.current": "300"}
        assert memory_headroom(plant_v2(tmp_path, "/job", files)) == 700

    def test_v2_without_a_limit(self, tmp_path):
        files = {"job/memory.max": "max", "job/memory.high": "max", "job/memory.current": "300"}
        assert memory_headroom(plant_v2(tmp_path, "/job", files)) is None

    def test_v2_memory_high_counts_as_a_limit(self, tmp_path):
        files = {
            "job/memory.max": "1000",
            "job/memory.high": "800",
            "job/memory.current": "300",
        }
        assert memory_headroom(plant_v2(tmp_path, "/job", files)) == 500

    def test_v2_cached_file_pages_are_free(self, tmp_path):
        files = {
            "job/memory.max": "1000",
            "job/memory.current": "950",
            "job/memory.stat": "anon 50\nfile 900\ninactive_file 600\nactive_file 200\nshmem 100",
        }
        assert memory_headroom(plant_v2(tmp_path, "/job", files)) == 850

    def test_the_level_with_the_least_left_counts_not_the_lowest_limit(self, tmp_path):
        files = {
            "a/memory.max": "5000",
            "a/memory.current": "4900",
            "a/b/memory.max": "1000",
            "a/b/memory.current": "300",
        }
        assert memory_headroom(plant_v2(tmp_path, "/a/b", files)) == 100

    def test_nothing_left_is_zero(self, tmp_path):
        files = {"job/memory.max": "1000", "job/memory.current": "1200"}
        assert memory_headroom(plant_v2(tmp_path, "/job", files)) == 0

    def test_never_more_than_the_limit(self, tmp_path):
        files = {
            "job/memory.max": "1000",
            "job/memory.current": "300",
            "job/memory.stat": "inactive_file 400\nactive_file 0",
        }
        assert memory_headroom(plant_v2(tmp_path, "/job", files)) == 1000

    def test_unknown_usage_leaves_the_limit(self, tmp_path):
        assert memory_headroom(plant_v2(tmp_path, "/job", {"job/memory.max": "1000"})) == 1000

    def test_v1_counts_the_cache_of_the_whole_group(self, tmp_path):
        files = {
            f"{V1_MEMORY}/job/memory.limit_in_bytes": "1000",
            f"{V1_MEMORY}/job/memory.usage_in_bytes": "900",
            f"{V1_MEMORY}/job/memory.stat": (
                "inactive_file 1\nactive_file 2\ntotal_inactive_file 300\ntotal_active_file 400"
            ),
        }
        assert memory_headroom(plant_v1(tmp_path, "/job", files)) == 800

    def test_v1_unlimited_number_is_no_limit(self, tmp_path):
        files = {
            f"{V1_MEMORY}/job/memory.limit_in_bytes": str(V1_UNLIMITED),
            f"{V1_MEMORY}/job/memory.usage_in_bytes": "900",
        }
        assert memory_headroom(plant_v1(tmp_path, "/job", files)) is None

    def test_v1_limit_of_a_parent(self, tmp_path):
        files = {
            f"{V1_MEMORY}/slurm/memory.limit_in_bytes": "2000",
            f"{V1_MEMORY}/slurm/memory.usage_in_bytes": "500",
            f"{V1_MEMORY}/slurm/step/memory.limit_in_bytes": str(V1_UNLIMITED),
            f"{V1_MEMORY}/slurm/step/memory.usage_in_bytes": "400",
        }
        assert memory_headroom(plant_v1(tmp_path, "/slurm/step", files)) == 1500

    def test_v1_container_that_sees_the_path_of_its_host(self, tmp_path):
        files = {
            f"{V1_MEMORY}/memory.limit_in_bytes": "2000",
            f"{V1_MEMORY}/memory.usage_in_bytes": "500",
        }
        assert memory_headroom(plant_v1(tmp_path, "/docker/0123abcd", files)) == 1500

    def test_no_control_groups_at_all(self, tmp_path):
        assert memory_headroom(tmp_path) is None
