"""What the machine and the environment report, also where that is invalid."""

from __future__ import annotations

import pytest

from fastattn._machine import host


@pytest.fixture
def quota(tmp_path, monkeypatch):
    """The CPU quota that the process finds, given its memberships and the files of its groups."""

    def found(memberships, **files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        read = host._read
        monkeypatch.setattr(host, "_CGROUP_ROOT", str(tmp_path))
        monkeypatch.setattr(
            host, "_read", lambda path: memberships if path == "/proc/self/cgroup" else read(path)
        )
        return host.cpu_quota.__wrapped__()

    return found


V2 = "0::/\n"
V1 = "4:cpu,cpuacct:/\n"


class TestCpuQuota:
    def test_v2(self, quota):
        assert quota(V2, cpu_dot_max="150000 100000\n") == 1.5

    def test_v1(self, quota):
        assert quota(V1, cpu__cpu_dot_cfs_quota_us="50000", cpu__cpu_dot_cfs_period_us="100000") == 0.5

    @pytest.mark.parametrize(
        "text", ["max 100000", "", "max", "100000", "1 2 3", "a b", "100000 0", "0 0", "-1 9", "nan 1"]
    )
    def test_v2_without_a_limit_or_sense(self, quota, text):
        assert quota(V2, cpu_dot_max=text) is None

    @pytest.mark.parametrize(
        "limit, period", [("-1", "100000"), ("100000", "0"), ("", ""), ("x", "1"), ("1", "-1")]
    )
    def test_v1_without_a_limit_or_sense(self, quota, limit, period):
        assert quota(V1, cpu__cpu_dot_cfs_quota_us=limit, cpu__cpu_dot_cfs_period_us=period) is None

    @pytest.mark.parametrize(
        "memberships", ["", "\n", "nonsense\n", "0:\n", "1:cpu\n", "::\n", "0::\n", "\0\0"]
    )
    def test_memberships_without_sense(self, quota, memberships):
        assert quota(memberships) is None

    @pytest.mark.parametrize("memberships", ["nonsense\n0::/\n", "0::/\n\n1:cpu", "3:cpuset:/a:b\n0::/\n"])
    def test_lines_without_sense_are_passed_over(self, quota, memberships):
        assert quota(memberships, cpu_dot_max="200000 100000") == 2
