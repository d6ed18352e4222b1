"""For all tests: the process environment of a CPU run, and a table of the time that each test module took."""

from __future__ import annotations

import os
from collections import Counter

import pytest

# The Makefile sets these, too; here they serve a bare `pytest`. They must stand before torch or ray is imported.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds by module, the slowest first (pytest's own closing line comes after this)."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                module = report.nodeid.partition("::")[0]
                seconds[module] += report.duration
                tests[module] += report.when == "call"
    if len(seconds) < 2:
        return
    terminalreporter.section("time by module")
    for module, total in seconds.most_common():
        terminalreporter.write_line(f"{total:8.2f} s  {tests[module]:4d} tests  {module}")
